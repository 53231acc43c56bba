"""The gateway, a store of its own and worker processes, in which the agent of a recorded run runs again.

records of the run (read only) → gateway → agent → a temporary store → the courses of the replays
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightningrl.agents import running_agents
from lightningrl.chat import ChatTemplate
from lightningrl.config import Config
from lightningrl.engine.base import Engine
from lightningrl.engines import model_paths
from lightningrl.gateway.assembly import make_gateway
from lightningrl.gateway.server import bound
from lightningrl.look.logs import Logs, logs_of
from lightningrl.replays.given import NoEngine
from lightningrl.replays.recording import Course, Recording, courses
from lightningrl.replays.tokenizer import tokenizer_folder
from lightningrl.store import Store, open_store, wait
from lightningrl.types import Branch, Rollout

Doing: TypeAlias = Callable[[str, int, int], None]
"""Receives what is being done, how much of it is done, and of how much; 0 of 0: it has no parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the agent runs again."""

    folder: Path
    """Temporary: its store and agents.log."""
    store: Store
    doing: Doing

    async def run(self, rollouts: Sequence[Rollout], *, what: str) -> None:
        """Run the agent on these rollouts."""
        ids = [rollout.id for rollout in rollouts]
        await self.store.enqueue(rollouts)
        await wait(self.store, ids, progress=lambda done: self.doing(what, done, len(ids)))

    async def courses(self, ids: Sequence[str]) -> list[Course]:
        """How these rollouts went, in the order of `ids`."""
        ended = {rollout.id: rollout for rollout in await self.store.rollouts(ids=ids)}
        return await courses(self.store, [ended[rollout_id] for rollout_id in ids])

    def printed(self, course: Course) -> Logs | None:
        """What the agent printed; None: nothing."""
        return logs_of(self.folder, course.attempt.id)


@asynccontextmanager
async def staged(
    run: Recording, template: ChatTemplate, *, engines: Mapping[str, Engine], doing: Doing
) -> AsyncIterator[Stage]:
    """Start everything that runs the agent again on the records of `run`. `engines`: by policy, for calls that are
    answered afresh.
    """
    config = run.config
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightningrl-replay-")))
        sock = stack.enter_context(bound(config.gateway))
        store = await open_store(f"sqlite://{folder / 'store.sqlite'}", exclusive=True)
        stack.push_async_callback(store.close)
        gateway = make_gateway(config, store=store, template=template, engines=engines, recordings=run.records)
        doing(f"starting {config.agent.workers} workers for the agent", 0, 0)
        running = running_agents(config, gateway, sock, folder, store=store, recordings=run.records)
        await stack.enter_async_context(running)
        yield Stage(folder=folder, store=store, doing=doing)


def template_of(run: Recording) -> ChatTemplate:
    """The tokenizer and chat template with which the run's prompts were made. No weights are read."""
    return ChatTemplate.load(tokenizer_folder(run.config, run.folder))


def no_engines(config: Config) -> dict[str, Engine]:
    """Engines for a replay of records alone."""
    return {policy: NoEngine() for policy in model_paths(config)}


def again(rollout: Rollout, *, branch: Branch, timeout_s: float) -> Rollout:
    """The same rollout once more, with this branch. It has one attempt: a second one would hide what differs."""
    return Rollout(
        id=rollout.id,
        group_id=rollout.group_id,
        task=rollout.task,
        max_attempts=1,
        timeout_s=timeout_s,
        sampling=rollout.sampling,
        branch=branch,
    )
