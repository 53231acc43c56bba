"""`lightningrl rollouts` on a store with known records."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightningrl.cli.rollouts import read, show, where_of
from lightningrl.errors import UserError
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, Reward, Rollout, Sampling, Task

WRITER = [{"role": "system", "content": "You write\n  SQL."}]
TOOL = {"type": "function", "function": {"name": "query", "parameters": {}}}


def call(
    attempt: Attempt, index: int, *, prompt: list[int], said: list[int], system: bool = True, **fields: Any
) -> Call:
    message = {"role": "assistant", "content": "x"}
    body = {"model": "m", "messages": [*(WRITER if system else []), {"role": "user", "content": "hi"}], "tools": [TOOL]}
    given = {
        "id": f"{attempt.id}-{index}",
        "attempt_id": attempt.id,
        "index": index,
        "parent_call_id": None,
        "agent": "writer",
        "policy": "policy",
        "policy_version": 0,
        "dialect": "openai.chat",
        "request": body,
        "response": {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]},
        "prompt_ids": np.array(prompt, np.int32),
        "completion_ids": np.array(said, np.int32),
        "logprobs": np.zeros(len(said), np.float32),
        "sampling": Sampling(),
        "finish_reason": "stop",
        "capture": "rendered",
    }
    return Call(**{**given, **fields})


@asynccontextmanager
async def records(folder: Path) -> AsyncIterator[SQLiteStore]:
    """Four rollouts: one succeeded at its second attempt, one failed, one is running, and one is queued."""
    store = await SQLiteStore.open(folder / "store.sqlite")
    task = Task(id="t7", input={"question": "?"}, split="train")
    await store.enqueue(
        [Rollout(id=f"step-0/t7/{n}", group_id="g", task=task, max_attempts=2 if n == 0 else 1) for n in range(3)]
    )
    claimed = {rollout.id: attempt for rollout, attempt in await store.claim("w", limit=3, lease_s=60)}
    first, failed, running = claimed.values()
    await store.append(
        call(
            first,
            0,
            prompt=[1, 2],
            said=[3],
            capture="incomplete",
            capture_reason="the client went away",
            finish_reason="cancelled",
        )
    )
    await store.finish(first.id, "failed", error="AgentError: ValueError: bad\nTraceback …")
    [(_, second)] = await store.claim("w", limit=1, lease_s=60)
    root = call(second, 0, prompt=[1, 2], said=[3, 4])
    bridged = call(second, 1, prompt=[1, 2, 3, 4, 5], said=[6], parent_call_id=root.id, capture="bridged")
    forked = call(
        second,
        2,
        prompt=[1, 9, 9, 9],
        said=[6, 7],
        parent_call_id=bridged.id,
        capture="forked",
        capture_reason="the tools have changed",
    )
    judge = {"agent": "judge", "capture": "upstream", "policy": "upstreams.judge", "system": False}
    await store.append(root, bridged, forked, call(second, 3, prompt=[], said=[], **judge))
    await store.finish(
        second.id,
        "succeeded",
        rewards=[Reward(attempt_id=second.id, value=0.5), Reward(attempt_id=second.id, name="style", value=9)],
    )
    await store.finish(failed.id, "timeout", error="AgentError: timed out, no answer within 60 s")
    await store.append(call(running, 0, prompt=[1, 2], said=[3]))
    await store.enqueue([Rollout(id="step-0/t7/3", group_id="g", task=task)])
    try:
        yield store
    finally:
        await store.close()


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightningrl", "rollouts", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


async def test_rollouts_are_listed_and_calls_are_counted_while_the_run_goes_on(tmp_path: Path) -> None:
    async with records(tmp_path):
        done = await asyncio.to_thread(cli, ".", "--json", "--report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    shown = ("status", "attempts", "calls", "sampled_tokens", "reward", "error")
    assert [tuple(line[key] for key in shown) for line in found["rollouts"]] == [
        ("succeeded", 2, 4, 5, 0.5, None),
        ("failed", 1, 0, 0, None, "AgentError: timed out, no answer within 60 s"),
        ("running", 1, 1, 1, None, None),
        ("queued", 0, 0, 0, None, None),
    ]
    assert {line["task"] for line in found["rollouts"]} == {"t7"} and found["rollouts"][0]["seconds"] >= 0
    report = found["report"]
    assert {key: report[key] for key in ("calls", "bridged", "rendered", "forked", "upstream", "incomplete")} == {
        "calls": 6,
        "bridged": 1,
        "rendered": 2,
        "forked": 1,
        "upstream": 1,
        "incomplete": 1,
    }
    ((why, fork),) = report["fork_reasons"].items()
    assert why == "the tools have changed" and fork["calls"] == 1 and fork["example"].endswith("-2")
    assert report["incomplete_reasons"]["the client went away"]["calls"] == 1
    assert report["agents"] == {"writer": 5, "judge": 1} and report["policies"] == {"policy": 5, "upstreams.judge": 1}
    assert (report["sampled_tokens"], report["prompt_tokens"], report["reused_tokens"]) == (7, 15, 4 + 1)
    writer, other = sorted(report["fingerprints"].values(), key=lambda role: -role["calls"])
    assert (writer["calls"], writer["system"], writer["tools"]) == (5, "You write SQL.", ["query"])
    assert (other["calls"], other["system"], other["agents"]) == (1, "", {"judge": 1})


@pytest.mark.parametrize("width", [60, 80, 140])
async def test_the_tables_fit_the_terminal(tmp_path: Path, width: int) -> None:
    async with records(tmp_path):
        listing = await asyncio.to_thread(read, tmp_path / "store.sqlite", limit=3, report=True)
    console = Console(file=StringIO(), width=width)
    show(listing, console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "played back" not in text, "no rollout is a branch"
    for word in ("4 rollouts", "1 queued", "running", "and 1 more", "timed out", "bridged", "the tools have", "writer"):
        assert word in text, text


async def test_rollouts_are_found_by_reward_failure_task_step_and_split(tmp_path: Path) -> None:
    store = await SQLiteStore.open(tmp_path / "store.sqlite")
    for split, name in (
        ("train", "train-00000-000-00"),
        ("train", "train-00001-retry1-000-00"),
        ("heldout", "exam-00000-greedy-0000"),
    ):
        task = Task(id="t", input={"question": f"what is {name[-2:]}?"}, split=split)
        await store.enqueue([Rollout(id=name, group_id=name, task=task)])
        [(_, attempt)] = await store.claim("w", limit=1, lease_s=60)
        reward = Reward(attempt_id=attempt.id, value=0.25 if split == "heldout" else 0.0)
        failed = "retry" in name
        await store.finish(
            attempt.id,
            "failed" if failed else "succeeded",
            rewards=[] if failed else [reward],
            error="AgentError: no" * failed,
        )
    await store.close()

    def found(**asked: Any) -> list[str]:
        nothing: dict[str, Any] = {"reward": None, "failed": False, "task": "", "step": None, "split": None}
        return [line.id[:11] for line in read(tmp_path, where=where_of(**{**nothing, **asked})).lines]

    def look() -> None:
        assert (
            found(reward="0") == ["train-00000"]
            and found(reward="0..1") == ["train-00000", "exam-00000-"]
            and found(reward="..-1") == []
        )
        assert found(failed=True) == found(step=2) == ["train-00001"]
        assert found(split="heldout") == ["exam-00000-"] and found(task="IS 00") == [
            "train-00000",
            "train-00001",
            "exam-00000-",
        ]
        with pytest.raises(UserError, match=r"`0..0.5`"):
            found(reward="little")
        listing = read(tmp_path, limit=1)
        assert (listing.counts, listing.errors) == (
            {"succeeded": 2, "failed": 1},
            {"AgentError: no": (1, "train-00001-retry1-000-00")},
        )
        assert [line.id[:11] for line in read(tmp_path, limit=1, before=listing.lines[0].id).lines] == ["train-00001"]

    await asyncio.to_thread(look)


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        read(tmp_path)
    done = cli("nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "hint:" in done.stderr
