"""Is the writer's memory of earlier calls bounded, and can all of it be read again?"""

import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.errors import StoreError
from lightningrl.store import recent
from lightningrl.store.conformance import begin, call, rollout, same
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward, Sampling


async def claimed(store: SQLiteStore, count: int) -> list[Attempt]:
    await store.enqueue([rollout(f"r{n}") for n in range(count)])
    return [attempt for _, attempt in await store.claim("w", limit=count, lease_s=600)]


def conversation(attempt: Attempt, turns: int, *, system: str = "be brief", task: int = 0) -> list[Call]:
    """The turns of an agent, each with the whole history."""
    prompt, parent = [*range(60 + len(system) // 4), task], None
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"task {task}"},
    ]
    calls: list[Call] = []
    for index in range(turns):
        answer = {"role": "assistant", "content": f"{attempt.id} says {index}"}
        bare = call(attempt, index, prompt, [index, 7], parent=parent)
        calls.append(replace(bare, request={"messages": list(messages)}, response={"message": answer}))
        messages += [answer, {"role": "user", "content": "and then?"}]
        prompt, parent = [*prompt, index, 7, 8], bare.id
    return calls


async def come_back(store: SQLiteStore, conversations: list[list[Call]]) -> bool:
    kept = await store.calls([calls[0].attempt_id for calls in conversations])
    return all(same(one, other) for one, other in zip((c for calls in conversations for c in calls), kept, strict=True))


