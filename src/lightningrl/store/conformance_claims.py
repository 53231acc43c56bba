"""What every store must do when workers claim, keep, finish and lose attempts. A part of `conformance`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from lightningrl.store.base import Store
from lightningrl.store.examples import call, refuses, rollout
from lightningrl.types import Reward


async def check_a_failed_attempt_is_tried_again_while_tries_are_left(store: Store) -> None:
    await store.enqueue([rollout("r", max_attempts=2)])
    for number in (1, 2):
        [(_, attempt)] = await store.claim("w", limit=5, lease_s=60)
        assert attempt.number == number
        await store.finish(attempt.id, "failed", error="agent raised")
    assert await store.claim("w", limit=5, lease_s=60) == []
    [ended] = await store.rollouts()
    assert (ended.status, ended.accepted_attempt_id) == ("failed", None)
    await store.enqueue([rollout("r", max_attempts=1)])  # requested again: one more attempt
    ((_, attempt),) = await store.claim("w", limit=5, lease_s=60)
    assert attempt.number == 3
    await store.finish(attempt.id, "succeeded")
    await store.enqueue([rollout("r")])
    assert (await store.rollouts())[0].accepted_attempt_id == attempt.id


async def check_a_lost_attempt_is_forgiven_ten_times(store: Store) -> None:
    await store.enqueue([rollout("r")])
    for number in range(1, 12):
        [(_, attempt)] = await store.claim("w", limit=1, lease_s=0.0)
        assert attempt.number == number
    assert await store.claim("w", limit=1, lease_s=60) == []
    assert {a.status for a in await store.attempts(["r"])} == {"lost"}
    assert (await store.rollouts())[0].status == "failed"


async def check_a_heartbeat_keeps_the_lease(store: Store) -> None:
    await store.enqueue([rollout("kept"), rollout("dropped")])
    [(_, kept), (_, dropped)] = await store.claim("w", limit=2, lease_s=0.05)
    await store.heartbeat([kept.id], lease_s=60)
    await asyncio.sleep(0.06)
    assert [r.id for r, _ in await store.claim("w", limit=2, lease_s=60)] == ["dropped"]
    await refuses(store.append(call(dropped, 0, [1], [2])))
    await store.append(call(kept, 0, [1], [2]))


async def check_a_worker_keeps_and_finishes_only_what_is_its_own(store: Store) -> None:
    await store.enqueue([rollout(name) for name in ("mine", "ended", "theirs")])
    [(_, mine), (_, ended)] = await store.claim("me", limit=2, lease_s=60)
    [(_, theirs)] = await store.claim("them", limit=1, lease_s=60)
    await store.finish(ended.id, "failed", worker="me")
    ids = [mine.id, ended.id, theirs.id, "nobody"]
    assert await store.heartbeat(ids, lease_s=60, worker="me") == {mine.id}
    assert await store.heartbeat(ids, lease_s=60) == {mine.id, theirs.id}
    late = [Reward(attempt_id=theirs.id, value=1.0)]
    await store.finish(theirs.id, "succeeded", rewards=late, worker="me")
    assert (await store.attempts(["theirs"]))[0].status == "running"
    assert await store.rewards([theirs.id]) == []
    await store.finish(theirs.id, "succeeded", worker="them")
    assert (await store.attempts(["theirs"]))[0].status == "succeeded"


async def check_an_attempt_that_its_worker_does_not_hold_is_lost_at_once(store: Store) -> None:
    await store.enqueue([rollout(name) for name in "abcd"])
    [(_, a), (_, b)] = await store.claim("w", limit=2, lease_s=60, gateway="one")
    [(_, c)] = await store.claim("w", limit=1, lease_s=60, gateway="two")
    [(_, d)] = await store.claim("other", limit=1, lease_s=60, gateway="one")
    assert (a.worker, a.gateway, c.gateway) == ("w", "one", "two")
    assert await store.claim("w", limit=0, lease_s=60, gateway="one") == []
    assert await store.heartbeat([a.id, b.id, c.id, d.id], lease_s=60) == {a.id, b.id, c.id, d.id}
    ((again, second),) = await store.claim("w", limit=5, lease_s=60, holding=[a.id], gateway="one")
    assert (again.id, second.number) == ("b", 2)
    assert await store.claim("w", limit=0, lease_s=60, holding=[], gateway="one") == []
    found = {attempt.id: attempt.status for attempt in await store.attempts(["a", "b", "c", "d"])}
    assert found == {a.id: "lost", b.id: "lost", second.id: "lost", c.id: "running", d.id: "running"}
    await refuses(store.append(call(b, 0, [1], [2])))


async def check_a_worker_gets_only_rollouts_whose_labels_it_has(store: Store) -> None:
    labels = {"plain": (), "gpu": ("gpu",), "both": ("gpu", "browser"), "browser": ("browser",), "later": ()}
    for name, asked in labels.items():
        await store.enqueue([replace(rollout(name), labels=asked)])
    assert {r.id: r.labels for r in await store.rollouts()} == labels

    async def claimed(*having: str, limit: int = 9) -> list[str]:
        return [r.id for r, _ in await store.claim("w", limit=limit, lease_s=60, labels=having)]

    assert await claimed("other", limit=1) == ["plain"]
    assert await claimed("browser", "gpu", limit=2) == ["gpu", "both"]
    assert await claimed("gpu", "other") == ["later"]
    assert await claimed() == []
    assert await claimed("browser") == ["browser"]


CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = (
    check_a_failed_attempt_is_tried_again_while_tries_are_left,
    check_a_lost_attempt_is_forgiven_ten_times,
    check_a_heartbeat_keeps_the_lease,
    check_a_worker_keeps_and_finishes_only_what_is_its_own,
    check_an_attempt_that_its_worker_does_not_hold_is_lost_at_once,
    check_a_worker_gets_only_rollouts_whose_labels_it_has,
)
