"""The routes of the API: an address → a function of `look`, whose answer is sent as JSON. docs/page.md lists them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import lightningrl
from lightningrl.look import look_at
from lightningrl.look.checkup import checkup_of
from lightningrl.look.journal import START
from lightningrl.look.opened import settings_of
from lightningrl.look.runs import details_of
from lightningrl.ui.ask import Ask

Answer: TypeAlias = Callable[[Ask], Awaitable[Any]]


async def runs(ask: Ask) -> Any:
    found = [await book.run() for book in ask.shelf.books().values()]
    latest = sorted(found, key=lambda run: -run.began_at)
    return {"version": lightningrl.__version__, "runs": [run.as_json() for run in latest]}


async def run(ask: Ask) -> Any:
    book = ask.book
    config, _ = settings_of(book.folder / "config.toml")
    counts = await (await ask.opened()).records.count() if await _has_records(ask) else {}
    return {**(await book.run()).as_json(), **details_of(book.folder, config), "counts": counts, "splits": []}


async def metrics(ask: Ask) -> Any:
    news = ask.book.metrics.after(ask.query.get("after", START))
    events = [event.as_json() for event in ask.book.events()]
    return {"cursor": news.cursor, "reset": news.reset, "rows": news.rows, "events": events, "intervals": {}}


async def health(ask: Ask) -> Any:
    return checkup_of(ask.book.folder).for_page()


async def rollout(ask: Ask) -> Any:
    view = await look_at(await ask.opened(), ask.names["rollout"])
    told = view.as_json()
    for call in told["calls"]:
        del call["tokens"]
    return told


async def _has_records(ask: Ask) -> bool:
    return (await ask.book.run()).rollouts is not None


API: Mapping[str, Answer] = {
    "/api/runs": runs,
    "/api/runs/{run}": run,
    "/api/runs/{run}/metrics": metrics,
    "/api/runs/{run}/health": health,
    "/api/runs/{run}/rollouts/{rollout}": rollout,
}
"""Address → answer. Names in braces have no slash; any other character may be percent-encoded."""
