"""One rollout and one call, as plain data."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightningrl.data.taught import taught_file
from lightningrl.errors import UserError
from lightningrl.look import look_at, look_at_call, opened
from lightningrl.look.opened import Opened
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Reward, Rollout, Span, Task
from tests.cli.test_rollouts import call
from tests.conftest import SmallRecipe

NAMES = [f"train-00000-000-0{n}" for n in range(3)]
TRACE = "a" * 32


def span(attempt_id: str, name: str, kind: str, start: float, end: float, parent: str | None = None) -> Span:
    return Span(
        id=name.encode().hex()[:16].ljust(16, "0"),
        attempt_id=attempt_id,
        call_id=None,
        kind=kind,  # pyright: ignore[reportArgumentType]
        name=name,
        started_at=start,
        ended_at=end,
        trace_id=TRACE,
        parent_id=None if parent is None else parent.encode().hex()[:16].ljust(16, "0"),
    )


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Opened]:
    """A group of three. The second rollout succeeded at its second attempt, which made three calls, two in parallel."""
    store = await SQLiteStore.open(tmp_path / "store.sqlite")
    task = Task(id="t7", input={"question": "who?"}, split="train")
    await store.enqueue([Rollout(id=name, group_id="g", task=task, max_attempts=2) for name in NAMES])
    claimed = {rollout.id: attempt for rollout, attempt in await store.claim("w", limit=3, lease_s=60)}
    first = claimed[NAMES[1]]
    await store.append(call(first, 0, prompt=[1, 2], said=[3], started_at=1.0, ended_at=2.0))
    await store.finish(first.id, "failed", error="ValueError: no\nTraceback of it")
    await store.finish(claimed[NAMES[0]].id, "succeeded", rewards=[Reward(attempt_id=claimed[NAMES[0]].id, value=1.0)])
    [(_, second)] = await store.claim("w", limit=1, lease_s=60)
    plan = call(second, 0, prompt=[1, 2], said=[3], started_at=1.0, ended_at=2.0)
    solve = [
        call(
            second,
            n,
            prompt=[1, 2, 3, 4],
            said=[5],
            parent_call_id=plan.id,
            capture="bridged",
            started_at=2.0 + n,
            ended_at=6.0,
        )
        for n in (1, 2)
    ]
    await store.append(plan, *solve)
    await store.append(
        span(second.id, "team", "agent", 0.5, 9.0),
        span(second.id, "step", "other", 0.6, 8.0, "team"),
        span(second.id, "search", "tool", 2.1, 2.9, "step"),
    )
    await store.finish(second.id, "succeeded", rewards=[Reward(attempt_id=second.id, value=0.0)], output="x")
    await store.close()
    async with opened(tmp_path) as run:
        yield run


async def test_siblings_and_neighbours_are_those_of_the_group(run: Opened) -> None:
    found = [(await look_at(run, name)).as_json() for name in NAMES]
    assert [(one["previous"], one["next"]) for one in found] == [
        (None, NAMES[1]),
        (NAMES[0], NAMES[2]),
        (NAMES[1], None),
    ]
    assert found[0]["siblings"] == [
        {"id": NAMES[0], "reward": 1.0, "status": "succeeded", "trunk": None},
        {"id": NAMES[1], "reward": 0.0, "status": "succeeded", "trunk": None},
        {"id": NAMES[2], "reward": None, "status": "running", "trunk": None},
    ]


async def test_another_attempt_than_the_accepted_one_is_shown_and_taught_nothing(run: Opened) -> None:
    accepted, failed = await look_at(run, NAMES[1]), await look_at(run, NAMES[1], attempt=1)
    assert accepted.as_json()["number"] == 2 and len(accepted.calls) == 3
    assert failed.as_json()["number"] == 1 and len(failed.calls) == 1 and not failed.spans
    assert failed.as_json()["attempts"] == accepted.as_json()["attempts"]
    with pytest.raises(UserError, match="no attempt `3`") as raised:
        await look_at(run, NAMES[1], attempt=3)
    assert "1, 2" in str(raised.value.hint)


async def test_only_the_accepted_attempt_teaches(run: Opened, small_recipe: SmallRecipe) -> None:
    (run.file.parent / "config.toml").symlink_to(small_recipe.path)
    async with opened(run.file.parent) as known:
        accepted = (await look_at(known, NAMES[1])).as_json()
        failed = (await look_at(known, NAMES[1], attempt=1)).as_json()
    assert accepted["teaching"] == {"learnt": False, "why_not": None} and accepted["credit"]["advantage"] == "grpo"
    assert all(c["advantage"] < 0 and c["credit"]["words"] for c in accepted["calls"])
    assert failed["step"] == 1 and "attempt 2 was accepted" in failed["teaching"]["why_not"]
    assert failed["credit"] is None and failed["calls"][0]["advantage"] is None


async def test_parallel_calls_and_spans_lie_in_lanes(run: Opened) -> None:
    found = json.loads(json.dumps((await look_at(run, NAMES[1])).as_json(tokens=False)))
    assert [(c["number"], c["parent"], c["lane"]) for c in found["calls"]] == [(1, None, 1), (2, 1, 1), (3, 1, 2)]
    assert [c["origin"] for c in found["calls"]] == ["begins a conversation"] + ["continues call 1 token for token"] * 2
    assert all("tokens" not in c and c["grammar"] is False for c in found["calls"])
    agent, tool = found["spans"]
    assert (agent["name"], agent["lane"], agent["parent"]) == ("team", 0, None)
    assert (tool["name"], tool["lane"], tool["parent"]) == ("search", 1, agent["id"])


async def test_what_the_shown_attempt_printed_is_shown_with_it(run: Opened) -> None:
    assert (await look_at(run, NAMES[1])).as_json()["logs"] is None
    log = "loaded\n[{0}.1] first try\n[{0}.2] second try\n"
    (run.file.parent / "agents.log").write_text(log.format(NAMES[1]))
    accepted, failed = await look_at(run, NAMES[1]), await look_at(run, NAMES[1], attempt=1)
    assert accepted.as_json()["logs"] == {"text": "second try\n", "truncated": False}
    assert failed.as_json()["logs"] == {"text": "first try\n", "truncated": False}
    assert (await look_at(run, NAMES[0])).logs is None


async def test_one_call_is_shown_with_its_request_and_its_tokens(run: Opened) -> None:
    found = json.loads(json.dumps((await look_at_call(run, NAMES[1], 3)).as_json()))
    assert found["request"]["messages"][-1]["content"] == "hi" and found["response"]["choices"]
    assert found["tokens"]["prompt"]["runs"] == [
        {"from": 0, "to": 2, "origin": "rendered", "call": 1},
        {"from": 2, "to": 3, "origin": "sampled", "call": 1},
        {"from": 3, "to": 4, "origin": "rendered", "call": 3},
    ]
    assert found["tokens"]["sampled"]["ids"] == [5] and found["tokens"]["sampled"]["logprobs"] == [0.0]
    assert found["tokens"]["prompt"]["texts"] is None and "tokenizer" in found["tokens"]["why_not"]["texts"]
    for name in ("advantages", "entropies", "ratios", "alternatives"):
        assert found["tokens"]["sampled"][name] is None and found["tokens"]["why_not"][name], name
    with pytest.raises(UserError, match="no call `4`"):
        await look_at_call(run, NAMES[1], 4)


async def test_a_damaged_file_of_what_a_step_taught_hides_nothing_else(run: Opened, small_recipe: SmallRecipe) -> None:
    (run.file.parent / "config.toml").symlink_to(small_recipe.path)
    file = taught_file(run.file.parent, step=0, policy="policy")
    file.parent.mkdir()
    file.write_bytes(b"damaged")
    async with opened(run.file.parent) as known:
        tokens = (await look_at_call(known, NAMES[1], 3)).as_json()["tokens"]
    assert tokens["sampled"]["advantages"] is not None and "advantages" not in tokens["why_not"]
    for name in ("entropies", "ratios"):
        assert tokens["sampled"][name] is None and "is damaged" in tokens["why_not"][name], name
