"""Can a store of an older LightningRL be opened and used?"""

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightningrl.errors import UserError
from lightningrl.store.conformance import begin, call, rollout, same
from lightningrl.store.postgres import PostgresStore
from lightningrl.store.postgres_connection import PostgresConnection, address, plain
from lightningrl.store.postgres_schema import MIGRATIONS as POSTGRES_MIGRATIONS
from lightningrl.store.schema import MIGRATIONS
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Branch, Call, Reward, Rollout, Sampling, Task, hash_token
from tests.postgres import Postgres

TOKEN = "lrl-abcdefghijklmnopqrstuvwxyz012345"
"""A token as in the first schema: 24 bytes."""

OLD = f"""
    INSERT INTO inputs VALUES (1, x'00', '{{"question":"wie groß?"}}');
    INSERT INTO rollouts
        VALUES (1, 'a/0', 'a', 't', 1, 'train', 'succeeded', 1, 30.0, '{{"temperature":0.5}}', 'a/0.2'),
        (2, 'a/1', 'a', 't', 1, 'train', 'running', 1, 30.0, '{{}}', NULL);
    INSERT INTO attempts VALUES (1, 'a/0.1', 'a/0', 1, 'other', 'failed', 'w', 5.0, 'no', 'null', 1.0, 2.0),
        (2, 'a/0.2', 'a/0', 2, 'third', 'succeeded', 'w', 5.0, NULL, '{{"sql":"SELECT 1"}}', 2.0, 3.0),
        (3, 'a/1.1', 'a/1', 1, '{TOKEN}', 'running', 'w', 9e9, NULL, 'null', 2.0, NULL);
    INSERT INTO rewards VALUES (1, 'a/0.2', NULL, 'final', 1.0, 'grader'), (2, 'a/0.2', 'c-0', 'format', 0.5, 'air');
"""

CALLS = (
    "id, attempt_id, idx, parent_call_id, agent, policy, policy_version, dialect, request, response, base_call_id,"
    " shared, prompt_delta, completion_ids, logprobs, sampling, finish_reason, capture, capture_reason, started_at,"
    " ended_at"
)


def old_call(
    connection: sqlite3.Connection,
    attempt_id: str,
    index: int,
    *,
    base: str | None,
    parent: str | None,
    shared: int,
    delta: list[int],
) -> None:
    seed = 2**63 + index
    limits = '"temperature":0.5,"top_p":1.0,"top_k":0,"max_tokens":9'
    sampling = f'{{{limits},"stop":[";"],"stop_token_ids":[2],"seed":{seed}}}'
    row = (
        *(f"{'c' if attempt_id == 'a/0.2' else 'd'}-{index}", attempt_id, index, parent, "writer", "policy", 3),
        *(
            "openai.chat",
            '{"messages":["naïve\\n"]}',
            f'{{"n":{index},"f":1.0}}',
            base,
            shared,
            np.array(delta, "<i4").tobytes(),
        ),
        *(
            np.array([10, index], "<i4").tobytes(),
            np.array([-0.1, -2.0], "<f4").tobytes(),
            sampling,
            "stop",
            "bridged",
            None,
            1.5,
            2.5,
        ),
    )
    connection.execute(f"INSERT INTO calls ({CALLS}) VALUES ({', '.join('?' * 21)})", row)


@pytest.fixture
def first_schema(tmp_path: Path) -> Path:
    connection = sqlite3.connect(tmp_path / "s.db")
    connection.executescript(f"PRAGMA journal_mode = WAL; {MIGRATIONS[0]} PRAGMA user_version = 1; {OLD}")
    old_call(connection, "a/0.2", 0, base=None, parent=None, shared=0, delta=[1, 2**30, 3])
    old_call(connection, "a/0.2", 1, base="c-0", parent="c-0", shared=4, delta=[5])
    old_call(connection, "a/0.2", 2, base="c-1", parent=None, shared=2, delta=[8])
    old_call(connection, "a/1.1", 0, base=None, parent=None, shared=0, delta=[4, 5])
    connection.commit()
    connection.close()
    return tmp_path / "s.db"


