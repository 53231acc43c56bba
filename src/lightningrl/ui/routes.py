"""The routes of the API: an address → a function of `look`, whose answer is sent as JSON. docs/page.md lists them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import lightningrl
from lightningrl.look import look_at, look_at_call, look_at_group
from lightningrl.look.checkup import checkup_of
from lightningrl.look.journal import START
from lightningrl.look.runs import Run, result_of, resume_command
from lightningrl.look.selection import query_of
from lightningrl.ui.ask import Ask
from lightningrl.ui.shelf import Book

Answer: TypeAlias = Callable[[Ask], Awaitable[Any]]
AT_ONCE = 16
"""Number of stores that are opened together to count rollouts."""


async def runs(ask: Ask) -> Any:
    turns = asyncio.Semaphore(AT_ONCE)

    async def line(book: Book) -> Run | None:
        async with turns:
            with suppress(OSError):  # deleted meanwhile, or not for this user
                return await book.run()

    found = await asyncio.gather(*map(line, ask.shelf.books().values()))
    latest = sorted(filter(None, found), key=lambda run: -run.began_at)
    return {"version": lightningrl.__version__, "runs": [run.as_json() for run in latest]}


async def run(ask: Ask) -> Any:
    book = ask.book
    table = await book.table_if_any()
    splits = [] if table is None else table.columns.splits.texts
    line = (await book.run()).as_json()
    end = {"result": result_of(book.folder), "resume_command": resume_command(book.folder)}
    return {**line, **book.settings, **end, "splits": splits}


async def metrics(ask: Ask) -> Any:
    book = ask.book
    news = book.metrics.after(ask.query.get("after", START))
    events = [event.as_json() for event in book.events()]
    table = await book.table_if_any()
    found = {} if table is None else table.intervals()
    return {
        "cursor": news.cursor,
        "reset": news.reset,
        "rows": news.rows,
        "events": events,
        "intervals": {step - 1: interval for step, interval in found.items()},  # steps count from 0 in the rows
        "complete": table is None or table.complete,
    }


async def health(ask: Ask) -> Any:
    return checkup_of(ask.book.folder).for_page()


async def rollouts(ask: Ask) -> Any:
    return await (await ask.book.table()).as_json(query_of(ask.query))


async def rollout(ask: Ask) -> Any:
    attempt = ask.whole("attempt", least=1)
    view = await look_at(await ask.book.opened(), ask.names["rollout"], attempt=attempt, texts=False)
    return view.as_json(tokens=False)


async def call(ask: Ask) -> Any:
    number, attempt = ask.whole("call", least=1), ask.whole("attempt", least=1)
    assert number is not None  # it is in the path
    detail = await look_at_call(await ask.book.opened(), ask.names["rollout"], number, attempt=attempt)
    return detail.as_json()


async def group(ask: Ask) -> Any:
    return (await look_at_group(await ask.book.opened(), ask.names["group"])).as_json()


async def workers(ask: Ask) -> Any:
    return (await (await ask.book.queue()).look()).as_json()


API: Mapping[str, Answer] = {
    "/api/runs": runs,
    "/api/runs/{run}": run,
    "/api/runs/{run}/metrics": metrics,
    "/api/runs/{run}/health": health,
    "/api/runs/{run}/groups/{group}": group,
    "/api/runs/{run}/rollouts": rollouts,
    "/api/runs/{run}/rollouts/{rollout}": rollout,
    "/api/runs/{run}/rollouts/{rollout}/calls/{call}": call,
    "/api/runs/{run}/workers": workers,
}
"""Address → answer. Names in braces have no slash; any other character may be percent-encoded."""
