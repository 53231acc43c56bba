"""The leases of one server, over a real store."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from lightningrl.branches import DIFFERS
from lightningrl.errors import AgentError
from lightningrl.leases import BACK_S, Claimed, Outcome, StoreLeases
from lightningrl.store import Store, open_store
from lightningrl.store.examples import call
from lightningrl.types import Attempt, Branch, Call, Reward, Rollout, Task


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
    lease_s = 4.0  # a server that is late by half of it, as busy machines are by 0.1 s, renews all leases
    async with serving(lease_s=lease_s) as (store, leases):
        await store.enqueue(rollouts("a"))
        await leases.of("dead").claim(limit=1, holding=())
        assert ids(await leases.of("other").claim(limit=1, holding=(), wait_s=3 * BACK_S)) == ["a.2"]
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
        assert list(leases._given) == ["a"]
        await leases.of("w").finish("a.2", Outcome(status="succeeded"))
        async with asyncio.timeout(60):
            while leases._given:
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


def answered(attempt: Attempt, index: int, *, replays: str | None = None) -> Call:
    """A call of an agent that asks the same questions in each attempt; the i-th prompt is [0, …, i]."""
    return replace(call(attempt, index, list(range(index + 1)), [7]), started_at=index, ended_at=index, replays=replays)


async def recorded(store: Store) -> Attempt:
    """A trunk of three calls, in a rollout `t`."""
    await store.enqueue(rollouts("t"))
    [(_, trunk)] = await store.claim("before", limit=1, lease_s=60)
    await store.append(*(answered(trunk, index) for index in range(3)))
    await store.finish(trunk.id, "succeeded", rewards=[Reward(attempt_id=trunk.id, value=1.0)])
    return trunk


async def branched(
    store: Store, leases: StoreLeases, branch: Branch, *, name: str = "b", tries: int = 1, worker: str = "w"
) -> Attempt:
    await store.enqueue([replace(one, branch=branch, max_attempts=tries) for one in rollouts(name)])
    [(_, attempt)] = await leases.of(worker).claim(limit=1, holding=())
    return attempt


def win(attempt: Attempt) -> Outcome:
    return Outcome(status="succeeded", output="mine", rewards=(Reward(attempt_id=attempt.id, value=1.0),))


async def test_a_branch_that_got_to_its_branching_call_ends_as_its_agent_says() -> None:
    async with serving() as (store, leases):
        trunk = await recorded(store)
        attempt = await branched(store, leases, Branch(attempt_id="t.1", call_id=f"{trunk.id}/1"))
        await store.append(answered(attempt, 0, replays=f"{trunk.id}/0"), answered(attempt, 1))
        await leases.of("w").finish(attempt.id, win(attempt))
        assert [found.status for found in await store.attempts(["b"])] == ["succeeded"]
        assert [reward.value for reward in await store.rewards([attempt.id])] == [1.0]


async def test_a_void_branch_fails_without_a_reward_and_is_tried_again() -> None:
    async with serving() as (store, leases):
        trunk = await recorded(store)
        branch = Branch(attempt_id="t.1", call_id=f"{trunk.id}/1")
        attempt = await branched(store, leases, branch, tries=2)
        different = replace(answered(attempt, 1), capture="incomplete", capture_reason=f"{DIFFERS}a clock")
        await store.append(answered(attempt, 0, replays=f"{trunk.id}/0"), different)
        await leases.of("w").finish(attempt.id, win(attempt))
        [again] = await leases.of("w").claim(limit=1, holding=())
        assert again[0].branch == branch
        broken = Outcome(status="timeout", error="AgentError: no answer within 9 s")
        await leases.of("w").finish(again[1].id, broken)
        first, second = await store.attempts(["b"])
        assert (first.status, first.output) == ("failed", "mine")
        assert first.error == "void: call 2 differs from the record: a clock"
        assert second.status == "failed"
        assert second.error == f"void: it ended after 0 recorded calls, before call 2 was reached\n\n{broken.error}"
        assert await store.rewards([first.id, second.id]) == []
        assert [rollout.status for rollout in await store.rollouts(ids=["b"])] == ["failed"]


async def test_a_lost_attempt_of_a_branch_stays_lost() -> None:
    """Its worker died, which says nothing about the branch: its rollout is queued again at no cost."""
    async with serving() as (store, leases):
        trunk = await recorded(store)
        attempt = await branched(store, leases, Branch(attempt_id="t.1", call_id=f"{trunk.id}/1"))
        await leases.of("w").finish(attempt.id, Outcome(status="lost", error="the worker broke"))
        assert [(found.status, found.error) for found in await store.attempts(["b"])] == [("lost", "the worker broke")]
        assert ids(await leases.of("w").claim(limit=1, holding=())) == ["b.2"]


async def test_a_branch_of_what_cannot_be_repeated_fails_and_says_so() -> None:
    async with serving() as (store, leases):
        await recorded(store)
        await store.enqueue(rollouts("f"))
        [(_, broken)] = await store.claim("before", limit=1, lease_s=60)
        await store.finish(broken.id, "failed", error="AgentError: no")
        missing = {"x.1": "does not exist", "t.2": "does not exist", "nothing": "does not exist"}
        for trunk, said in {**missing, broken.id: "has the status `failed`"}.items():
            branch = Branch(attempt_id=trunk, call_id=None)
            attempt = await branched(store, leases, branch, name=f"b-{trunk}")
            await leases.of("w").finish(attempt.id, win(attempt))
            [ended] = await store.attempts([attempt.rollout_id])
            assert (ended.status, ended.error) == ("failed", f"void: its trunk, attempt `{trunk}`, {said}")
        attempt = await branched(store, leases, Branch(attempt_id="t.1", call_id="t.1/9"))
        await leases.of("w").finish(attempt.id, win(attempt))
        [ended] = await store.attempts(["b"])
        assert (ended.status, ended.error) == ("failed", "void: its trunk `t.1` has no call `t.1/9`")


async def test_a_void_branch_is_not_graded() -> None:
    async def grade(rollout: Rollout, attempt: Attempt, outcome: Outcome) -> Outcome:
        graded.append(attempt.id)
        return replace(outcome, rewards=(Reward(attempt_id=attempt.id, value=0.5),))

    graded: list[str] = []
    store = await open_store("sqlite:///:memory:")
    leases = StoreLeases(store, grade=grade)
    trunk = await recorded(store)
    attempt = await branched(store, leases, Branch(attempt_id="t.1", call_id=f"{trunk.id}/0"))
    await leases.of("w").finish(attempt.id, win(attempt))
    other = await branched(store, leases, Branch(attempt_id="t.1", call_id=f"{trunk.id}/0"), name="c")
    await store.append(answered(other, 0))
    await leases.of("w").finish(other.id, win(other))
    assert graded == [other.id] and await store.count() == {"succeeded": 2, "failed": 1}
    await store.close()


async def test_trunks_are_read_where_the_recordings_are_also_by_the_next_server() -> None:
    """`lightningrl replay` reads the store of another run."""
    recordings, store = await open_store("sqlite:///:memory:"), await open_store("sqlite:///:memory:")
    trunk = await recorded(recordings)
    leases = StoreLeases(store, recordings=recordings)
    pure = Branch(attempt_id="t.1", call_id=None)
    attempt, other = [await branched(store, leases, pure, name=name, worker=name) for name in ("b", "c")]
    await store.append(*(answered(attempt, index, replays=f"{trunk.id}/{index}") for index in range(3)))
    await store.append(answered(other, 0, replays=f"{trunk.id}/0"))
    leases = StoreLeases(store, recordings=recordings)
    for one in (attempt, other):
        await leases.of(one.rollout_id).finish(one.id, win(one))
    ended = await store.attempts(["b", "c"])
    assert [found.status for found in ended] == ["succeeded", "failed"]
    assert ended[1].error == "void: it ended after 1 of 3 recorded calls"
    await store.close()
    await recordings.close()
