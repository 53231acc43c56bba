"""Did an agent go the same way again? Where did it part from its record, and how do the two differ there?"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightningrl.branches import DIFFERS, VOID, played_back
from lightningrl.replays.recording import Course, first_line
from lightningrl.types import Branch

Kind: TypeAlias = Literal["request", "fewer calls", "error", "output", "reward"]
"""`request`: it asked something else. `fewer calls`: it ended before it had asked everything. `error`: it failed, or
failed otherwise. `output`, `reward`: all calls are the same, and this is not.
"""
SHOWN = 200
"""Characters of an output that are shown around its first difference."""
BEFORE = 40
"""Of these, before it."""
EXCERPT = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A text of one rollout within the reason of `gateway/difference.py`."""
ERROR = re.compile(r"(?:AgentError: )?([\w.]+)(?:: (.*))?")
"""The first line of an attempt's error: its type and its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where a replay went another way."""

    kind: Kind
    call: int | None
    """Number of its first call that is not as recorded, from 1; None: all calls are the same."""
    why: str
    """What differs, without what is special to this rollout."""
    example: str
    """The difference in this rollout."""


def parting(trunk: Course, again: Course) -> Parting | None:
    """Where a replay of the whole trunk went another way; None: same calls, same output, same rewards, and an attempt
    that failed has failed with the same error.
    """
    different = next((call for call in again.calls if (call.capture_reason or "").startswith(DIFFERS)), None)
    if different is not None:
        example = (different.capture_reason or "").removeprefix(DIFFERS)
        return Parting(kind="request", call=different.index + 1, why=EXCERPT.sub("…", example), example=example)
    branch = Branch(attempt_id=trunk.attempt.id, call_id=None)
    repeated = {call.replays for call in again.calls}
    missing = next((call for call in played_back(trunk.calls, branch) if call.id not in repeated), None)
    failed = _failure(again)
    if failed is not None and failed != trunk.error:
        kind, message = _read(failed)
        return Parting(kind="error", call=None if missing is None else missing.index + 1, why=kind, example=message)
    if missing is not None:
        why, count = "it ended before this call", len(played_back(trunk.calls, branch))
        return Parting(
            kind="fewer calls", call=missing.index + 1, why=why, example=f"{len(repeated)} of {count} recorded calls"
        )
    return _other_end(trunk, again)


def _failure(again: Course) -> str | None:
    """The first line of the agent's own error; None: it has none."""
    error = again.attempt.error
    if error is not None and error.startswith(VOID):
        error = error.partition("\n\n")[2] or None
    return first_line(error)


def _read(error: str) -> tuple[str, str]:
    """An error's type, and its message: `AgentError: KeyError: 'oh'` → `KeyError`, `'oh'`"""
    found = ERROR.fullmatch(error)
    return (found[1], found[2] or error) if found else ("AgentError", error.removeprefix("AgentError: "))


def _other_end(trunk: Course, again: Course) -> Parting | None:
    """The difference of output or rewards."""
    if trunk.error is not None and again.error is None:
        return Parting(
            kind="error", call=None, why="it succeeded, and failed when it was recorded", example=trunk.error
        )
    if again.attempt.output != trunk.attempt.output:
        example = difference(as_text(trunk.attempt.output), as_text(again.attempt.output))
        return Parting(kind="output", call=None, why="same calls, other output", example=example)
    for name in sorted(trunk.rewards.keys() | again.rewards.keys()):
        before, now = trunk.rewards.get(name), again.rewards.get(name)
        if before is None or now is None or not math.isclose(before, now, rel_tol=1e-9, abs_tol=1e-12):
            why = f"same calls and output, other reward `{name}`"
            return Parting(kind="reward", call=None, why=why, example=f"{figure(before)} → {figure(now)}")
    return None


def as_text(output: Any) -> str:
    """An agent's output: a text as it is, everything else as JSON."""
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def figure(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.4g}"


def difference(before: str, now: str) -> str:
    """Two texts around their first difference: `…the answer is 4` → `…the answer is 5`"""
    same = next((place for place, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), None)
    start = max(0, (min(len(before), len(now)) if same is None else same) - BEFORE)
    return f"`{_cut(before, start)}` → `{_cut(now, start)}`"


def _cut(text: str, start: int) -> str:
    end = start + SHOWN
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
