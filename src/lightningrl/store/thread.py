"""One thread owns a connection to the database. All work that has queued up meanwhile goes into one commit.

`run(work)` hands a function of the connection to the thread, and returns after the commit that contains it: returned
means durable. If one work raises, the group is rolled back and run again, each work in a savepoint of its own, so only
the failed one is undone. If the connection breaks in this, it is done once more. Works may therefore be called up to
three times. Without failures there are no savepoints.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lightningrl.errors import StoreError, StoreFailed
from lightningrl.store.connection import Connection, Driver

T = TypeVar("T")
Work = Callable[[Connection], Any]

GROUP = 512
"""Maximum number of works in one commit. It bounds the time that the first one waits for the last."""


@dataclass(slots=True, kw_only=True)
class _Job:
    work: Work
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: Exception | None = None


class Events(Protocol):
    """Tells the owner of a thread about its transactions. Called on the thread, before `run` returns."""

    def began(self, connection: Connection) -> None: ...

    def ending(self, connection: Connection) -> None:
        """The transaction is about to be committed. An error undoes it, as one of a work does."""
        ...

    def committed(self) -> None: ...

    def undone(self) -> None:
        """Some or all work since the last commit was rolled back."""
        ...


class DatabaseThread:
    """Owns one connection. With `events`, works are grouped into commits. Without, they are plain reads."""

    def __init__(self, connection: Connection, *, driver: Driver, name: str, events: Events | None) -> None:
        self._connection = connection
        self._driver = driver
        self._events = events
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Connection], T]) -> T:
        if self._closed:
            raise StoreFailed("the store is closed")
        loop = asyncio.get_running_loop()
        job = _Job(work=work, future=loop.create_future(), loop=loop)
        self._jobs.put(job)
        return await job.future

    async def close(self) -> None:
        """Finish all queued work, then close the connection. A second call changes nothing."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while self._serve_group():
            pass
        self._connection.close()

    def _serve_group(self) -> bool:
        """Do the queued work, at least one. False after the last."""
        batch = [self._jobs.get()]
        while len(batch) < GROUP and not self._jobs.empty():
            batch.append(self._jobs.get())
        jobs = [job for job in batch if job is not None]
        if self._events is None:
            for job in jobs:
                self._do(job)
        elif jobs:
            self._commit(jobs, self._events)
        _answer(jobs)
        return None not in batch

    def _commit(self, jobs: list[_Job], events: Events) -> None:
        try:
            self._work(jobs, events)
            self._connection.execute("COMMIT")
            events.committed()
        except Exception as error:  # noqa: BLE001 - no work of this group may be acknowledged; the thread must survive
            failed = StoreFailed(f"the store could not commit: {error}", hint=self._driver.hint)
            failed.__cause__ = error
            for job in jobs:
                job.error = failed
            self._undo(events)

    def _work(self, jobs: list[_Job], events: Events) -> None:
        """Begin a transaction, and do all works in it: again if the connection breaks, since nothing is committed."""
        failure = None
        for step in (self._together, self._one_by_one, self._one_by_one):
            self._connection.execute(self._driver.begin)
            try:
                step(jobs, events)
                events.ending(self._connection)
                return
            except Exception as error:  # noqa: BLE001 - the next pass finds the work that failed, or succeeds
                failure = error
                self._undo(events)
        assert failure is not None
        raise failure

    def _undo(self, events: Events) -> None:
        if self._connection.in_transaction:
            with suppress(self._driver.error):  # on a lost connection: the database has rolled back
                self._connection.execute("ROLLBACK")
        events.undone()

    def _together(self, jobs: list[_Job], events: Events) -> None:
        events.began(self._connection)
        for job in jobs:
            job.result = job.work(self._connection)

    def _one_by_one(self, jobs: list[_Job], events: Events) -> None:
        for job in jobs:
            job.error = None
            self._connection.execute("SAVEPOINT work")
            self._do(job)
            if job.error is not None:
                self._connection.execute("ROLLBACK TO work")
                events.undone()
            self._connection.execute("RELEASE work")

    def _do(self, job: _Job) -> None:
        try:
            job.result = job.work(self._connection)
        except self._driver.refused as error:
            job.error = StoreError(f"the store refused a record: {error}")
        except self._driver.error as error:
            job.error = StoreFailed(f"the store failed: {error}", hint=self._driver.hint)
        except Exception as error:  # noqa: BLE001 - the caller gets the error; the thread must survive
            job.error = error


def _answer(jobs: list[_Job]) -> None:
    """Resolve the futures, with one wake-up for each event loop."""
    for loop in {job.loop for job in jobs}:
        mine = [job for job in jobs if job.loop is loop]
        try:
            loop.call_soon_threadsafe(_resolve, mine)
        except RuntimeError:  # the loop was closed meanwhile, so no coroutine waits
            continue


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue  # the waiting coroutine was cancelled; the work is done all the same
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
