"""The contract of a runner: one attempt in, one outcome out, whatever the agent does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightningrl.types import Attempt, AttemptStatus, Reward, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended."""

    status: AttemptStatus
    output: Any = None
    """JSON: what the agent returned or printed."""
    rewards: tuple[Reward, ...] = ()
    error: str | None = None
    """One line that names the error and its owner, then the traceback. None if the attempt succeeded."""


class Runner(Protocol):
    """Every implementation passes the checks of `lightningrl.runner.conformance`."""

    async def start(self) -> None: ...

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        """Run the agent on `rollout.task` and grade its answer. `env` holds base URLs and keys for LLM clients.

        Never raises for anything that the agent or the grader does. A hang ends after `rollout.timeout_s` with status
        `timeout`. When a worker process dies, its attempts end with status `lost`.
        """
        ...

    async def close(self) -> None: ...
