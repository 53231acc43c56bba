"""Does the workload say who runs what, what waits, and what has failed?"""

from lightningrl.look.queue import Queue
from lightningrl.look.table import Table
from lightningrl.store.examples import rollout
from lightningrl.store.sqlite import SQLiteStore


async def test_workers_queue_and_failures() -> None:
    store = await SQLiteStore.open(":memory:")
    table = Table(store)
    queue = Queue(store, table.columns)
    await store.enqueue([rollout(f"r{n}", max_attempts=2) for n in range(60)])
    [(_, good), (_, bad), (_, slow)] = await store.claim("w1", limit=3, lease_s=60)
    await store.finish(good.id, "succeeded")
    await store.finish(bad.id, "timeout", error="it took too long\nTraceback")
    await table.refresh()
    found = (await queue.look()).as_json()
    [ended] = await store.attempts(["r1"])
    assert found["counts"] == {"queued": 58, "running": 1, "succeeded": 1} and found["queued"] == 58
    assert [waiting["id"] for waiting in found["queue"]] == ["r1", *(f"r{n}" for n in range(3, 52))]
    assert found["queue"][0] == {"id": "r1", "task": "t", "labels": []}
    runs = {"rollout": "r2", "attempt": 1, "since": slow.started_at, "task": "t"}
    assert found["workers"] == [
        {"worker": "w1", "running": (runs,), "ended": 2, "failed": 1, "last_error": "it took too long"}
    ]
    failure = {"rollout": "r1", "worker": "w1", "at": ended.ended_at, "status": "timeout", "error": "it took too long"}
    assert found["failures"] == [failure]
    await table.close()
    await store.close()


async def test_a_failure_is_still_there_when_the_rollout_is_tried_again() -> None:
    store = await SQLiteStore.open(":memory:")
    table = Table(store)
    queue = Queue(store, table.columns)
    await store.enqueue([rollout("r", max_attempts=3)])
    for number, worker in enumerate(("w1", "w2"), start=1):
        [(_, attempt)] = await store.claim(worker, limit=1, lease_s=60)
        await table.refresh()
        await store.finish(attempt.id, "failed", error=f"bad {number}")
        await table.refresh()
        assert [failure.error for failure in (await queue.look()).failures] == ["bad 2", "bad 1"][-number:]
    [(_, attempt)] = await store.claim("w1", limit=1, lease_s=60)
    await table.refresh()
    found = await queue.look()
    assert [(failure.error, failure.worker) for failure in found.failures] == [("bad 2", "w2"), ("bad 1", "w1")]
    assert {name: (len(w.running), w.ended, w.failed) for name, w in found.workers.items()} == {
        "w1": (1, 1, 1),
        "w2": (0, 1, 1),
    }
    assert list(found.workers) == ["w1", "w2"] and found.workers["w2"].last_error == "bad 2"
    await store.finish(attempt.id, "succeeded")
    await table.refresh()
    assert len((await queue.look()).failures) == 2
    await table.close()
    await store.close()


async def test_a_run_without_rollouts_has_no_workers() -> None:
    store = await SQLiteStore.open(":memory:")
    table = Table(store)
    await table.refresh()
    empty = {"counts": {}, "workers": [], "queue": [], "queued": 0, "failures": ()}
    assert {**(await Queue(store, table.columns).look()).as_json(), "failures": ()} == empty
    await table.close()
    await store.close()
