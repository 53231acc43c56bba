"""Does the PostgreSQL store keep its promises, with several processes, a kill, and a database that restarts?"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from lightningrl.errors import StoreError, StoreFailed, UserError
from lightningrl.store import Store, conformance, open_records, open_store, wait
from lightningrl.store.conformance import begin, call, rollout, same
from lightningrl.store.connection import Connection
from lightningrl.store.postgres import PostgresStore
from lightningrl.store.running import TRUSTED_S
from lightningrl.types import Reward, Weights
from tests.postgres import Postgres
from tests.store.writer import WRITER


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_postgres_keeps_the_promises_of_a_store(
    check: Callable[[Store], Awaitable[None]], postgres: Postgres
) -> None:
    store = await open_store(postgres.url())
    try:
        await check(store)
    finally:
        await store.close()


async def test_history_costs_linear_space(postgres: Postgres) -> None:
    store = await PostgresStore.open(postgres.url().removeprefix("postgresql://"))

    async def size() -> int:
        statement = "SELECT pg_total_relation_size('calls') + pg_total_relation_size('kinds')"
        return await store._reader.run(lambda connection: connection.execute(statement).fetchone()[0])

    await conformance.check_history_costs_linear_space(store, size=size)
    await store.close()


async def test_everything_acknowledged_survives_sigkill_and_nothing_is_there_twice(postgres: Postgres) -> None:
    url = postgres.url()
    for life in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, url, f"r{life}"], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = {line.strip() for line in [first, *writer.stdout] if line.endswith("\n")}
        writer.stdout.close()
        writer.wait()
        store = await open_store(url, exclusive=True)
        (left,) = await store.attempts([f"r{life}"])
        assert left.status == "running"
        kept = {c.id: c for c in await store.calls([left.id])}
        assert acknowledged <= kept.keys()
        assert len(kept) <= len(acknowledged) + 4, "at most one is unacknowledged in each lane"
        for c in kept.values():
            before = kept.get(c.parent_call_id or "")
            expected = [c.index % 4] if before is None else [*before.prompt_ids, *before.completion_ids, 7]
            assert c.prompt_ids.tolist() == expected
        [(again, attempt)] = await store.claim("w", limit=1, lease_s=60, holding=())
        assert (again.id, attempt.number) == (f"r{life}", 2)
        await store.finish(attempt.id, "succeeded")
        await store.close()


async def test_two_servers_share_the_queue_and_hear_of_each_other(postgres: Postgres) -> None:
    url = postgres.url()
    one, two = await open_store(url), await open_store(url)
    await one.enqueue([rollout(f"r{n}") for n in range(40)])
    waiting = asyncio.create_task(wait(two, [f"r{n}" for n in range(40)], timeout_s=30))

    async def serve(store: Store, gateway: str) -> list[str]:
        done: list[str] = []
        while claimed := await store.claim("w", limit=3, lease_s=60, gateway=gateway):
            for index, (_, attempt) in enumerate(claimed):
                await store.append(call(attempt, 0, [index], [1]), call(attempt, 1, [index, 1, 2], [3]))
                await store.finish(attempt.id, "succeeded", rewards=[Reward(attempt_id=attempt.id, value=1.0)])
                done.append(attempt.rollout_id)
        return done

    done = await asyncio.gather(serve(one, "one"), serve(two, "two"))
    assert all(done) and sorted(done[0] + done[1]) == sorted(f"r{n}" for n in range(40))
    started = time.monotonic()
    ended = await waiting
    assert time.monotonic() - started < 1.0
    assert {r.status for r in ended} == {"succeeded"}
    accepted = [r.accepted_attempt_id or "" for r in ended]
    assert len(await one.calls(accepted)) == 80 and len(await two.rewards(accepted)) == 40
    await one.close()
    await two.close()


async def test_an_attempt_that_another_server_ends_is_known_within_a_second(postgres: Postgres) -> None:
    url = postgres.url().removeprefix("postgresql://")
    store, other = await PostgresStore.open(url), await PostgresStore.open(url)
    await store.enqueue([rollout("a"), rollout("b")])
    [(_, a), (_, b)] = await store.claim("w", limit=2, lease_s=60)
    await asyncio.sleep(TRUSTED_S + 0.2)
    assert store._running.get(b.token_hash) is not None, "the listener keeps an answer fresh"
    await other.finish(a.id, "failed")
    started = time.monotonic()
    while (found := await store.attempt_by_token(a.token)) is not None and found[1].status == "running":
        assert time.monotonic() - started < TRUSTED_S
        await asyncio.sleep(0.01)
    assert store._running.get(b.token_hash) is not None, "other attempts stay in memory"
    await store.close()
    await other.close()


async def test_changes_of_another_server_are_waited_for_without_polling(postgres: Postgres) -> None:
    url = postgres.url()
    one, two = await open_store(url), await open_store(url)
    reader = await open_records(url)
    waiting = [asyncio.create_task(records.changes(0, timeout_s=30)) for records in (two, reader)]
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await one.enqueue([rollout("a")])
    for found in await asyncio.gather(*waiting):
        assert [r.id for r in found.rollouts] == ["a"]
    assert time.monotonic() - started < 0.5
    for store in (one, two, reader):
        await store.close()


async def test_the_store_goes_on_after_a_restart_of_the_database(postgres: Postgres) -> None:
    url = postgres.url()
    store, other = await open_store(url, exclusive=True), await open_store(url)
    attempt = await begin(store)
    await store.append(call(attempt, 0, [1], [2]))
    waiting = asyncio.create_task(wait(other, ["r"], timeout_s=30))
    await asyncio.sleep(0.05)
    postgres.stop()
    late = asyncio.create_task(store.append(call(attempt, 1, [1, 2, 3], [4], parent=f"{attempt.id}/0")))
    reading = asyncio.create_task(other.calls([attempt.id]))
    await asyncio.sleep(0.2)
    assert not late.done() and not reading.done(), "both wait for the database"
    postgres.start()
    await asyncio.gather(late, reading)
    await store.finish(attempt.id, "succeeded")
    assert [r.status for r in await waiting] == ["succeeded"]
    assert [c.index for c in await other.calls([attempt.id])] == [0, 1]
    with pytest.raises(UserError, match="in use by another run"):  # the lock of the first store is back
        await open_store(url, exclusive=True)
    await store.close()
    await other.close()


async def test_a_connection_that_breaks_in_a_transaction_stores_all_or_nothing(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.url().removeprefix("postgresql://")
    store, other = await PostgresStore.open(url), await PostgresStore.open(url)
    attempt = await begin(store)
    broken: list[int] = []

    def breaks(connection: object) -> None:
        """The connection ends after the first work of the group, and once only."""
        if not broken:
            broken.append(store._connection.pid)
            other._connection.execute("SELECT pg_terminate_backend(CAST(? AS integer), 5000)", (broken[0],))

    appends = [store.append(call(attempt, n, [n], [n])) for n in range(4)]
    appends.insert(2, store._writer.run(breaks))
    await asyncio.gather(*appends)
    assert [c.index for c in await other.calls([attempt.id])] == [0, 1, 2, 3]

    broken.clear()
    whole = PostgresStore.ending
    monkeypatch.setattr(PostgresStore, "ending", lambda self, connection: (whole(self, connection), breaks(connection)))
    with pytest.raises(StoreFailed, match="could not commit"):
        await store.append(call(attempt, 4, [1], [2]))
    await store.append(call(attempt, 5, [1], [2]))
    assert [c.index for c in await other.calls([attempt.id])] == [0, 1, 2, 3, 5]
    await store.close()
    await other.close()


@pytest.mark.parametrize("at", [1, 2])  # the works of the first pass are in a pipeline, those of the second are not
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_a_group_whose_connection_broke_before_the_commit_is_done_again(
    postgres: Postgres, at: int, asks: bool, fails: bool
) -> None:
    url = postgres.url().removeprefix("postgresql://")
    store, other = await PostgresStore.open(url), await PostgresStore.open(url)
    attempt = await begin(store)
    called: list[int] = []

    def breaks(connection: Connection) -> str:
        """Its call number `at` ends the connection. `asks`: a statement notices this. `fails`: it raises each time."""
        called.append(store._connection.pid)
        if len(called) == at:
            other._connection.execute("SELECT pg_terminate_backend(CAST(? AS integer), 5000)", (called[-1],))
            if asks:
                connection.execute("SELECT 1").fetchone()
            raise ConnectionError
        if fails:
            raise ValueError
        return "done"

    def refused(connection: Connection) -> None:
        raise KeyError

    works: list[Awaitable[object]] = [store.append(call(attempt, n, [n], [n])) for n in range(4)]
    works[2:2] = [store._writer.run(breaks), store._writer.run(refused)]
    found = await asyncio.gather(*works, return_exceptions=True)
    assert [found[0], found[1], *found[4:]] == [None] * 4
    assert isinstance(found[3], KeyError)
    assert isinstance(found[2], ValueError) if fails else found[2] == "done"
    assert [c.index for c in await other.calls([attempt.id])] == [0, 1, 2, 3]
    await store.close()
    await other.close()


async def test_a_connection_that_ends_while_it_waits_for_its_turn_is_replaced(postgres: Postgres) -> None:
    url = postgres.url().removeprefix("postgresql://")
    store, other, admin = [await PostgresStore.open(url) for _ in range(3)]
    attempt = await begin(store)
    holding = asyncio.create_task(other._writer.run(lambda connection: time.sleep(0.5)))
    await asyncio.sleep(0.1)
    appending = asyncio.create_task(store.append(call(attempt, 0, [1], [2])))
    await asyncio.sleep(0.1)
    admin._connection.execute("SELECT pg_terminate_backend(CAST(? AS integer), 5000)", (store._connection.pid,))
    await asyncio.gather(holding, appending)
    assert [c.index for c in await admin.calls([attempt.id])] == [0]
    for opened in (store, other, admin):
        await opened.close()


async def test_a_server_that_hangs_in_a_transaction_stops_the_others_for_a_limited_time(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules["lightningrl.store.postgres_connection"].SETTINGS, HANGS, "300")
    url = postgres.url().removeprefix("postgresql://")
    hung, store = await PostgresStore.open(url), await PostgresStore.open(url)
    attempt = await begin(store)
    sleeping = asyncio.create_task(hung._writer.run(lambda connection: time.sleep(1.0)))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await store.append(call(attempt, 0, [1], [2]))
    assert 0.1 < time.monotonic() - started < 0.8
    with pytest.raises(StoreFailed):
        await sleeping
    await hung.append(call(attempt, 1, [1], [2]))
    await store.close()
    await hung.close()


HANGS = "idle_in_transaction_session_timeout"


async def test_leases_follow_the_clock_of_the_database(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store(postgres.url())
    await store.enqueue([rollout("live"), rollout("dead")])
    [(_, live)] = await store.claim("w", limit=1, lease_s=60)
    await store.claim("w", limit=1, lease_s=0.0)
    real = time.time
    for jump_s in (3600.0, -3600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        assert [r.id for r, _ in await store.claim("w", limit=9, lease_s=0.0)] == ["dead"]
        assert await store.heartbeat([live.id], lease_s=60) == {live.id}
    await store.close()


async def test_a_reader_changes_nothing_and_waits_for_nobody(postgres: Postgres) -> None:
    url = postgres.url()
    with pytest.raises(UserError, match="does not exist"):
        await open_records(url)
    store = await PostgresStore.open(url.removeprefix("postgresql://"), exclusive=True)
    attempt = await begin(store)
    await store.append(call(attempt, 0, [1], [2]))
    held = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(connection: object) -> None:
        loop.call_soon_threadsafe(held.set)
        time.sleep(0.5)

    holding = asyncio.create_task(store._writer.run(hold))
    await held.wait()
    reader = await open_records(url)
    assert same((await reader.calls([attempt.id]))[0], call(attempt, 0, [1], [2]))
    assert not holding.done()
    with pytest.raises(StoreError, match="read-only"):
        await reader.enqueue([rollout("more")])  # type: ignore[attr-defined]
    await holding
    await reader.close()
    await store.close()


async def test_a_reader_says_soon_that_the_database_is_away_and_closes_at_once(postgres: Postgres) -> None:
    url = postgres.url()
    store = await open_store(url)
    attempt = await begin(store)
    await store.close()
    reader, other = await open_records(url), await open_records(url)
    postgres.stop()
    began = time.monotonic()
    answers = await asyncio.gather(*(reader.calls([attempt.id]) for _ in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreFailed] * 4
    assert time.monotonic() - began < 4, "not one wait after another"
    waiting = [asyncio.create_task(other.calls([attempt.id])) for _ in range(4)]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await other.close()
    assert time.monotonic() - began < 1.8
    assert [type(a) for a in await asyncio.gather(*waiting, return_exceptions=True)] == [StoreFailed] * 4
    postgres.start()
    assert await reader.calls([attempt.id]) == []
    await reader.close()


async def test_the_database_notices_that_the_machine_of_a_server_is_gone(postgres: Postgres) -> None:
    store = await PostgresStore.open(postgres.url().removeprefix("postgresql://"))
    statement = "SELECT count(*) FROM pg_settings WHERE name LIKE 'tcp_keepalives%' AND source = 'session'"
    assert store._connection.execute(statement).fetchone() == (3,)
    await store.close()


async def test_runs_in_one_database_have_a_schema_each(postgres: Postgres) -> None:
    one, two = await open_store(postgres.url("first-run")), await open_store(postgres.url("second_run"))
    await one.publish(Weights(policy="policy", version=1, uri="w"))
    assert await two.weights("policy") is None
    with pytest.raises(UserError, match="cannot be the schema"):
        await open_store(postgres.url('x"; DROP SCHEMA public; --'))
    await one.close()
    await two.close()


async def test_a_database_that_cannot_be_reached_is_refused_with_a_hint(postgres: Postgres) -> None:
    for open_ in (open_store, open_records):
        with pytest.raises(UserError, match="does the database run"):
            await open_("postgresql:///nowhere?host=/nonexistent&connect_timeout=1")


async def test_long_text_and_text_with_nul_are_kept(postgres: Postgres) -> None:
    store = await open_store(postgres.url())
    attempt = await begin(store)
    grammar = os.urandom(20_000).hex()
    one = call(attempt, 0, [1], [2])
    one = replace(one, sampling=replace(one.sampling, grammar=grammar), agent="naïve" * 2000)
    await store.append(one, replace(one, id=f"{attempt.id}/1", index=1))
    assert same((await store.calls([attempt.id]))[0], one)
    await store.finish(attempt.id, "failed", error="a \0 byte", output="\0")
    (ended,) = await store.attempts(["r"])
    assert (ended.error, ended.output) == ("a \\x00 byte", "\0")
    await store.close()