def rows_of(path: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    found = connection.execute(statement).fetchall()
    connection.close()
    return found


async def test_memory_is_given_back_when_attempts_end(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempts = await claimed(store, 40)
    conversations = [conversation(attempt, 6, task=n) for n, attempt in enumerate(attempts)]
    for calls in conversations:
        for one in calls:
            await store.append(one)
    full = store._recent.size
    for attempt in attempts:
        await store.finish(attempt.id, "succeeded")
    assert store._recent.size < full / 2  # the rest are first calls, which may become bases of other attempts
    assert store._recent._contents.size == 0
    assert store._recent._known == 0
    assert store._recent._roots.size <= recent.ROOTS_LIMIT
    assert await come_back(store, conversations)
    await store.close()


async def test_memory_that_is_too_small_costs_time_but_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "CONTENT_LIMIT", 3000)
    monkeypatch.setattr(recent, "ROOTS_LIMIT", 3000)
    monkeypatch.setattr(recent, "BOOKS_LIMIT", 10)
    monkeypatch.setattr(recent, "KINDS_LIMIT", 1)
    store = await SQLiteStore.open(tmp_path / "s.db")
    conversations = [conversation(attempt, 8, task=n) for n, attempt in enumerate(await claimed(store, 10))]
    conversations = [[replace(one, agent=str(n % 3)) for one in calls] for n, calls in enumerate(conversations)]
    for turn in zip(*conversations, strict=True):
        for one in turn:
            await store.append(one)
            assert store._recent._contents.size <= 3000
            assert store._recent._roots.size <= 3000
            assert store._recent._known <= 10
    assert await come_back(store, conversations)
    (tails,) = rows_of(tmp_path / "s.db", "SELECT count(*) FROM calls WHERE base IS NULL")
    assert tails[0] <= 10
    await store.close()


async def test_what_all_attempts_begin_with_is_kept_once(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    systems = [np.random.default_rng(n).bytes(4000).hex() for n in range(2)]
    attempts = await claimed(store, 32)
    conversations = [conversation(a, 2, system=systems[n % 2], task=n // 8) for n, a in enumerate(attempts)]
    conversations = [[replace(c, dialect=f"agent {n % 2}") for c in calls] for n, calls in enumerate(conversations)]
    for calls in conversations:
        for one in calls:
            await store.append(one)
    assert await come_back(store, conversations)
    whole, rest = rows_of(
        tmp_path / "s.db",
        "SELECT length(body) > 2000, sum(length(body) + length(ids)) FROM calls GROUP BY 1 ORDER BY 1 DESC",
    )
    assert whole[0] == 1
    assert rest[1] < 62 * 200
    await store.close()


async def test_reading_an_attempt_reads_at_most_two_calls_of_others(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    for n, attempt in enumerate(await claimed(store, 40)):
        alike = list(range(40 * 4 ** (n // 10)))  # with more attempts there is more to share
        first = call(attempt, 0, [*alike, n, n + 1], [1])
        await store.append(first, call(attempt, 1, [*alike, n, n + 1, 1], [2], parent=first.id))
    await store.close()
    bases = dict(rows_of(tmp_path / "s.db", "SELECT seq, base FROM calls WHERE continues = 0"))
    depths: list[int] = []
    for seq in bases:
        depth, base = 0, bases[seq]
        while base is not None:
            depth, base = depth + 1, bases[base]
        depths.append(depth)
    assert max(depths) == 2
    assert depths.count(0) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_agents_do_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Branches, rewritten histories, lost parents. Two processes write in turn. They remember little, and restart."""
    monkeypatch.setattr(recent, "CONTENT_LIMIT", 20_000)
    monkeypatch.setattr(recent, "ROOTS_LIMIT", 10_000)
    rng, path = random.Random(seed), tmp_path / "s.db"
    stores = [await SQLiteStore.open(path), await SQLiteStore.open(path)]
    conversations: list[list[Call]] = [[] for _ in range(4)]
    attempts = await claimed(stores[0], 4)
    for _ in range(120):
        which = rng.randrange(4)
        calls, other = conversations[which], rng.choice(conversations)
        parent = rng.choice(calls) if calls and rng.random() < 0.8 else None
        source = parent if parent is not None else rng.choice(other) if other else None
        messages = [] if source is None else [*source.request["messages"], source.response]
        if messages and rng.random() < 0.2:
            messages[rng.randrange(len(messages))] = {"role": "user", "content": "rewritten"}
        prompt = [] if source is None else [*source.prompt_ids, *source.completion_ids][: rng.randrange(400)]
        bare = call(
            attempts[which],
            len(calls),
            [*prompt, rng.randrange(2**20)],
            [rng.randrange(2**17)] * rng.randrange(9),
        )
        answer = {"role": "assistant", "content": "".join(rng.choices("abc é", k=rng.randrange(300)))}
        body = {
            "messages": [*messages, {"role": "user", "content": "?" * rng.randrange(9)}],
            "seed": rng.randrange(3),
        }
        calls.append(replace(bare, request=body, response=answer, parent_call_id=None if parent is None else parent.id))
        writer = rng.randrange(2)
        if rng.random() < 0.05:
            await stores[writer].close()
            stores[writer] = await SQLiteStore.open(path)
        await stores[writer].append(calls[-1])
    for store in stores:
        assert await come_back(store, [calls for calls in conversations if calls])
        await store.close()


async def test_what_is_rolled_back_is_forgotten(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    first, second = await claimed(store, 2)
    lost, kept = conversation(first, 2, system="x" * 2000), conversation(second, 2, system="x" * 2000)
    with pytest.raises(StoreError, match="reward `final` is `nan`"):
        await store.append(
            *[replace(one, agent="new") for one in lost], Reward(attempt_id=first.id, value=float("nan"))
        )
    for one in [*kept, *lost]:
        await store.append(replace(one, agent="new"))
    assert await come_back(store, [[replace(one, agent="new") for one in calls] for calls in (kept, lost)])
    await store.close()


async def test_a_grammar_is_kept_once(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    grammars = [np.random.default_rng(n).bytes(10_000).hex() for n in range(2)]
    calls = [
        replace(one, sampling=Sampling(grammar=grammars[one.index % 2], seed=one.index))
        for one in conversation(attempt, 60)
    ]
    for one in calls:
        await store.append(one)
    assert await come_back(store, [calls])
    await store.close()
    assert (
        tmp_path / "s.db"
    ).stat().st_size < 4 * 20_000 + 190_000  # each is stored twice: in its row and in the index


async def test_ids_that_follow_from_attempt_and_index_cost_nothing_and_others_are_kept_as_they_are(
    tmp_path: Path,
) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    names = [
        f"chatcmpl-{attempt.id}-0",
        "1",
        f"{attempt.id}",
        f"{attempt.id}{attempt.id}-3",
        "resp_\x01\x02 4",
        "msg-\x015",
        f"\x02{attempt.id}6",
        "chatcmpl-x7",
    ]
    calls = [replace(call(attempt, index, [1], [2]), id=name) for index, name in enumerate(names)]
    await store.append(*calls)
    assert await come_back(store, [calls])
    assert [row[0] for row in rows_of(tmp_path / "s.db", "SELECT id FROM calls ORDER BY seq")] == [
        None,
        *names[1:3],
        None,
        *names[4:],
    ]
    await store.close()
