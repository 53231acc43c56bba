"""Marks what attempts print, so that each attempt's lines can be found in the log that they share.

A line of an attempt is `[ATTEMPT] text`. A part of a line that goes on in the attempt's next part is `[ATTEMPT]+text`.
Output that belongs to no attempt stays as it is. So does output that does not pass through `sys.stdout` or
`sys.stderr`, e.g. of C libraries and of processes that a function starts.
"""

import io
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, TextIO, TypeAlias

from lightningrl.runner import attach, watchdog

LONGEST = 8 * 2**10
"""Bytes of a line that may wait for its end. Beyond, they are written as a part of the line."""
BEGINNING = 16 * 2**10
"""Bytes of a program's output that are written at once."""
END = 44 * 2**10
"""Bytes of a program's output that are kept beyond these, and are written at its end."""

Descriptor: TypeAlias = Literal[1, 2]
"""stdout or stderr."""


def mark(attempt_id: str, *, ended: bool = True) -> bytes:
    """What is in front of an attempt's line. `ended`: False for a part of a line that goes on."""
    return f"[{attempt_id}]{' ' if ended else '+'}".encode()


class Printed:
    """What the attempts of this process print.

    Lines are written when they end; parts of lines when they are flushed or long, or when their attempt ends.
    """

    def __init__(self) -> None:
        self._unended: dict[str, dict[tuple[Descriptor, int], bytes]] = {}
        """Attempt → (stream, thread) → the beginning of a line. Threads share no line, so no lock is needed."""

    def install(self) -> None:
        """Replace `sys.stdout` and `sys.stderr`. Like those of `python -u`, they hold nothing back."""
        sys.stdout = self._stream(1, sys.stdout)
        sys.stderr = self._stream(2, sys.stderr)

    def begin(self, attempt_id: str) -> None:
        self._unended[attempt_id] = {}

    def end(self, attempt_id: str) -> None:
        """Keep no lines for the attempt any more: what it prints from now on is written at once."""
        for (descriptor, _), rest in list(self._unended.pop(attempt_id).items()):
            _write_part(descriptor, attempt_id, rest)

    def write(self, descriptor: Descriptor, data: bytes, *, attempt_id: str) -> None:
        unended = self._unended.get(attempt_id)
        *lines, rest = (self._taken(descriptor, attempt_id) + data).split(b"\n")
        if lines:
            before = mark(attempt_id)
            os.write(descriptor, b"".join(before + line + b"\n" for line in lines))
        if unended is None or len(rest) > LONGEST:
            _write_part(descriptor, attempt_id, rest)
        else:
            unended[descriptor, threading.get_ident()] = rest

    def flush(self, descriptor: Descriptor, *, attempt_id: str) -> None:
        """Write the beginning of a line that this thread has printed."""
        _write_part(descriptor, attempt_id, self._taken(descriptor, attempt_id))

    def _taken(self, descriptor: Descriptor, attempt_id: str) -> bytes:
        """The beginning of a line that this thread has printed; it is kept no more."""
        return self._unended.get(attempt_id, {}).pop((descriptor, threading.get_ident()), b"")

    def _stream(self, descriptor: Descriptor, before: TextIO) -> io.TextIOWrapper:
        stream = _Stream(self, descriptor, name=before.name)
        return io.TextIOWrapper(stream, encoding=before.encoding, errors=before.errors, write_through=True)


class Excerpt:
    """A program's output: its beginning is written at once, its end when the program has ended, and no more."""

    def __init__(self, write: Callable[[Descriptor, bytes], None]) -> None:
        self._write = write
        self._room = BEGINNING
        self._end = b""
        self._left_out = 0

    def add(self, descriptor: Descriptor, data: bytes) -> None:
        now, later = data[: self._room], data[self._room :]
        self._room -= len(now)
        if now:
            self._write(descriptor, now)
        if later:
            kept = (self._end + later)[-END:]
            self._left_out += len(self._end) + len(later) - len(kept)
            self._end = kept

    def close(self) -> None:
        if self._left_out:
            self._write(1, f"\n… {self._left_out} bytes left out …\n".encode())
        self._write(1, self._end)


class _Stream(io.RawIOBase):
    """Bytes for one descriptor. They belong to the attempt in whose context they are written."""

    def __init__(self, printed: Printed, descriptor: Descriptor, *, name: str) -> None:
        super().__init__()
        self.name = name
        self._printed = printed
        self._descriptor: Descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any, /) -> int:
        found, owner = bytes(data), _owner()
        if not owner:
            return os.write(self._descriptor, found)
        self._printed.write(self._descriptor, found, attempt_id=owner)
        return len(found)

    def flush(self) -> None:
        if owner := _owner():
            self._printed.flush(self._descriptor, attempt_id=owner)


def _owner() -> str:
    """The attempt whose code runs; "" if none does. Thread pools hand on `identity` alone."""
    if job := watchdog.running.get():
        return job
    caller = attach.identity.get()
    return "" if caller is None else caller.attempt_id


def _write_part(descriptor: Descriptor, attempt_id: str, part: bytes) -> None:
    if part:
        os.write(descriptor, mark(attempt_id, ended=False) + part + b"\n")
