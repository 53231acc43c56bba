"""A sequence of records that a notebook shows as a table, and that becomes a data frame of pandas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from lightningrl.errors import UserError
from lightningrl.notebook.html import figure, frame, line, table

if TYPE_CHECKING:
    import pandas
    from markupsafe import Markup

Row = TypeVar("Row", covariant=True)


class Rows(Sequence[Row]):
    """Records in order. It is a list that does not change."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        plain: Callable[[Any], Mapping[str, Any]],
        shown: Sequence[str],
        above: Callable[[], Markup] | None = None,
        empty: str,
    ) -> None:
        """`plain`: the columns of a row; `shown`: those that the table has; `empty`: what it says without rows."""
        self._rows = tuple(rows)
        self._plain, self._shown, self._above, self._empty = plain, shown, above, empty

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Row | Self:
        if isinstance(index, int):
            return self._rows[index]
        part = copy(self)
        part._rows = self._rows[index]
        return part

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        """The columns of the table as text."""
        names, cells = self._cells()
        texts = [[figure(cell).replace("\n", "⏎") for cell in row] for row in [names, *cells]]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
        return "\n".join(lines) if self._rows else self._empty

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each record, with all of its fields. Needs pandas."""
        return frame_of([self._plain(row) for row in self._rows])

    def _repr_html_(self) -> str:
        above = [] if self._above is None else [self._above()]
        return str(frame(*above, self.table()))

    def table(self) -> Markup:
        """The table alone, as HTML."""
        return table(*self._cells()) if self._rows else line(self._empty, dim=True)

    def _cells(self) -> tuple[list[str], list[list[object]]]:
        """(columns, cells of each row), without columns that are empty in all rows."""
        plain = [self._plain(row) for row in self._rows]
        names = [name for name in self._shown if any(row[name] is not None for row in plain)]
        return names, [[row[name] for name in names] for row in plain]


def frame_of(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A data frame with a column for every name in the rows. Raises `UserError` without pandas."""
    try:
        import pandas
    except ImportError:
        raise UserError("`pandas` is not installed", hint="pip install pandas") from None
    return pandas.DataFrame([dict(row) for row in rows])
