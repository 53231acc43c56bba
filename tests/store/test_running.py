"""Is the attempt of a token found in memory, and is the answer never out of date?"""

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightningrl.store.conformance import begin, call, rollout
from lightningrl.store.running import LIMIT, TRUSTED_S, Found, Running
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt


def found(name: str) -> Found:
    attempt = Attempt(id=f"{name}.1", rollout_id=name, number=1, token=f"token of {name}", token_hash=f"hash of {name}")
    return rollout(name), attempt


async def status(store: SQLiteStore, token: str) -> str:
    known = await store.attempt_by_token(token)
    assert known is not None
    return known[1].status


async def test_a_running_attempt_is_known_without_a_look_at_the_file(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    go_on = threading.Event()
    busy = [asyncio.create_task(thread.run(lambda _: go_on.wait(10))) for thread in (store._reader, store._writer)]
    await asyncio.sleep(0.01)
    try:
        assert await asyncio.wait_for(status(store, attempt.token), timeout=0.1) == "running"
    finally:
        go_on.set()
        await asyncio.gather(*busy)
        await store.close()


async def test_an_attempt_that_was_ended_is_never_called_running_while_many_come_and_go(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    await store.enqueue([rollout(f"r{n}") for n in range(120)])
    ended: set[str] = set()
    wrong: list[str] = []
    going = True

    async def ask(attempts: list[Attempt]) -> None:
        while going:
            for attempt in attempts:
                was_ended = attempt.id in ended
                store._running.drop(attempt.token_hash)  # so each lookup reads the file, where the race is
                if await status(store, attempt.token) == "running" and was_ended:
                    wrong.append(attempt.id)
                await asyncio.sleep(0)

    for _ in range(3):
        attempts = [attempt for _, attempt in await store.claim("w", limit=40, lease_s=60)]
        going = True
        asking = [asyncio.create_task(ask(attempts[lane::4])) for lane in range(4)]
        for attempt in attempts:
            await store.finish(attempt.id, "succeeded")
            ended.add(attempt.id)
            assert await status(store, attempt.token) == "succeeded"
        going = False
        await asyncio.gather(*asking)
    assert wrong == []
    assert len(store._running) == 0
    await store.close()


async def test_what_is_read_while_the_attempt_ends_is_read_again() -> None:
    running = Running()
    answers = iter(["running", "succeeded"])

    async def read() -> Found:
        rollout_, attempt = found("r")
        answer = next(answers)
        if answer == "running":
            running.drop(attempt.token_hash)  # committed and acknowledged before the read returns
        return rollout_, replace(attempt, status=answer)

    last = await running.read("hash of r", read)
    assert last is not None
    assert last[1].status == "succeeded"
    assert running.get("hash of r") is None


async def test_an_attempt_that_another_process_ends_is_known_within_a_second(tmp_path: Path) -> None:
    store, other = await SQLiteStore.open(tmp_path / "s.db"), await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    await other.finish(attempt.id, "failed")
    started = time.monotonic()
    while await status(store, attempt.token) == "running":
        assert time.monotonic() - started < TRUSTED_S
        await asyncio.sleep(0.02)
    await store.close()
    await other.close()


async def test_an_attempt_that_another_process_ends_is_known_at_the_next_commit(tmp_path: Path) -> None:
    store, other = await SQLiteStore.open(tmp_path / "s.db"), await SQLiteStore.open(tmp_path / "s.db")
    await store.enqueue([rollout("a"), rollout("b")])
    [(_, a), (_, b)] = await store.claim("w", limit=2, lease_s=60)
    await other.finish(a.id, "failed")
    await store.append(call(b, 0, [1], [2]))
    assert [await status(store, a.token), await status(store, b.token)] == ["failed", "running"]
    await store.close()
    await other.close()


async def test_commits_of_its_own_keep_an_answer_fresh(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    for index in range(6):
        await asyncio.sleep(TRUSTED_S / 5)
        await store.append(call(attempt, index, [1], [2]))
    assert store._running.get(attempt.token_hash) is not None
    await asyncio.sleep(TRUSTED_S + 0.05)
    assert store._running.get(attempt.token_hash) is None
    assert await status(store, attempt.token) == "running"
    assert store._running.get(attempt.token_hash) is not None
    await store.close()


async def test_attempts_in_memory_are_bounded() -> None:
    running = Running()
    for number in range(LIMIT + 100):
        running.add(found(str(number)))
    assert len(running) == LIMIT
    assert running.get("hash of 99") is None
    assert running.get(f"hash of {LIMIT + 99}") is not None


async def test_a_read_that_fails_leaves_nothing_behind() -> None:
    running = Running()

    async def read() -> Found:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        await running.read("hash of r", read)
    assert running._reads == {}