def expected(call_id: str, attempt_id: str, index: int, prompt: list[int], *, parent: str | None = None) -> Call:
    return Call(
        id=call_id,
        attempt_id=attempt_id,
        index=index,
        parent_call_id=parent,
        agent="writer",
        policy="policy",
        policy_version=3,
        dialect="openai.chat",
        request={"messages": ["naïve\n"]},
        response={"n": index, "f": 1.0},
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array([10, index], np.int32),
        logprobs=np.array([-0.1, -2.0], np.float32),
        sampling=Sampling(temperature=0.5, max_tokens=9, stop=(";",), stop_token_ids=(2,), seed=2**63 + index),
        finish_reason="stop",
        capture="bridged",
        started_at=1.5,
        ended_at=2.5,
    )


async def test_a_file_of_the_first_schema_reads_as_it_was_written(first_schema: Path) -> None:
    store = await SQLiteStore.open(first_schema)
    task = Task(id="t", input={"question": "wie groß?"}, split="train")
    ended = Rollout(
        id="a/0",
        group_id="a",
        task=task,
        status="succeeded",
        timeout_s=30.0,
        sampling={"temperature": 0.5},
        accepted_attempt_id="a/0.2",
    )
    assert await store.rollouts() == [
        ended,
        Rollout(id="a/1", group_id="a", task=task, status="running", timeout_s=30.0),
    ]
    attempts = await store.attempts(["a/0", "a/1"])
    assert [(a.id, a.rollout_id, a.number, a.token_hash, a.status) for a in attempts] == [
        ("a/0.1", "a/0", 1, hash_token("other"), "failed"),
        ("a/0.2", "a/0", 2, hash_token("third"), "succeeded"),
        ("a/1.1", "a/1", 1, hash_token(TOKEN), "running"),
    ]
    assert (attempts[1].output, attempts[1].ended_at) == ({"sql": "SELECT 1"}, 3.0)
    final, step = (
        Reward(attempt_id="a/0.2", value=1.0),
        Reward(attempt_id="a/0.2", value=0.5, name="format", source="air", call_id="c-0"),
    )
    assert await store.rewards(["a/0.2"]) == [final, step]
    kept = await store.calls(["a/0.2", "a/1.1"])
    assert all(
        same(one, other)
        for one, other in zip(
            kept,
            [
                expected("c-0", "a/0.2", 0, [1, 2**30, 3]),
                expected("c-1", "a/0.2", 1, [1, 2**30, 3, 10, 5], parent="c-0"),
                expected("c-2", "a/0.2", 2, [1, 2**30, 8]),
                expected("d-0", "a/1.1", 0, [4, 5]),
            ],
            strict=True,
        )
    )
    await store.close()


async def test_many_rollouts_of_the_first_schema_are_counted_and_searched(first_schema: Path) -> None:
    """Its logprobs take 4 bytes each, and its bodies are plain text."""
    store = await SQLiteStore.open(first_schema)
    outcomes = (await store.outcomes(after=0)).rows
    assert [(row.id, row.calls, row.sampled_tokens) for row in outcomes] == [("a/1", 1, 2), ("a/0", 3, 6)]
    assert await store.said("NAïVE", places=[row.place for row in outcomes]) == {1: "naïve", 2: "naïve"}
    await store.close()


async def test_a_file_of_the_first_schema_goes_on(first_schema: Path) -> None:
    """An agent that runs while the program is replaced keeps its token."""
    store = await SQLiteStore.open(first_schema)
    found = await store.attempt_by_token(TOKEN)
    assert found is not None
    attempt: Attempt = found[1]
    more = [
        call(attempt, 1, [4, 5, 10, 0, 6], [7], parent="d-0"),
        call(attempt, 2, [4, 5, 10, 0, 6, 7, 8], [9], parent=f"{attempt.id}/1"),
    ]
    for one in more:
        await store.append(one)
    assert all(same(one, other) for one, other in zip(more, (await store.calls([attempt.id]))[1:], strict=True))
    await store.finish(attempt.id, "succeeded")
    await store.close()
    again = await SQLiteStore.open(first_schema)
    assert [r.accepted_attempt_id for r in await again.rollouts()] == ["a/0.2", "a/1.1"]
    assert sqlite3.connect(first_schema).execute("PRAGMA foreign_key_check").fetchall() == []
    await again.close()


async def test_a_reader_opens_a_file_of_the_first_schema_and_leaves_it_as_it_is(first_schema: Path) -> None:
    before = first_schema.read_bytes()
    reader = await SQLiteStore.read(first_schema)
    assert [r.id for r in await reader.rollouts()] == ["a/0", "a/1"]
    assert same((await reader.calls(["a/0.2"]))[0], expected("c-0", "a/0.2", 0, [1, 2**30, 3]))
    assert await reader.count() == {"succeeded": 1, "running": 1}
    await reader.close()
    assert first_schema.read_bytes() == before


