"""The leases of one server, over a real store."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from lightningrl.errors import AgentError
from lightningrl.leases import Claimed, Outcome, StoreLeases
from lightningrl.store import Store, open_store
from lightningrl.types import Attempt, Reward, Rollout, Task


@asynccontextmanager
async def serving(*, lease_s: float = 60.0) -> AsyncIterator[tuple[Store, StoreLeases]]:
    store = await open_store("sqlite:///:memory:")
    leases = StoreLeases(store, lease_s=lease_s)
    task = asyncio.create_task(leases.run())
    try:
        yield store, leases
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()


def rollouts(*names: str, labels: tuple[str, ...] = ()) -> list[Rollout]:
    task = Task(id="t", input={}, split="train")
    return [Rollout(id=name, group_id="g", task=task, labels=labels) for name in names]


def ids(claimed: Claimed) -> list[str]:
    return [attempt.id for _, attempt in claimed]


async def test_a_claim_waits_for_work_and_gets_it_at_once() -> None:
    async with serving() as (store, leases):
        claim = asyncio.create_task(leases.of("w").claim(limit=1, holding=()))
        await asyncio.sleep(0.05)
        assert not claim.done()
        await store.enqueue(rollouts("a", "b"))
        assert ids(await asyncio.wait_for(claim, timeout=5)) == ["a.1"]


async def test_a_claim_without_work_returns_none_in_the_end() -> None:
    async with serving() as (_, leases):
        assert await leases.of("w").claim(limit=1, holding=(), wait_s=0.05) == []


async def test_new_work_is_shared_out_among_the_workers_that_wait() -> None:
    async with serving() as (store, leases):
        claims = [asyncio.create_task(leases.of(f"w{n}").claim(limit=64, holding=())) for n in range(3)]
        await asyncio.sleep(0.05)
        await store.enqueue(rollouts(*(f"r{n}" for n in range(9))))
        assert [len(claimed) for claimed in await asyncio.gather(*claims)] == [3, 3, 3]


async def test_work_with_labels_goes_to_workers_that_have_them_all() -> None:
    async with serving() as (store, leases):
        plain = asyncio.create_task(leases.of("plain").claim(limit=9, holding=(), wait_s=0.5))
        some = asyncio.create_task(leases.of("some", labels=["gpu"]).claim(limit=9, holding=(), wait_s=0.5))
        every = asyncio.create_task(leases.of("every", labels=["gpu", "x", "y"]).claim(limit=9, holding=(), wait_s=5))
        await asyncio.sleep(0.05)
        await store.enqueue(rollouts("a", labels=("gpu", "x")))
        assert ids(await every) == ["a.1"]
        assert await plain == [] and await some == []


async def test_a_second_claim_of_a_worker_takes_the_place_of_the_first() -> None:
    async with serving() as (store, leases):
        first = asyncio.create_task(leases.of("w").claim(limit=1, holding=()))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(leases.of("w").claim(limit=1, holding=()))
        assert await asyncio.wait_for(first, timeout=5) == []
        await store.enqueue(rollouts("a"))
        assert ids(await asyncio.wait_for(second, timeout=5)) == ["a.1"]


async def test_what_a_worker_was_given_and_does_not_hold_is_lost_and_given_again() -> None:
    async with serving() as (store, leases):
        await store.enqueue(rollouts("a", "b"))
        assert ids(await leases.of("w").claim(limit=2, holding=())) == ["a.1", "b.1"]
        assert ids(await leases.of("w").claim(limit=2, holding=["b.1"])) == ["a.2"]
        assert await leases.of("w").heartbeat(["a.1", "a.2", "b.1"]) == {"a.2", "b.1"}


async def test_a_passed_lease_is_noticed_while_all_workers_wait() -> None:
    async with serving(lease_s=0.2) as (store, leases):
        await store.enqueue(rollouts("a"))
        await leases.of("dead").claim(limit=1, holding=())
        assert ids(await leases.of("other").claim(limit=1, holding=(), wait_s=5)) == ["a.2"]
        assert await leases.of("dead").heartbeat(["a.1"]) == set()


async def test_a_worker_cannot_finish_what_is_not_its_own() -> None:
    async with serving() as (store, leases):
        await store.enqueue(rollouts("a"))
        await leases.of("w").claim(limit=1, holding=())
        won = Outcome(status="succeeded", rewards=(Reward(attempt_id="a.1", value=1.0),))
        await leases.of("thief").finish("a.1", won)
        assert await store.count() == {"running": 1} and await store.rewards(["a.1"]) == []
        await leases.of("w").finish("a.1", won)
        await leases.of("w").finish("a.1", replace(won, status="failed", rewards=()))
        assert await store.count() == {"succeeded": 1} and len(await store.rewards(["a.1"])) == 1


async def test_a_server_that_grades_ignores_what_workers_say_about_rewards() -> None:
    async def grade(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        assert (rollout.id, attempt.id, outcome.rewards) == ("a", "a.1", ())
        return replace(outcome, rewards=(Reward(attempt_id=attempt.id, value=0.25),))

    store = await open_store("sqlite:///:memory:")
    leases = StoreLeases(store, grade=grade)
    await store.enqueue(rollouts("a"))
    await leases.of("w").claim(limit=1, holding=())
    lie = Outcome(status="succeeded", output="x", rewards=(Reward(attempt_id="a.1", value=1.0),))
    await leases.of("w").finish("a.1", lie)
    assert [reward.value for reward in await store.rewards(["a.1"])] == [0.25]
    await store.close()


class Slow:
    """A grader that waits for its gate."""

    def __init__(self) -> None:
        self.gate, self.graded = asyncio.Event(), list[str]()

    async def grade(self, rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        self.graded.append(attempt.id)
        await self.gate.wait()
        return replace(outcome, rewards=(Reward(attempt_id=attempt.id, value=0.5),))


async def test_an_attempt_is_graded_once_however_often_its_worker_finishes_it() -> None:
    store, grader, won = await open_store("sqlite:///:memory:"), Slow(), Outcome(status="succeeded")
    leases = StoreLeases(store, grade=grader.grade)
    await store.enqueue(rollouts("a"))
    await leases.of("w").claim(limit=1, holding=())
    first, second = (asyncio.create_task(leases.of("w").finish("a.1", won)) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()  # its connection broke
    await leases.of("thief").finish("a.1", won)
    grader.gate.set()
    await second
    await leases.of("w").finish("a.1", won)
    assert grader.graded == ["a.1"] and await store.count() == {"succeeded": 1}
    assert [reward.value for reward in await store.rewards(["a.1"])] == [0.5]
    await store.close()


async def test_a_server_that_stops_while_it_grades_leaves_the_attempt_running() -> None:
    store, grader = await open_store("sqlite:///:memory:"), Slow()
    leases = StoreLeases(store, grade=grader.grade)
    await store.enqueue(rollouts("a"))
    await leases.of("w").claim(limit=1, holding=())
    finishing = asyncio.create_task(leases.of("w").finish("a.1", Outcome(status="succeeded")))
    await asyncio.sleep(0.05)
    await leases.close()
    assert isinstance((await asyncio.gather(finishing, return_exceptions=True))[0], asyncio.CancelledError)
    assert grader.graded == ["a.1"] and await store.count() == {"running": 1}
    await store.close()


async def test_an_output_that_cannot_be_graded_fails_its_attempt() -> None:
    async def grade(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        raise AgentError("the agent's answer is too large")

    store = await open_store("sqlite:///:memory:")
    leases = StoreLeases(store, grade=grade)
    await store.enqueue(rollouts("a"))
    await leases.of("w").claim(limit=1, holding=())
    await leases.of("w").finish("nobody.1", Outcome(status="succeeded"))
    await leases.of("w").finish("a.1", Outcome(status="succeeded", output="x"))
    [attempt] = await store.attempts(["a"])
    assert (attempt.status, attempt.error) == ("failed", "AgentError: the agent's answer is too large")
    await store.close()


async def test_ended_rollouts_are_forgotten_even_if_their_attempts_were_lost() -> None:
    async with serving() as (store, leases):
        await store.enqueue(rollouts("a"))
        await leases.of("dead").claim(limit=1, holding=())
        await store.finish("a.1", "lost")
        assert ids(await leases.of("w").claim(limit=1, holding=())) == ["a.2"]
        assert list(leases._began) == ["a"]
        await leases.of("w").finish("a.2", Outcome(status="succeeded"))
        async with asyncio.timeout(5):
            while leases._began:
                await asyncio.sleep(0.01)


async def test_attempts_outlive_a_server_that_was_away_for_longer_than_their_leases(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path / 'store.sqlite'}"
    before = await open_store(url, exclusive=True)
    await before.enqueue(rollouts("a", "b"))
    given = StoreLeases(before, lease_s=0.05)
    await given.of("local").claim(limit=1, holding=())
    assert ids(await given.of("far").claim(limit=1, holding=())) == ["b.1"]
    await before.close()
    await asyncio.sleep(0.1)

    store = await open_store(url, exclusive=True)
    leases = StoreLeases(store)
    await leases.resume()
    await leases.of("local").claim(limit=0, holding=())
    assert await leases.of("far").heartbeat(["b.1"]) == {"b.1"}
    assert [found.status for found in await store.attempts(["a", "b"])] == ["lost", "running"]
    await store.close()


async def test_a_server_that_was_held_up_does_not_blame_its_workers() -> None:
    async with serving(lease_s=0.4) as (store, leases):
        await store.enqueue(rollouts("a"))
        worker = leases.of("w")
        await worker.claim(limit=1, holding=())
        time.sleep(0.6)  # the whole process stands still, heartbeats too
        await asyncio.sleep(0.15)
        assert await worker.heartbeat(["a.1"]) == {"a.1"}
