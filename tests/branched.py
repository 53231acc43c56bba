"""Does a branch that samples the recorded answer again end exactly as its trunk did? For every call of every rollout.

A branch with the trunk's sampling seed has the trunk's randomness: it follows from seed, prompt and occurrence.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightningrl.branches import played_back
from lightningrl.conformance import SilentWatcher
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.store import Store, wait
from lightningrl.types import Attempt, Branch, Call, Reward, Rollout

WAIT_S = 300.0
"""Ten times what any batch of branches takes."""
TIMES = {"created", "created_at", "createTime", "completed_at"}
"""Fields of responses that say when they were made."""

Key = tuple[bytes, int]
"""(a call's prompt ids, how many calls of its attempt had this prompt before it)"""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """A rollout whose attempt has ended."""

    rollout: Rollout
    attempt: Attempt
    calls: Sequence[Call]
    rewards: Sequence[Reward]


async def branched(recipe: Path, folder: Path, *, overrides: Sequence[str]) -> list[tuple[Ending, Ending]]:
    """Run a batch of a recipe, then branch each of its rollouts at each of its calls: (trunk, branch) of all."""
    folder.mkdir(parents=True, exist_ok=True)
    async with lightning(load_config(recipe, overrides), folder) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        trunks = [await ended(server.store, rollout) for rollout in await loop.collect(0)]
        trunks = [trunk for trunk in trunks if trunk.attempt.status == "succeeded"]
        of = {rollout.id: trunk for trunk in trunks for rollout in branches(trunk)}
        await server.store.enqueue([rollout for trunk in trunks for rollout in branches(trunk)])
        done = await wait(server.store, list(of), timeout_s=WAIT_S)
        assert len(done) == len(of), f"{len(of) - len(done)} branches have not ended"
        return [(of[rollout.id], await ended(server.store, rollout)) for rollout in done]


def branches(trunk: Ending) -> Iterator[Rollout]:
    """A rollout for each call, which branches there with the trunk's seed, and one for a pure replay."""
    for name, call_id in [("all", None), *((f"at{call.index + 1:02}", call.id) for call in trunk.calls)]:
        branch = Branch(attempt_id=trunk.attempt.id, call_id=call_id)
        yield replace(
            trunk.rollout,
            id=f"{trunk.rollout.id}-{name}",
            status="queued",
            accepted_attempt_id=None,
            max_attempts=1,
            branch=branch,
        )


async def ended(store: Store, rollout: Rollout) -> Ending:
    """The last attempt of a rollout."""
    attempt = (await store.attempts([rollout.id]))[-1]
    return Ending(
        rollout=rollout,
        attempt=attempt,
        calls=await store.calls([attempt.id]),
        rewards=await store.rewards([attempt.id]),
    )


def assert_same_ending(trunk: Ending, branch: Ending) -> None:
    """The branch has the trunk's calls, output and rewards, and has played back what it should."""
    assert branch.rollout.branch is not None
    where = branch.rollout.id
    assert branch.attempt.status == "succeeded", f"{where}: {branch.attempt.error}"
    replayed = Counter(call.replays for call in branch.calls if call.replays is not None)
    assert replayed == Counter(call.id for call in played_back(trunk.calls, branch.rollout.branch)), where
    assert_same_calls(trunk.calls, branch.calls, where=where)
    assert branch.attempt.output == trunk.attempt.output, where
    assert _earned(branch) == _earned(trunk), where


def assert_same_calls(trunk: Sequence[Call], branch: Sequence[Call], *, where: str) -> None:
    """Both have the same calls; parallel ones in any order."""
    wanted, got = _keyed(trunk), _keyed(branch)
    assert got.keys() == wanted.keys(), f"{where}: {len(got.keys() ^ wanted.keys())} prompts differ"
    names = {call_id: key for keyed in (wanted, got) for key, call in keyed.items() for call_id in _ids(call)}
    for key, call in wanted.items():
        twin = got[key]
        assert twin.replays in (None, call.id), f"{where}: call {call.index + 1} was played back for another one"
        assert _exact(twin, names) == _exact(call, names), f"{where}: call {call.index + 1}"
        if twin.replays is not None:
            assert twin.response == call.response, f"{where}: call {call.index + 1} was not played back as recorded"


def _ids(call: Call) -> tuple[str, str]:
    """A call's id, and the same without its dialect's prefix: items of a response have prefixes of their own."""
    return call.id, f"{call.attempt_id}-{call.index}"


def _keyed(calls: Sequence[Call]) -> dict[Key, Call]:
    seen: dict[bytes, int] = defaultdict(int)
    keyed: dict[Key, Call] = {}
    for call in calls:
        prompt = call.prompt_ids.tobytes()
        keyed[prompt, seen[prompt]] = call
        seen[prompt] += 1
    return keyed


def _exact(call: Call, names: Mapping[str, Key]) -> tuple[Any, ...]:
    """What must be equal, bit for bit; without ids and times."""
    return (
        call.completion_ids.tobytes(),
        call.logprobs.tobytes(),
        (call.policy, call.policy_version, call.agent, call.dialect, call.sampling, call.finish_reason),
        (call.capture, call.capture_reason, names.get(call.parent_call_id or "")),
        _timeless(call.response, names),
    )


def _timeless(value: Any, names: Mapping[str, Key]) -> Any:
    """A response without its times, and with keys for the ids of calls."""
    if isinstance(value, Mapping):
        return {key: _timeless(found, names) for key, found in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [_timeless(found, names) for found in value]
    if isinstance(value, str):
        for call_id in sorted(names, key=len, reverse=True):  # an id may begin with another one
            value = value.replace(call_id, str(names[call_id]))
    return value


def _earned(ending: Ending) -> Counter[str]:
    names = {call.id: str(key) for key, call in _keyed(ending.calls).items()}
    earned = ((r.name, r.value, r.source, names.get(r.call_id or "")) for r in ending.rewards)
    return Counter(json.dumps(reward) for reward in earned)
