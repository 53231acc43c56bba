"""How many tokens does a rollout read and sample? From recorded calls, or else from an assumption.

All rollouts of a task begin with the same tokens, and a later call of a rollout repeats its history. A forest computes
each such prefix once. With u unique tokens in a rollout and s tokens that all rollouts of a group share, a group of G
has s + G (u - s).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.data.trie import count_unique
from lightningrl.errors import UserError
from lightningrl.types import Attempt, Call, by_attempt

FOLLOW_UP = 100
"""Assumed number of new tokens that a later call reads besides its history: a tool's result, the user's turn."""

LARGEST = 1_000_000_000
"""Most calls, and most tokens of a prompt or an answer, that are estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rollout, on average."""

    source: str
    """Where the numbers come from, for people."""
    is_measured: bool
    """Whether they come from recorded calls; else they are assumed."""
    calls: float
    prompt_tokens: float
    """Tokens that a call reads, its history included."""
    completion_tokens: float
    """Tokens that a call samples."""
    unique_tokens: float
    """Tokens of a rollout after merging its calls."""
    shared_tokens: float
    """Tokens that all rollouts of a group share."""
    agent_s: float | None = None
    """Seconds of a rollout outside its calls, divided by the number of rollouts that ran at the same time. None:
    unknown.
    """

    @property
    def sampled_tokens(self) -> float:
        """Tokens that a rollout samples."""
        return self.calls * self.completion_tokens

    @property
    def path_tokens(self) -> float:
        """Mean number of tokens that a token of the forest attends to."""
        return max(self.unique_tokens, 1.0) / 2

    def unique_in(self, group: int) -> float:
        """Unique tokens of a group of rollouts."""
        return self.shared_tokens + group * (self.unique_tokens - self.shared_tokens)


def assumed(*, calls: float = 3, prompt_tokens: float = 800, completion_tokens: float = 300, source: str) -> Workload:
    """A conversation: the first call reads `prompt_tokens`, which the whole group shares. Each later call reads all
    tokens so far and `FOLLOW_UP` new ones. Raises `UserError` for numbers above `LARGEST`.
    """
    for name, number in (("calls", calls), ("prompt tokens", prompt_tokens), ("completion tokens", completion_tokens)):
        if not number <= LARGEST:
            raise UserError(f"`{number:g}` {name}: at most {LARGEST:,} are estimated", hint="give a smaller number")
    grows = (calls - 1) * (completion_tokens + FOLLOW_UP)
    return Workload(
        source=source,
        is_measured=False,
        calls=calls,
        prompt_tokens=prompt_tokens + grows / 2,
        completion_tokens=completion_tokens,
        unique_tokens=prompt_tokens + grows + completion_tokens,
        shared_tokens=prompt_tokens,
    )


def recorded(groups: Sequence[Sequence[Call]], *, agent_s: float | None, source: str) -> Workload:
    """The mean over recorded groups of rollouts, each given by its calls. There is at least one call.

    From groups of n rollouts with U unique tokens: U = s + n (u - s), so s = (n u - U) / (n - 1).
    """
    calls = [call for group in groups for call in group]
    rollouts = [attempt for group in groups for attempt in by_attempt(group).values()]
    own = float(np.mean([_unique(attempt) for attempt in rollouts]))
    shared = [
        (n * np.mean([_unique(attempt) for attempt in members]) - _unique(group)) / (n - 1)
        for group in groups
        for members in [list(by_attempt(group).values())]
        if (n := len(members)) > 1
    ]
    return Workload(
        source=source,
        is_measured=True,
        calls=len(calls) / len(rollouts),
        prompt_tokens=float(np.mean([len(call.prompt_ids) for call in calls])),
        completion_tokens=float(np.mean([len(call.completion_ids) for call in calls])),
        unique_tokens=own,
        shared_tokens=float(np.mean(shared)) if shared else 0.0,
        agent_s=agent_s,
    )


def outside_calls(attempts: Sequence[Attempt], calls: Sequence[Call], *, together: int) -> float | None:
    """Seconds of an attempt in which no call of it ran, on average, divided by the number of attempts that ran
    `together`. None if no attempt has ended.
    """
    of = by_attempt(calls)
    own = [
        attempt.ended_at - attempt.started_at - sum(c.ended_at - c.started_at for c in of.get(attempt.id, ()))
        for attempt in attempts
        if attempt.ended_at is not None
    ]
    return max(float(np.mean(own)), 0.0) / together if own else None


def _unique(calls: Sequence[Call]) -> int:
    return count_unique([np.concatenate((call.prompt_ids, call.completion_ids)) for call in calls])
