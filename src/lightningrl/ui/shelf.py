"""Which runs does the page show? Those in the given folders, looked up again for each list of runs."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from lightningrl.config import Config
from lightningrl.errors import LightningError, Missing
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


class Book:
    """One run. Its store is opened once, when it is first needed. A run that is deleted, and started again in the same
    folder, is another one.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self._files = files_of(folder)
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

    async def table_if_any(self) -> Table | None:
        """As `table`; None: the run has no records, or they cannot be read."""
        if not self.has_records:
            return None
        try:
            return await self.table()
        except LightningError:  # the list of runs says why
            return None

    async def queue(self) -> Queue:
        """Its workers and what waits for them, as they are now. Raises `UserError` as `opened` does."""
        run, table = await self.opened(), await self.table()
        self._queue = self._queue or Queue(run.records, table.columns)
        return self._queue

    @property
    def current(self) -> bool:
        """Whether the folder still has this run."""
        return self._files == files_of(self.folder)

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
        """The run in a line; computed again only if its files have changed, or its records could not be read."""
        now = signature(self.folder)
        if self._run is None or self._run[0] != now or self._run[1].error:
            counts = error = None
            try:
                counts = await self._counts() if self.has_records else None
            except LightningError as caught:
                error = caught.message
            rows = self.metrics.rows()
            self._run = now, run_of(self.folder, self.config, rows, name=self.name, counts=counts, error=error)
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


def files_of(folder: Path) -> tuple[Any, ...]:
    """Which files hold the records and the settings of the run in this folder? None: it has none yet."""
    found, config = records_at(folder), folder / "config.toml"
    stat = found[0].stat() if found else None
    return stat and (stat.st_dev, stat.st_ino), config.stat().st_mtime_ns if config.is_file() else None


class Shelf:
    """The runs that the page shows."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths`: folders of runs, files in them, and folders that have such folders in them."""
        self._paths = [path.parent if path.is_file() else path for path in paths]
        self._books: dict[Path, Book] = {}
        self._known: dict[str, Book] = {}
        self._closing = set[asyncio.Task[None]]()

    def books(self) -> dict[str, Book]:
        """Name → run. Folders of the same name get a number."""
        books = [self._book(folder) for folder in self._folders()]
        self._known = {book.name: book for book in books}
        return self._known

    def book(self, name: str) -> Book:
        """Folders are searched only for a name that is not known. Raises `Missing`."""
        book = self._known.get(name)
        if book is not None and is_run(book.folder):
            return self._book(book.folder)
        book = self.books().get(name)
        if book is None:
            raise Missing(
                f"there is no run `{name}` here", hint="it may have been moved or deleted: see the list of runs"
            )
        return book

    async def close(self) -> None:
        for book in self._books.values():
            await book.close()
        await asyncio.gather(*self._closing)

    def _book(self, folder: Path) -> Book:
        """The run that this folder has now."""
        book = self._books.get(folder)
        if book is None:
            book = self._books[folder] = Book(self._free(folder.name), folder)
        elif not book.current:
            closing = asyncio.ensure_future(book.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            book = self._books[folder] = self._known[book.name] = Book(book.name, folder)
        return book

    def _free(self, name: str) -> str:
        """The name, or the name with the first number that makes it unique."""
        taken = {book.name for book in self._books.values()}
        names = (name, *(f"{name}~{number}" for number in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _folders(self) -> list[Path]:
        found: dict[Path, None] = {}
        for folder in self._paths:
            inner = [folder] if is_run(folder) else sorted(below for below in folder.glob("*") if is_run(below))
            found |= dict.fromkeys(below.resolve() for below in inner)
        return list(found)