async def test_a_reader_refuses_a_file_of_a_newer_program(tmp_path: Path) -> None:
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(UserError, match="use the LightningRL that wrote it"):
        await SQLiteStore.read(tmp_path / "newer.db")


async def test_tokens_of_the_third_schema_are_hashed(tmp_path: Path) -> None:
    """That schema stored our tokens as the bytes of their secret, and other tokens as text."""
    connection = sqlite3.connect(tmp_path / "s.db")
    connection.executescript(" ".join(MIGRATIONS[:3]) + "PRAGMA user_version = 3;")
    connection.execute("INSERT INTO inputs VALUES (1, x'00', '{}')")
    connection.execute("INSERT INTO rollouts VALUES (1, 'r', 'g', 't', 1, 'train', 'running', 1, 30.0, '{}', NULL)")
    for number, token in enumerate((b"\xfb\xfe\xfb" * 6, "given"), start=1):
        connection.execute(
            "INSERT INTO attempts VALUES (?, 1, ?, ?, 'running', 'w', 9e9, NULL, NULL, 1.0, NULL)",
            (number, number, token),
        )
    connection.commit()
    connection.close()
    store = await SQLiteStore.open(tmp_path / "s.db")
    for number, token in enumerate(("lrl-" + "-_77" * 6, "given"), start=1):
        found = await store.attempt_by_token(token)
        assert found is not None and found[1].number == number
    await store.close()


async def test_a_store_from_before_branches_takes_branches(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "s.db")
    connection.executescript(" ".join(MIGRATIONS[:3]))
    connection.create_function("hashed", 1, lambda token: token)
    connection.executescript(" ".join(MIGRATIONS[3:6]) + "PRAGMA user_version = 6;")
    connection.execute("INSERT INTO inputs VALUES (1, x'00', '{}')")
    columns = "id, group_id, task_id, input_id, split, status, max_attempts, timeout_s, sampling"
    connection.execute(
        f"INSERT INTO rollouts ({columns}) VALUES ('old', 'g', 't', 1, 'train', 'queued', 1, 9.0, '{{}}')"
    )
    connection.commit()
    connection.close()
    store = await SQLiteStore.open(tmp_path / "s.db")
    branch = Branch(attempt_id="old.1", call_id="old.1/0")
    await store.enqueue([replace(rollout("new"), branch=branch)])
    [(old, trunk), (new, attempt)] = await store.claim("w", limit=2, lease_s=60)
    assert (old.branch, new.branch) == (None, branch)
    await store.append(call(trunk, 0, [1], [2]), replace(call(attempt, 0, [1], [2]), replays="old.1/0"))
    assert [c.replays for c in await store.calls([trunk.id, attempt.id])] == [None, "old.1/0"]
    await store.close()


async def test_a_store_in_postgresql_from_before_branches_is_migrated_when_it_is_opened(postgres: Postgres) -> None:
    """A reader leaves it as it is, and says how it is migrated: it has no rights to do that."""
    place = address(postgres.url().removeprefix("postgresql://"))
    before = PostgresConnection(lambda: plain(place))
    before.execute(f'BEGIN; CREATE SCHEMA "{place.schema}"; CREATE TABLE version (number bigint NOT NULL)')
    before.execute(f"INSERT INTO version VALUES (1); {POSTGRES_MIGRATIONS[0]}; COMMIT")
    before.close()
    url = postgres.url(place.schema).removeprefix("postgresql://")
    with pytest.raises(UserError, match="has schema `1`, this program reads `2`\nhint: continue its run once"):
        await PostgresStore.read(url)
    store = await PostgresStore.open(url)
    await store.enqueue([replace(rollout("b"), branch=Branch(attempt_id="a.1", call_id=None))])
    attempt = await begin(store, "b")
    await store.append(replace(call(attempt, 0, [1], [2]), replays="a.1/0"))
    await store.close()
    reader = await PostgresStore.read(url)
    assert [r.branch for r in await reader.rollouts()] == [Branch(attempt_id="a.1", call_id=None)]
    assert [c.replays for c in await reader.calls([attempt.id])] == ["a.1/0"]
    await reader.close()
