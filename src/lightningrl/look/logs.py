"""What an attempt printed: its lines in the run's agents.log, which `runner/printed.py` has marked."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightningrl.runner.printed import mark

KEPT = 64 * 2**10
"""Bytes of an attempt's output that are shown: the last ones."""
CHUNK = 4 * 2**20
"""Bytes that are read at a time."""
CHUNKS = 16
"""The last so many chunks of a file are read: twice what the log keeps (`LOG_LIMIT` of `runner/pool.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """What one attempt wrote to stdout and stderr, by lines in the order in which they ended."""

    text: str
    truncated: bool
    """Whether this is only the end of it."""


def logs_of(folder: Path, attempt_id: str) -> Logs | None:
    """What an attempt printed. None: nothing, or it is not in this run's folder, or it is there no more."""
    found, truncated = bytearray(), False
    for path in (folder / "agents.log.1", folder / "agents.log"):
        for chunk in _chunks(path):
            for piece in _pieces(chunk, attempt_id):
                found += piece
            if len(found) > KEPT:
                del found[:-KEPT]
                truncated = True
    if truncated:  # begin with a whole line, if there is one
        del found[: found.find(b"\n", 0, len(found) - 1) + 1]
    return Logs(text=found.decode(errors="replace"), truncated=truncated) if found else None


def _chunks(path: Path) -> Iterator[bytes]:
    """The end of the file in chunks of whole lines. Each begins with a line break."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - CHUNKS * CHUNK))
        for _ in range(CHUNKS):
            if not (data := file.read(CHUNK)):
                return
            yield b"\n" + data + file.readline(CHUNK)


def _pieces(chunk: bytes, attempt_id: str) -> Iterator[bytes]:
    """The attempt's output, in lines and parts of lines."""
    ended, goes_on = mark(attempt_id), mark(attempt_id, ended=False)
    assert len(ended) == len(goes_on)
    start = b"\n" + ended[:-1]
    at = chunk.find(start)
    while at >= 0:
        begin = at + 1 + len(ended)
        end = chunk.find(b"\n", begin)
        end = len(chunk) if end < 0 else end
        before = chunk[at + 1 : begin]
        if before == ended:
            yield chunk[begin:end] + b"\n"
        elif before == goes_on:
            yield chunk[begin:end]
        at = chunk.find(start, end)
