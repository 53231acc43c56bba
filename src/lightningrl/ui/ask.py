"""One request to the API: the names in its path and the filters in its query, checked where they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightningrl.errors import UserError
from lightningrl.ui.shelf import Book, Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request."""

    shelf: Shelf
    names: Mapping[str, str]
    """Parts of the path: `run`, `rollout`, …; decoded."""
    query: Mapping[str, str]

    @property
    def book(self) -> Book:
        """The run that the path names. Raises `Missing`."""
        return self.shelf.book(self.names["run"])

    def whole(self, name: str, *, least: int = 0) -> int | None:
        """A whole number of the query, or of the path; None: it is not given. Raises `UserError`."""
        given = self.names.get(name) or self.query.get(name)
        if not given:
            return None
        if not given.isdecimal() or len(given) > 15 or int(given) < least:
            raise UserError(f"`{name}` is `{given:.80}`", hint=f"give a whole number from {least} on")
        return int(given)
