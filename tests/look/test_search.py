"""Does a search in what was said find all hits in the end, and never again what it has searched?"""

from dataclasses import replace

import pytest

from lightningrl.look import search as search_module
from lightningrl.look.search import Search
from lightningrl.look.selection import Query, matching, query_of
from lightningrl.look.table import Table
from lightningrl.store import Store
from lightningrl.store.examples import call, rollout
from lightningrl.store.sqlite import SQLiteStore


async def run_of(count: int) -> Store:
    """Rollouts with one call each. Every tenth says `needle`."""
    store = await SQLiteStore.open(":memory:")
    await store.enqueue([rollout(f"r{number:03d}") for number in range(count)])
    for number, (_, attempt) in enumerate(await store.claim("w", limit=count, lease_s=60)):
        said = "a needle here" if number % 10 == 0 else "hay"
        await store.append(replace(call(attempt, 0, [1], [2]), response={"content": said}))
        await store.finish(attempt.id, "succeeded")
    return store


async def test_a_search_goes_on_where_it_stopped_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "CALLS", 30)
    store = await run_of(100)
    table = Table(store)
    await table.refresh(timeout_s=30)
    search, newest = Search(store, table.columns), matching(table.columns, Query())
    found = await search.look("Needle", among=newest, slice_s=0)
    assert (found.done, found.of, set(found.said)) == (30, 100, {91, 81, 71})
    done = [found.done]
    while found.done < found.of:
        found = await search.look("Needle", among=newest, slice_s=0)
        await search.look("another text", among=newest, slice_s=0)
        done.append(found.done)
    assert done == [30, 60, 90, 100]
    assert found.said == dict.fromkeys(range(1, 100, 10), "a needle here")
    await table.close()
    await store.close()


async def test_a_question_is_answered_from_the_table() -> None:
    store = await run_of(40)
    table = Table(store)
    await table.refresh(timeout_s=30)
    answer = await table.as_json(query_of({"text": "NEEDLE", "limit": "2"}))
    assert [(row["id"], row["said"]) for row in answer["rows"]] == [
        ("r030", "a needle here"),
        ("r020", "a needle here"),
    ]
    assert (answer["total"], answer["searched"]) == (4, {"done": 40, "of": 40})
    answer = await table.as_json(query_of({"text": "needle", "status": "failed"}))
    assert (answer["total"], answer["searched"]) == (0, {"done": 0, "of": 0})
    await store.enqueue([rollout("new")])
    [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
    await store.append(call(attempt, 0, [1], [2]))
    await table.refresh()
    assert (await table.as_json(query_of({"text": "NEEDLE"})))["total"] == 4
    await store.append(replace(call(attempt, 1, [1], [2]), response={"content": "needles"}))
    await table.refresh()
    answer = await table.as_json(query_of({"text": "NEEDLE"}))
    assert [row["said"] for row in answer["rows"]][:2] == ["needles", "a needle here"]
    assert answer["searched"] == {"done": 41, "of": 41}
    await table.close()
    await store.close()
