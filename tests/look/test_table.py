"""Does the table of all rollouts say what the records say, and does it keep up with a run that goes on?"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import UserError
from lightningrl.look import table as table_module
from lightningrl.look.selection import query_of
from lightningrl.look.table import Table
from lightningrl.store import Store, open_records
from lightningrl.store.examples import call, rollout
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Reward, Task
from tests.look.branched import AT_2, OTHER, TRUNK, VOID_AT_3, branched_run


@asynccontextmanager
async def known_run() -> AsyncIterator[tuple[Store, Table]]:
    """Step 1: two groups of two, of which one rollout fails. The exam after step 1. A rollout that waits."""
    store = await SQLiteStore.open(":memory:")
    table = Table(store)
    tasks = [Task(id=f"t{n}", input={"question": word}, split="train") for n, word in enumerate(("apples", "pears"))]
    train = [
        replace(rollout(f"train-00000-{group:03d}-{member:02d}", group_id=f"g{group}"), task=tasks[group])
        for group in range(2)
        for member in range(2)
    ]
    exam = replace(rollout("exam-00001-greedy-0000"), task=replace(tasks[0], split="heldout"))
    await store.enqueue([*train, exam, rollout("waits", group_id="x")])
    for number, (_, attempt) in enumerate(await store.claim("w", limit=5, lease_s=60)):
        await store.append(*(call(attempt, index, [1], [2] * (number + 1)) for index in range(number)))
        if number == 3:
            await store.finish(attempt.id, "failed", error="AgentError: it broke\nTraceback")
        else:
            reward = Reward(attempt_id=attempt.id, value=number / 4)
            await store.finish(attempt.id, "succeeded", rewards=[reward])
    try:
        yield store, table
    finally:
        await table.close()
        await store.close()


async def asked(table: Table, **parameters: str) -> dict[str, Any]:
    await table.refresh()
    return await table.as_json(query_of(parameters))


def ids(answer: dict[str, Any]) -> list[str]:
    return [row["id"].replace("train-00000-", "") for row in answer["rows"]]


async def test_a_row_says_how_its_rollout_ended() -> None:
    async with known_run() as (store, table):
        answer = await asked(table, sort="queue")
        [attempt] = await store.attempts(["train-00000-001-00"])
        assert attempt.ended_at is not None
        assert answer["rows"][2] == {
            "id": "train-00000-001-00",
            "group": "g1",
            "kind": "train",
            "step": 1,
            "split": "train",
            "task": "t1",
            "status": "succeeded",
            "attempts": 1,
            "reward": 0.5,
            "calls": 2,
            "tokens": 6,
            "error": None,
            "seconds": round(attempt.ended_at - attempt.started_at, 3),
            "began_at": attempt.started_at,
            "said": None,
        }
        assert answer["rows"][3]["error"] == "AgentError: it broke" and answer["rows"][3]["reward"] is None
        assert [(row["kind"], row["step"]) for row in answer["rows"][4:]] == [("exam", 1), ("run", None)]
        assert answer["rows"][5]["began_at"] is answer["rows"][5]["seconds"] is None


async def test_branches_are_told_from_other_rollouts_of_their_step(tmp_path: Path) -> None:
    """What was played back is a call of theirs, but not a sampled token. Their rewards count in the step's interval."""
    await branched_run(tmp_path)
    reader = await open_records(f"sqlite://{tmp_path / 'store.sqlite'}")
    table = Table(reader)
    rows = {row["id"]: row for row in (await asked(table))["rows"]}
    kinds = {rollout_id: row["kind"] for rollout_id, row in rows.items()}
    assert kinds == {TRUNK: "train", OTHER: "train", **dict.fromkeys([*AT_2, VOID_AT_3], "branch")}
    assert {row["step"] for row in rows.values()} == {1}
    told = [(rows[name]["calls"], rows[name]["tokens"]) for name in (TRUNK, *AT_2, VOID_AT_3)]
    assert told == [(3, 3), (2, 1), (3, 2), (2, 0)]
    await table.close()
    await reader.close()


