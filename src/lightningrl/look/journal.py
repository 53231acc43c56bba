"""The rows of a run's `metrics.jsonl`: all of them, or those that are new since a cursor.

A run appends rows. A run that is resumed writes the file anew, and leaves out the rows of steps that it repeats. A
cursor names the rows before it by a checksum, so a reader notices that its rows are no longer those of the file. A
line that is no row, e.g. after a full disk, is left out.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""`kind` (`step`, `exam`, `began`, `void`), `step`, and what was measured."""
START = "0-0"
"""The cursor before the first row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The rows after a cursor."""

    cursor: str
    """Pass it to the next `after`."""
    reset: bool
    """The rows before the cursor have changed: `rows` are all rows of the file."""
    rows: tuple[Row, ...]


class MetricsFile:
    """A `metrics.jsonl` that may grow. It reads each row once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def rows(self) -> list[Row]:
        """All rows, without a last line that is not complete."""
        self._read()
        return list(self._rows)

    def after(self, cursor: str = START) -> News:
        """The rows after a cursor that an earlier call has returned."""
        self._read()
        known = self._cursors.get(cursor)
        return News(cursor=next(reversed(self._cursors)), reset=known is None, rows=tuple(self._rows[known or 0 :]))

    def _begin(self) -> None:
        self._rows: list[Row] = []
        self._cursors = {START: 0}  # cursor → number of rows before it, in order
        self._checksum = 0
        self._offset = 0  # of the last line that was read
        self._last = b""

    def _read(self) -> None:
        """Read what is new. The last line is read again, to notice that the file was written anew."""
        if not self._path.exists():
            self._begin()
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
            if not text.startswith(self._last):
                self._begin()
                file.seek(0)
                text = file.read()
        for line in text[len(self._last) :].splitlines(keepends=True):
            if line.endswith(b"\n"):
                self._add(line)

    def _add(self, line: bytes) -> None:
        if (row := _row(line)) is not None:
            self._rows.append(row)
        self._checksum = zlib.crc32(line, self._checksum)
        self._cursors[f"{len(self._rows)}-{self._checksum:08x}"] = len(self._rows)
        self._offset += len(self._last)
        self._last = line


def _row(line: bytes) -> Row | None:
    """The row in this line; None: it has none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row and isinstance(row.get("step"), int) else None
