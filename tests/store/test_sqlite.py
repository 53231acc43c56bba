"""Does the SQLite store keep its promises, also if the process is killed?"""

import asyncio
import base64
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from lightningrl.errors import StoreError, UserError
from lightningrl.store import Store, conformance, open_records, open_store
from lightningrl.store.conformance import begin, call, rollout, same
from lightningrl.store.schema import MIGRATIONS
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward
from tests.store.writer import WRITER


@pytest.mark.parametrize("where", ["file", "exclusive", "memory"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_sqlite_keeps_the_promises_of_a_store(
    check: Callable[[Store], Awaitable[None]], where: str, tmp_path: Path
) -> None:
    store = await open_store(
        "sqlite:///:memory:" if where == "memory" else f"sqlite://{tmp_path}/s.db", exclusive=where == "exclusive"
    )
    try:
        await check(store)
    finally:
        await store.close()


def _acknowledged_until_killed(path: Path, rollout_id: str, *, after_s: float) -> list[str]:
    """The call ids that a writer has printed before it was killed, each after its `append` has returned."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, f"sqlite://{path}", rollout_id], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    first = writer.stdout.readline()
    time.sleep(after_s)
    os.kill(writer.pid, signal.SIGKILL)
    lines = [first, *writer.stdout]
    writer.stdout.close()
    writer.wait()
    return [line.strip() for line in lines if line.endswith("\n")]


async def test_everything_acknowledged_survives_sigkill_and_nothing_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    delays = random.Random(0)
    for life in range(4):
        acknowledged = _acknowledged_until_killed(path, f"r{life}", after_s=delays.uniform(0.0, 0.15))
        store = await SQLiteStore.open(path, exclusive=True)
        lost = await store.attempts([f"r{life}"])
        assert [a.status for a in lost] == ["running"]
        kept = await store.calls([lost[0].id])
        assert acknowledged
        assert set(acknowledged) <= {c.id for c in kept}
        assert (
            len(kept) == len({c.id for c in kept}) <= len(acknowledged) + 4
        )  # at most one is unacknowledged in each lane
        by_id = {c.id: c for c in kept}
        for c in kept:
            before = (
                []
                if c.parent_call_id is None
                else [*by_id[c.parent_call_id].prompt_ids, *by_id[c.parent_call_id].completion_ids, 7]
            )
            assert c.prompt_ids.tolist() == (before or [c.index % 4])
        [(again, attempt)] = await store.claim("w", limit=1, lease_s=60, holding=())
        assert again.id == f"r{life}"
        assert [a.status for a in await store.attempts([f"r{life}"])] == ["lost", "running"]
        await store.finish(attempt.id, "failed")
        await store.close()


async def test_a_long_conversation_takes_linear_space(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")

    async def size() -> int:
        checkpoint = sqlite3.connect(tmp_path / "s.db")
        assert checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        checkpoint.close()
        return (tmp_path / "s.db").stat().st_size

    await conformance.check_history_costs_linear_space(store, size=size)
    await store.close()


async def test_a_store_that_starts_afresh_goes_on_where_it_was(tmp_path: Path) -> None:
    """A new process needs nothing that the writer remembers."""
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    kept: list[Call] = []
    for index in range(30):
        if index % 10 == 9:
            await store.close()
            store = await SQLiteStore.open(tmp_path / "s.db")
        parent = kept[index // 2] if index % 3 else None
        prompt = [index] if parent is None else [*parent.prompt_ids, *parent.completion_ids, index]
        kept.append(call(attempt, index, prompt, [1] * 50, parent=None if parent is None else parent.id))
        await store.append(kept[-1])
    assert all(same(one, other) for one, other in zip(kept, await store.calls([attempt.id]), strict=True))
    with pytest.raises(StoreError, match="has a call"):
        await store.append(replace(kept[3], index=99))
    await store.close()


async def test_a_call_that_was_undone_is_not_what_the_next_prompt_builds_on(tmp_path: Path) -> None:
    store, other = await SQLiteStore.open(tmp_path / "s.db"), await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    with pytest.raises(StoreError):
        await store.append(call(attempt, 0, [1, 2, 3], [4]), Reward(attempt_id=attempt.id, value=float("nan")))
    root = call(attempt, 0, [5, 6], [7])
    await other.append(root)
    child = call(attempt, 1, [1, 2, 3, 4, 5], [6], parent=root.id)
    await store.append(child)
    assert same((await store.calls([attempt.id]))[1], child)
    await store.close()
    await other.close()


async def test_many_appends_share_a_commit(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    before = _wal_frames(tmp_path / "s.db")
    await asyncio.gather(*(store.append(call(attempt, n, [n], [n])) for n in range(200)))
    # one by one, each commit would write at least 4 frames: a leaf of the table and three of indexes
    assert _wal_frames(tmp_path / "s.db") - before < 200
    await store.close()


def _wal_frames(path: Path) -> int:
    return (Path(f"{path}-wal").stat().st_size - 32) // (8192 + 24)


async def test_a_second_process_reads_while_the_first_writes(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    attempt = await begin(store)
    await store.append(call(attempt, 0, [1], [2]))
    script = (
        "import asyncio, sys; from lightningrl.store.sqlite import SQLiteStore\n"
        "async def main():\n"
        "    store = await SQLiteStore.open(sys.argv[1])\n"
        "    print(len(await store.calls([sys.argv[2]]))); await store.close()\n"
        "asyncio.run(main())"
    )
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path / "s.db"), attempt.id, stdout=asyncio.subprocess.PIPE
    )
    for index in range(1, 50):
        await store.append(call(attempt, index, [1], [2]))
    output, _ = await reader.communicate()
    assert 1 <= int(output) <= 50
    await store.close()


READER = """
import asyncio, sys
from lightningrl.store import open_records

async def main():
    records = await open_records(f"sqlite://{sys.argv[1]}")
    cursor = (await records.changes()).cursor
    print(len(await records.calls([sys.argv[2]])), flush=True)
    print(*[f"{r.id} {r.status}" for r in (await records.changes(cursor, timeout_s=20)).rollouts], flush=True)
    await records.close()

asyncio.run(main())
"""


async def test_a_reader_in_another_process_sees_a_live_run_and_is_told_of_changes(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    attempt = await begin(store)
    await store.append(call(attempt, 0, [1], [2]))
    command = (sys.executable, "-c", READER, str(tmp_path / "s.db"), attempt.id)
    reader = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    assert int(await reader.stdout.readline()) == 1
    await store.finish(attempt.id, "succeeded")
    started = time.monotonic()
    assert await reader.stdout.readline() == b"r succeeded\n"
    assert time.monotonic() - started < 2
    assert await reader.wait() == 0
    await store.close()


async def test_a_reader_changes_nothing_and_gets_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    _acknowledged_until_killed(path, "r", after_s=0.0)
    left = {file.name: file.read_bytes() for file in tmp_path.glob("s.db*") if not file.name.endswith("-shm")}
    assert left["s.db-wal"]
    reader = await open_records(f"sqlite://{path}")
    assert (await reader.attempts(["r"]))[0].status == "running"
    assert await reader.calls(["r.1"])
    with pytest.raises(StoreError, match="readonly"):
        await cast(Store, reader).enqueue([rollout("more")])
    await reader.close()
    assert {name: (tmp_path / name).read_bytes() for name in left} == left
    store = await SQLiteStore.open(path, exclusive=True)
    reader = await open_records(f"sqlite://{path}")
    assert await store.claim("w", limit=1, lease_s=60, holding=())
    assert await reader.count() == {"running": 1}
    await store.close()
    assert await reader.count() == {"running": 1}
    await reader.close()


async def test_a_reader_needs_a_store_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, " * 100)
    for path in (tmp_path / "nowhere" / "s.db", tmp_path / "s.db", tmp_path / "text"):
        with pytest.raises(UserError, match="cannot read the store"):
            await open_records(f"sqlite://{path}")
    assert [file.name for file in tmp_path.iterdir()] == ["text"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root's rights in a process of its own")
async def test_a_run_that_has_ended_is_read_from_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    try:
        store = await SQLiteStore.open(folder / "s.db")
        await begin(store)
        await store.close()
        (folder / "s.db").chmod(0o444)
        folder.chmod(0o555)
        script = (
            "import asyncio, os, sys; from lightningrl.store import open_records, sqlite\n"
            "os.setuid(65534)\n"
            "async def main():\n"
            "    records = await open_records(f'sqlite://{sys.argv[1]}')\n"
            "    print(await records.count())\n"
            "    await records.close()\n"
            "asyncio.run(main())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder / "s.db")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "{'running': 1}\n", done.stderr
        assert [file.name for file in folder.iterdir()] == ["s.db"]
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


async def test_a_store_has_one_exclusive_owner(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    with pytest.raises(UserError, match="in use by another run"):
        await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    await store.close()
    await (await SQLiteStore.open(tmp_path / "s.db", exclusive=True)).close()


async def test_what_is_known_of_an_attempt_without_calls_is_forgotten_with_its_first(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    first, second = await begin(store, "a"), await begin(store, "b")
    assert await store.calls([first.id, second.id]) == []
    with pytest.raises(StoreError):
        await store.append(call(first, 0, [1], [2]), call(first, 0, [1], [2]))
    assert await store.calls([first.id]) == []
    await store.append(call(first, 0, [1], [2]))
    assert [found.index for found in await store.calls([first.id, second.id])] == [0]
    await store.finish(first.id, "succeeded")
    assert [found.index for found in await store.calls([second.id, first.id])] == [0]
    await store.close()


async def test_attempts_of_a_dead_server_go_on_unless_their_worker_has_lost_them(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    await store.enqueue([rollout(name) for name in ("local", "remote", "passed")])
    [(_, local)] = await store.claim("local", limit=1, lease_s=1000)
    [(_, remote)] = await store.claim("far", limit=1, lease_s=1000)
    [(_, passed)] = await store.claim("far", limit=1, lease_s=0.01)
    await store.close()
    await asyncio.sleep(0.02)
    store = await SQLiteStore.open(tmp_path / "s.db")
    await store.close()
    store = await SQLiteStore.open(tmp_path / "s.db", exclusive=True)
    assert await store.heartbeat([passed.id], lease_s=60) == {passed.id}, "a worker may come back before the next claim"
    ((again, attempt),) = await store.claim("local", limit=9, lease_s=1000, holding=())
    assert (again.id, attempt.number) == ("local", 2)
    assert await store.heartbeat([local.id, remote.id, passed.id], lease_s=60) == {remote.id, passed.id}
    await store.append(call(remote, 0, [1], [2]))
    await store.close()


async def test_a_lease_of_another_boot_passes_by_the_wall_clock_on_either_side_of_ours(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    await store.enqueue([rollout(name) for name in "abc"])
    await store.claim("w", limit=3, lease_s=0.0)
    file = sqlite3.connect(tmp_path / "s.db")
    for seq, boot in enumerate((b"", b"\xff" * 17, None), start=1):
        file.execute("UPDATE attempts SET boot = ?, lease_ticks = 1e9 WHERE seq = ?", (boot, seq))
    file.commit()
    file.close()
    assert [r.id for r, _ in await store.claim("w", limit=9, lease_s=60)] == ["a", "b", "c"]
    await store.close()


async def test_a_claim_looks_only_at_what_it_needs(tmp_path: Path) -> None:
    """Each statement of a claim finds its rows by an index."""
    store = await SQLiteStore.open(tmp_path / "s.db")
    statements: list[str] = []
    await store._writer.run(lambda c: cast(sqlite3.Connection, c).set_trace_callback(statements.append))
    await store.claim("w", limit=9, lease_s=60, labels=["gpu"], holding=["a"])
    selects = [statement for statement in statements if statement.startswith("SELECT")]
    assert len(selects) >= 6
    for statement in selects:
        plan = await store._writer.run(lambda connection, s=statement: connection.execute(f"EXPLAIN QUERY PLAN {s}"))
        assert not [row[3] for row in plan.fetchall() if "SCAN" in row[3]], statement
    await store.close()


async def test_no_file_of_a_store_has_a_token_in_it(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    attempt = await begin(store)
    secret = base64.urlsafe_b64decode(attempt.token.removeprefix("lrl-"))
    kept = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert bytes.fromhex(attempt.token_hash) in kept
    assert attempt.token.encode() not in kept and secret not in kept
    await store.close()


JUMPED = """
import asyncio, sys, time
real = time.time
time.time = lambda: real() + float(sys.argv[2])
from lightningrl.store.sqlite import SQLiteStore

async def main():
    store = await SQLiteStore.open(sys.argv[1])
    print([attempt.number for _, attempt in await store.claim("w", limit=9, lease_s=60)])
    await store.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
async def test_a_wall_clock_that_jumps_loses_no_live_attempt_and_keeps_no_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """In the process that claimed it, and in another one that reads the same file."""
    store = await SQLiteStore.open(tmp_path / "s.db")
    await store.enqueue([rollout("live"), rollout("dead")])
    [(_, live)] = await store.claim("w", limit=1, lease_s=60)
    await store.claim("w", limit=1, lease_s=0.0)
    other = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", JUMPED, str(tmp_path / "s.db"), str(jump_s)), stdout=asyncio.subprocess.PIPE
    )
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    mine = [(r.id, a.number) for r, a in await store.claim("w", limit=9, lease_s=60)]
    output, _ = await other.communicate()
    assert (mine, output) in (([("dead", 2)], b"[]\n"), ([], b"[2]\n")), "one of the two takes over the dead attempt"
    await store.append(call(live, 0, [1], [2]))
    await store.heartbeat([live.id], lease_s=60)
    assert await store.claim("w", limit=9, lease_s=60) == []
    await store.close()


async def test_after_a_restart_of_the_machine_leases_follow_the_wall_clock(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "s.db")
    await store.enqueue([rollout("a"), rollout("b")])
    await store.claim("w", limit=1, lease_s=60)
    await store.claim("w", limit=1, lease_s=0.0)
    file = sqlite3.connect(tmp_path / "s.db")
    misleading = "lease_ticks + iif(lease_until < ?, 1e9, -1e9)"
    file.execute(f"UPDATE attempts SET boot = x'00', lease_ticks = {misleading}", (time.time() + 30,))
    file.commit()
    file.close()
    assert [r.id for r, _ in await store.claim("w", limit=9, lease_s=60)] == ["b"]
    await store.close()


async def test_bad_files_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, " * 100)
    for path in (tmp_path / "text", tmp_path / "nowhere" / "s.db"):
        with pytest.raises(UserError, match="hint: is it a SQLite file"):
            await SQLiteStore.open(path)
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    with pytest.raises(UserError, match="use the LightningRL that wrote it"):
        await SQLiteStore.open(tmp_path / "newer.db")


async def test_a_closed_store_refuses_instead_of_hanging() -> None:
    store = await SQLiteStore.open(":memory:")
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.rollouts()


async def test_output_that_is_not_json_is_refused_and_strange_text_is_kept() -> None:
    store = await SQLiteStore.open(":memory:")
    attempt = await begin(store)
    with pytest.raises(StoreError, match="cannot be kept as JSON"):
        await store.finish(attempt.id, "succeeded", output=object())
    await store.finish(attempt.id, "failed", error="bad \udcff byte")
    assert (await store.attempts(["r"]))[0].error == "bad \\udcff byte"
    await store.close()


def test_conformance_tells_calls_apart() -> None:
    """The comparison that the suite relies on can fail."""
    attempt = Attempt(id="a", rollout_id="r", number=1, token="t")
    one: Call = call(attempt, 0, [1], [2])
    assert same(one, call(attempt, 0, [1], [2]))
    assert not same(one, call(attempt, 0, [1], [3]))
    assert not same(one, call(attempt, 0, [1], [2], logprob=-0.2))
