"""The dispatcher, with a real store and a scripted runner."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from lightningrl.leases import StoreLeases, never
from lightningrl.runner import Outcome
from lightningrl.runner.dispatch import Dispatcher
from lightningrl.store import Store, open_store, wait
from lightningrl.types import Attempt, Reward, Rollout, Task


class Instant:
    """A runner without an agent. It records how many attempts ran at once, and their environments."""

    def __init__(self, *, fails: frozenset[int] = frozenset(), late: frozenset[int] = frozenset()) -> None:
        self.running = self.peak = 0
        self.environments: list[Mapping[str, str]] = []
        self._fails, self._late = fails, late

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.environments.append(env)
        await asyncio.sleep(0.01)
        self.running -= 1
        if attempt.number in self._fails:
            return Outcome(status="failed", error="AgentError: no luck")
        if attempt.number in self._late:
            return Outcome(status="timeout", error="AgentError: timed out")
        return Outcome(status="succeeded", output="done", rewards=(Reward(attempt_id=attempt.id, value=1.0),))


@asynccontextmanager
async def dispatching(
    runner: Instant, *, concurrency: int = 4, interrupted: Callable[[float], bool] = never
) -> AsyncIterator[Store]:
    store = await open_store("sqlite:///:memory:")
    leases = StoreLeases(store, interrupted=interrupted)
    dispatcher = Dispatcher(leases=leases.of("w"), runner=runner, base_url="http://here", concurrency=concurrency)
    tasks = [asyncio.create_task(leases.run()), asyncio.create_task(dispatcher.run())]
    try:
        yield store
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()


def rollouts(count: int, *, max_attempts: int = 1) -> list[Rollout]:
    task = Task(id="t", input={}, split="train")
    return [Rollout(id=f"r{number}", group_id="g", task=task, max_attempts=max_attempts) for number in range(count)]


async def test_all_queued_rollouts_run_with_limited_concurrency() -> None:
    runner = Instant()
    async with dispatching(runner, concurrency=4) as store:
        await store.enqueue(rollouts(10))
        ended = await wait(store, [f"r{number}" for number in range(10)], timeout_s=10)
        assert [rollout.status for rollout in ended] == ["succeeded"] * 10
        assert runner.peak == 4
        assert len(await store.rewards([rollout.accepted_attempt_id or "" for rollout in ended])) == 10


async def test_each_attempt_gets_its_own_key() -> None:
    runner = Instant()
    async with dispatching(runner) as store:
        await store.enqueue(rollouts(5))
        await wait(store, [f"r{number}" for number in range(5)], timeout_s=10)
    assert len({env["OPENAI_API_KEY"] for env in runner.environments}) == 5
    assert {env["OPENAI_BASE_URL"] for env in runner.environments} == {"http://here/v1"}


@pytest.mark.parametrize(("max_attempts", "status"), [(2, "succeeded"), (1, "failed")])
async def test_a_failed_attempt_is_followed_by_another_while_there_are_any_left(max_attempts: int, status: str) -> None:
    async with dispatching(Instant(fails=frozenset({1}))) as store:
        await store.enqueue(rollouts(1, max_attempts=max_attempts))
        (ended,) = await wait(store, ["r0"], timeout_s=10)
        assert ended.status == status
        assert [attempt.status for attempt in await store.attempts(["r0"])] == ["failed", "succeeded"][:max_attempts]


@pytest.mark.parametrize(("down", "status", "attempts"), [(True, "succeeded", 2), (False, "failed", 1)])
async def test_an_attempt_that_timed_out_while_the_engine_was_down_costs_its_rollout_nothing(
    down: bool, status: str, attempts: int
) -> None:
    began: list[float] = []

    def interrupted(since: float) -> bool:
        began.append(since)
        return down

    before = time.monotonic()
    async with dispatching(Instant(late=frozenset({1})), interrupted=interrupted) as store:
        await store.enqueue(rollouts(1))
        (ended,) = await wait(store, ["r0"], timeout_s=10)
        assert ended.status == status and len(await store.attempts(["r0"])) == attempts
    assert before <= began[0] <= time.monotonic()


class Slow(Instant):
    """Attempts last until they are cancelled, or until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.cancelled = 0

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().run(rollout, attempt, env)


async def test_an_attempt_that_was_lost_is_ended_and_its_rollout_runs_again() -> None:
    store, runner = await open_store("sqlite:///:memory:"), Slow()
    leases = StoreLeases(store, lease_s=0.3)
    dispatcher = Dispatcher(leases=leases.of("w"), runner=runner, base_url="http://here", concurrency=4)
    tasks = [asyncio.create_task(leases.run()), asyncio.create_task(dispatcher.run())]
    await store.enqueue(rollouts(1))
    await until(lambda: dispatcher.running == 1)
    await store.finish("r0.1", "lost", error="as if its lease had passed")
    await until(lambda: runner.cancelled == 1)
    runner.go.set()
    (ended,) = await wait(store, ["r0"], timeout_s=10)
    assert ended.accepted_attempt_id == "r0.2"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.close()


async def test_a_drained_dispatcher_ends_what_runs_and_claims_nothing_more() -> None:
    store, runner = await open_store("sqlite:///:memory:"), Slow()
    leases = StoreLeases(store)
    dispatcher = Dispatcher(leases=leases.of("w"), runner=runner, base_url="http://here", concurrency=2)
    serving, running = asyncio.create_task(leases.run()), asyncio.create_task(dispatcher.run())
    await store.enqueue(rollouts(5))
    await until(lambda: dispatcher.running == 2)
    dispatcher.drain()
    runner.go.set()
    await asyncio.wait_for(running, timeout=60)
    assert await store.count() == {"succeeded": 2, "queued": 3}
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
