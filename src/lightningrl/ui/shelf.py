"""Which runs does the page show? Those in the given folders, looked up again for each request."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.look import opened
from lightningrl.look.events import Event, Events
from lightningrl.look.journal import START, MetricsFile
from lightningrl.look.opened import Opened, settings_of
from lightningrl.look.queue import Queue
from lightningrl.look.redaction import changed_settings, redacted
from lightningrl.look.runs import Run, is_run, run_of, signature
from lightningrl.look.table import Table
from lightningrl.store.place import records_at
from lightningrl.types import RolloutStatus


class Missing(UserError):
    """There is nothing at this address."""


class Book:
    """One run. Its store is opened once, when it is first needed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._config: Config | None = None
        self._settings: Mapping[str, Any] | None = None
        self._opened: Opened | None = None
        self._table: Table | None = None
        self._queue: Queue | None = None
        self._run: tuple[tuple[Any, ...], Run] | None = None
        self._events, self._cursor = Events({}), START

    async def opened(self) -> Opened:
        """The run, open for reading. Raises `UserError` if it has no records yet."""
        async with self._opening:
            if self._opened is None:
                self._opened = await self._stack.enter_async_context(opened(self.folder))
            return self._opened

    async def table(self) -> Table:
        """All of its rollouts, as they are now. Raises `UserError` as `opened` does."""
        run = await self.opened()
        if self._table is None:
            self._table = Table(run.records)
            self._stack.push_async_callback(self._table.close)
        await self._table.refresh()
        return self._table

    async def queue(self) -> Queue:
        """Its workers and what waits for them, as they are now. Raises `UserError` as `opened` does."""
        run, table = await self.opened(), await self.table()
        self._queue = self._queue or Queue(run.records, table.columns)
        return self._queue

    @property
    def has_records(self) -> bool:
        """Whether its store exists. The settings of a run are written first."""
        return records_at(self.folder) is not None

    @property
    def config(self) -> Config | None:
        """Its settings; None if it has none, or if they cannot be read. They are written once."""
        if self._config is None:
            self._config, _ = settings_of(self.folder / "config.toml")
        return self._config

    @property
    def settings(self) -> Mapping[str, Any]:
        """`settings` without secrets, and those that are `changed`."""
        if self._settings is None and self.config is not None:
            self._settings = {"settings": redacted(self.config), "changed": changed_settings(self.config)}
        return self._settings or {"settings": None, "changed": {}}

    async def run(self) -> Run:
        """The run in a line; computed again only if its files have changed."""
        now = signature(self.folder)
        if self._run is None or self._run[0] != now:
            counts = await self._counts() if self.has_records else None
            line = run_of(self.folder, self.config, self.metrics.rows(), name=self.name, counts=counts)
            self._run = now, line
        return self._run[1]

    async def _counts(self) -> Mapping[RolloutStatus, int]:
        """Number of its rollouts by status. A store that nobody looks at yet is closed again."""
        if self._opened is not None:
            return await self._opened.records.count()
        async with opened(self.folder) as run:
            return await run.records.count()

    def events(self) -> list[Event]:
        """What happened so far. Each row of the metrics is looked at once."""
        news = self.metrics.after(self._cursor)
        if news.reset or self._cursor == START:
            self._events = Events({} if self.config is None else self.config.learners())
        self._events.add(news.rows)
        self._cursor = news.cursor
        return self._events.found

    async def close(self) -> None:
        await self._stack.aclose()


class Shelf:
    """The runs that the page shows."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths`: folders of runs, and folders that have such folders in them."""
        self._paths = paths
        self._books: dict[Path, Book] = {}

    def books(self) -> dict[str, Book]:
        """Name → run. Folders of the same name get a number."""
        found: dict[str, Book] = {}
        for folder in self._folders():
            book = self._books.get(folder)
            if book is None:
                book = self._books[folder] = Book(self._free(folder.name), folder)
            found[book.name] = book
        return found

    def book(self, name: str) -> Book:
        """Raises `Missing`."""
        book = self.books().get(name)
        if book is None:
            raise Missing(
                f"there is no run `{name}` here", hint="it may have been moved or deleted: see the list of runs"
            )
        return book

    async def close(self) -> None:
        for book in self._books.values():
            await book.close()

    def _free(self, name: str) -> str:
        """The name, or the name with the first number that makes it unique."""
        taken = {book.name for book in self._books.values()}
        names = (name, *(f"{name}~{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _folders(self) -> list[Path]:
        found: dict[Path, None] = {}
        for path in self._paths:
            folder = path if path.is_dir() else path.parent
            inner = [folder] if is_run(folder) else sorted(below for below in folder.glob("*") if is_run(below))
            found |= dict.fromkeys(below.resolve() for below in inner)
        return list(found)
