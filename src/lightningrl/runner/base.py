"""The contract of a runner: one attempt in, one outcome out, whatever the agent does."""

from collections.abc import Mapping
from typing import Protocol

from lightningrl.leases import Outcome
from lightningrl.types import Attempt, Rollout


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
