"""What a runner promises: one attempt in, one outcome out; whatever the agent does, the runner comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightningrl.types import Attempt, AttemptStatus, Reward, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    status: AttemptStatus
    output: Any = None
    """JSON: what the agent returned (or printed)."""
    rewards: tuple[Reward, ...] = ()
    error: str | None = None
    """One line that says whose failure it was, then the traceback; None if it succeeded."""


class Runner(Protocol):
    """`lightningrl.runner.conformance` is the suite that every implementation passes."""

    async def start(self) -> None: ...

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        """Run the agent on `rollout.task` and grade it. `env` holds what any OpenAI client reads (base URL, key).

        Never raises for anything the agent or the grader does. A hang ends after `rollout.timeout_s` as `timeout`;
        a worker that dies ends what it ran as `lost`.
        """
        ...

    async def close(self) -> None: ...
