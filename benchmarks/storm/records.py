"""Did two runs learn the same from the same records? Digests of weights, and the first records that differ."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from lightningrl.store import open_records
from lightningrl.types import Call, accepted_attempts


def digest(run: Path) -> str:
    """SHA-256 of all tensors of the last checkpoint: weights and the optimizer's moments, by file and name."""
    last = max((run / "checkpoints").glob("step-*"))
    total = hashlib.sha256(last.name.encode())
    for path in sorted(last.rglob("*.safetensors")):
        total.update(path.relative_to(last).as_posix().encode())
        for name, tensor in sorted(load_file(path).items()):
            total.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            total.update(tensor.tobytes())
    return total.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What a run has learnt from."""

    rollouts: dict[str, Any]
    """Rollout → what its accepted attempt did: ids, log-probabilities and rewards; None if it failed."""
    attempts: Counter[str]
    """Number of attempts by status."""
    most: int
    """Most attempts at one rollout."""
    broken: list[str]
    """Rollouts that did not end exactly once."""


async def taught(run: Path) -> Taught:
    store = await open_records(f"sqlite://{run.resolve() / 'store.sqlite'}")
    try:
        rollouts = await store.rollouts()
        attempts = await store.attempts([rollout.id for rollout in rollouts])
        accepted = accepted_attempts(rollouts)
        calls, rewards = await store.calls(accepted), await store.rewards(accepted)
    finally:
        await store.close()
    succeeded = Counter(attempt.rollout_id for attempt in attempts if attempt.status == "succeeded")
    unended = {attempt.rollout_id for attempt in attempts if attempt.status == "running"}
    did: dict[str, Any] = {rollout.id: None for rollout in rollouts}
    for rollout in rollouts:
        if rollout.accepted_attempt_id is not None:
            mine = [_content(call) for call in calls if call.attempt_id == rollout.accepted_attempt_id]
            own = [(r.name, r.value) for r in rewards if r.attempt_id == rollout.accepted_attempt_id]
            did[rollout.id] = (mine, own)
    return Taught(
        rollouts=did,
        attempts=Counter(attempt.status for attempt in attempts),
        most=max(Counter(attempt.rollout_id for attempt in attempts).values(), default=0),
        broken=[
            rollout.id
            for rollout in rollouts
            if rollout.status not in ("succeeded", "failed")
            or succeeded[rollout.id] != (rollout.status == "succeeded")
            or rollout.id in unended
        ],
    )


def differences(one: Taught, other: Taught) -> list[str]:
    """A line for each rollout that taught something else, those of the oldest weights first: the others may follow."""
    lines: list[tuple[int, str]] = []
    for rollout_id in sorted(one.rollouts.keys() | other.rollouts.keys()):
        mine, theirs = one.rollouts.get(rollout_id, "absent"), other.rollouts.get(rollout_id, "absent")
        if mine != theirs:
            lines.append((min(_version(mine), _version(theirs)), f"{rollout_id}: {_first(mine, theirs)}"))
    return [line for _, line in sorted(lines)]


def _version(did: Any) -> int:
    """The oldest weights that answered; -1 if there are none."""
    return min((call[6] for call in did[0] if call[6] >= 0), default=-1) if isinstance(did, tuple) else -1


def _content(call: Call) -> tuple[Any, ...]:
    numbers = (call.prompt_ids.tobytes(), call.completion_ids.tobytes(), call.logprobs.tobytes())
    return (call.index, *numbers, call.finish_reason, call.capture, call.policy_version, call.sampling)


def _first(mine: Any, theirs: Any) -> str:
    if not isinstance(mine, tuple) or not isinstance(theirs, tuple):
        return f"{_brief(mine)} and {_brief(theirs)}"
    fields = ("index", "prompt", "completion", "logprobs", "finish reason", "capture", "version", "sampling")
    for place, (call, other) in enumerate(zip(mine[0], theirs[0], strict=False)):
        parts = [name for name, a, b in zip(fields, call, other, strict=True) if a != b]
        if parts:
            return f"call {place} differs in {', '.join(parts)}: {call[0]} {call[4:]} and {other[0]} {other[4:]}"
    return f"{len(mine[0])} and {len(theirs[0])} calls, rewards {mine[1]} and {theirs[1]}"


def _brief(did: Any) -> str:
    return f"{len(did[0])} calls, rewards {did[1]}" if isinstance(did, tuple) else str(did or "failed")