async def test_an_answer_counts_all_that_match() -> None:
    async with known_run() as (store, table):
        answer = await asked(table, limit="2", offset="1")
        assert ids(answer) == ["exam-00001-greedy-0000", "001-01"]
        assert (answer["total"], answer["offset"], answer["steps"], answer["complete"]) == (6, 1, [1, 1], True)
        assert answer["counts"] == {"queued": 1, "succeeded": 4, "failed": 1} == await store.count()
        assert answer["splits"] == ["train", "heldout"]
        assert answer["errors"] == [{"error": "AgentError: it broke", "count": 1, "example": "train-00000-001-01"}]
        edges, counts = answer["histogram"]["edges"], answer["histogram"]["counts"]
        assert (len(edges), edges[0], edges[-1], sum(counts)) == (len(counts) + 1, 0.0, 1.0, 4)
        assert [edge for edge, count in zip(edges, counts, strict=False) if count] == [0.0, 0.25, 0.5, 0.95]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"step": "1"}, ["exam-00001-greedy-0000", "001-01", "001-00", "000-01", "000-00"]),
        ({"split": "heldout"}, ["exam-00001-greedy-0000"]),
        ({"split": "nowhere"}, []),
        ({"status": "failed"}, ["001-01"]),
        ({"reward": "0..0.25"}, ["000-01", "000-00"]),
        ({"reward": "0.5"}, ["001-00"]),
        ({"group": "g0"}, ["000-01", "000-00"]),
        ({"task": "PEARS"}, ["001-01", "001-00"]),
        ({"task": "t0", "split": "train"}, ["000-01", "000-00"]),
        ({"error": "IT Broke"}, ["001-01"]),
        ({"sort": "reward"}, ["000-00", "000-01", "001-00", "exam-00001-greedy-0000", "waits", "001-01"]),
        ({"sort": "-reward"}, ["exam-00001-greedy-0000", "001-00", "000-01", "000-00", "waits", "001-01"]),
        ({"sort": "-tokens", "limit": "2"}, ["exam-00001-greedy-0000", "001-01"]),
        ({"sort": "calls", "limit": "2"}, ["waits", "000-00"]),
        ({"sort": "-task"}, ["001-01", "001-00", "exam-00001-greedy-0000", "000-01", "000-00", "waits"]),
        ({"sort": "step", "limit": "1"}, ["waits"]),
        ({"sort": "began", "offset": "5"}, ["waits"]),
        ({"sort": "-seconds", "offset": "5"}, ["waits"]),
    ],
)
async def test_filters_and_sorts(parameters: dict[str, str], expected: list[str]) -> None:
    async with known_run() as (_, table):
        assert ids(await asked(table, **parameters)) == expected


async def test_counts_histogram_and_errors_leave_out_their_own_filter() -> None:
    """So they say what another choice there would find."""
    async with known_run() as (_, table):
        answer = await asked(table, status="succeeded", reward="0.5", split="train")
        assert ids(answer) == ["001-00"]
        assert answer["counts"] == {"succeeded": 1}
        assert sum(answer["histogram"]["counts"]) == 3
        answer = await asked(table, status="succeeded", split="train")
        assert answer["counts"] == {"queued": 1, "succeeded": 3, "failed": 1}
        assert (await asked(table, error="nothing", split="train"))["errors"] != []


@pytest.mark.parametrize(
    "parameters", [{"sort": "size"}, {"status": "lost"}, {"step": "x"}, {"limit": "-1"}, {"reward": "good"}]
)
def test_a_value_that_cannot_be_read_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(UserError) as refused:
        query_of(parameters)
    assert next(iter(parameters.values())) in refused.value.message


async def test_the_table_follows_a_run() -> None:
    async with known_run() as (store, table):
        await table.refresh()
        [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
        await store.append(call(attempt, 0, [1], [2, 3]))
        answer = await asked(table, status="running")
        assert [(row["id"], row["calls"], row["tokens"]) for row in answer["rows"]] == [("waits", 1, 2)]
        await store.append(call(attempt, 1, [1], [2, 3]))
        assert (await asked(table, status="running"))["rows"][0]["calls"] == 2, "a call changes no status"
        await store.finish(attempt.id, "succeeded")
        await store.enqueue([rollout("new")])
        answer = await asked(table)
        assert ids(answer)[:2] == ["new", "waits"] and answer["total"] == 7
        assert answer["cursor"] == (await store.changes()).cursor


async def test_the_latest_rollouts_are_there_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first answer does not wait for the whole table, and the rest follows without being asked for."""
    monkeypatch.setattr(table_module, "PAGE", 10)
    store = await SQLiteStore.open(":memory:")
    await store.enqueue([rollout(f"r{number:04d}") for number in range(1000)])
    table = Table(store)
    while not table.columns.ids:
        await table.refresh(timeout_s=0)
    answer = await table.as_json(query_of({}))
    assert ids(answer)[0] == "r0999" and not answer["complete"] and answer["total"] < 1000
    await asyncio.gather(*(table.refresh(timeout_s=30) for _ in range(3)))
    answer = await table.as_json(query_of({"sort": "queue"}))
    assert ids(answer)[0] == "r0000" and answer["complete"] and answer["total"] == 1000
    await table.close()
    await store.close()


async def test_the_interval_of_a_step_counts_groups_not_rollouts() -> None:
    """Two groups of equal rollouts are two observations. A group that was replaced is left out."""
    store = await SQLiteStore.open(":memory:")
    rewards = {"train-00000-000": (0.0, 0.0), "train-00000-retry1-000": (0.0, 1.0), "train-00000-001": (0.0, 0.5)}
    await store.enqueue([rollout(f"{g}-{n}", group_id=g) for g in rewards for n in range(2)])
    for one, attempt in await store.claim("w", limit=9, lease_s=60):
        value = rewards[one.group_id][int(one.id[-1])]
        await store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=value)])
    table = Table(store)
    await table.refresh()
    low, high = table.intervals()[1]
    assert math.isclose((low + high) / 2, (0 + 1 + 0 + 0.5) / 4)
    assert math.isclose(high - low, 2 * 12.706 * 0.125)
    await table.close()
    await store.close()


async def test_a_run_without_rewards_has_no_intervals() -> None:
    store = await SQLiteStore.open(":memory:")
    await store.enqueue([rollout("train-00000-000-00", group_id="g")])
    table = Table(store)
    await table.refresh()
    assert table.intervals() == {}
    await table.close()
    await store.close()
