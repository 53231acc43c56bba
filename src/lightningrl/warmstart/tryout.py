"""Tries the agent on training tasks, with given weights or with a teacher in place of the model, at temperature 1.

Held-out tasks are not used: they measure the model before and after training.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightningrl.config import Config, EngineConfig, ModelConfig, TrainerConfig
from lightningrl.data.intervals import bootstrap_mean
from lightningrl.data.tasks import derived_seed, load_tasks
from lightningrl.errors import AgentError
from lightningrl.gateway.routing import FROZEN
from lightningrl.gateway.scripted import MAX_LENGTH
from lightningrl.loop import Loop
from lightningrl.progress import Exam, Watcher
from lightningrl.serve import LightningServer, check_local, lightning, relaying
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Doubles, Task, Weights
from lightningrl.warmstart.demonstrations import recorded
from lightningrl.warmstart.vocabulary import beginning

TASKS = 100
"""Number of training tasks in a trial: a success of 0.35 is then known to ± 0.09."""
LOOKED_AT = 50
"""Number of calls whose system prompt and tools are compared with those of the demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one rollout for each task."""

    success: Doubles
    """[tasks] Final reward, scaled from `agent.reward_range` to [0, 1]; 0 for a failed rollout."""
    failed: int
    """Number of rollouts without a reward."""
    error: str
    """The most frequent error of attempts; "" if there were none."""
    truncated: float
    """Share of the calls that reached their token limit."""
    heads: frozenset[tuple[str, str]]
    """System prompts and tools that the agent sent: see `vocabulary.beginning`."""

    @property
    def mean(self) -> float:
        return float(self.success.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, bootstrap over tasks."""
        return bootstrap_mean(self.success)


def split_tasks(config: Config, *, teach: int) -> tuple[list[Task], list[Task]]:
    """(tasks for a teacher, tasks for trials), all from the split `train`. A quarter of a task file is for trials."""
    seed = derived_seed(config.seed, "warmstart")
    drawn = load_tasks(config.tasks, "train", seed=seed, count=teach + TASKS, root=config.root)
    different = list({repr(task.input): task for task in drawn}.values())
    tried = min(TASKS, max(1, len(different) // 4))
    taught = different[:-tried] or different
    return (taught * -(-teach // len(taught)))[:teach], different[-tried:]


def one_policy(config: Config, *, engine: EngineConfig, policy: str = "policy", path: str = "") -> Config:
    """The recipe with one policy, without adapters, in place of all learners and of `frozen`. Of the settings of the
    trainer, the device is kept.
    """
    own = {*config.learners(), FROZEN}
    routes = [
        route.model_copy(update={"policy": policy}) if route.policy in own and not route.weights else route
        for route in config.routes
    ]
    model = ModelConfig(path=path or config.model.path)
    trainer = TrainerConfig(device=config.trainer.device)
    update = {"policies": {}, "routes": routes, "model": model, "engine": engine, "trainer": trainer}
    return config.model_copy(update=update)


async def play(config: Config, folder: Path, tasks: Sequence[Task], watcher: Watcher) -> None:
    """Run the tasks with `warmstart.teacher` in place of the model, and record the rollouts in `folder`."""
    check_local(config)
    teacher = config.warmstart.teacher
    is_server = teacher.startswith("upstreams.")
    engine = EngineConfig(name="relay" if is_server else teacher, max_length=MAX_LENGTH)
    played = one_policy(config, engine=engine, policy=teacher if is_server else "policy")
    folder.mkdir(parents=True, exist_ok=True)
    async with relaying(played, folder) as server:
        await server.loop(watcher).rollouts.examine(_numbered(tasks), version=0, mode="sampled")


class Tryout:
    """Runs the agent on a fixed set of tasks with a model in training. Workers stay up between trials."""

    def __init__(self, server: LightningServer, loop: Loop, tasks: Sequence[Task]) -> None:
        (self._learner,) = server.learners
        assert isinstance(self._learner.trainer, LocalTrainer), "`one_policy` sets it"
        self.model = self._learner.trainer.model
        """Shared by engine and trainer; it may be changed in place between trials."""
        self.template = server.template
        self._server = server
        self._loop = loop
        self._tasks = tasks
        self._trials = 0

    async def __call__(self) -> Trial:
        """Try the model as it is now."""
        self._trials += 1
        engine = self._learner.engine
        await engine.pause()
        # the engine drops its prefix cache of the old weights
        await engine.load(Weights(policy=self._learner.name, version=self._trials, uri=""))
        await engine.resume()
        try:
            exam = await self._loop.rollouts.examine(self._tasks, version=self._trials, mode="sampled")
        except AgentError as error:  # every rollout failed: agents may crash on nonsense answers
            return Trial(
                success=np.zeros(len(self._tasks)),
                failed=len(self._tasks),
                error=error.message,
                truncated=0.0,
                heads=frozenset(),
            )
        finally:
            await engine.pause()
        return await self._trial(exam)

    async def _trial(self, exam: Exam) -> Trial:
        low, high = self._server.config.agent.reward_range or (0.0, 1.0)
        attempts = await self._server.store.attempts([rollout.id for rollout in exam.rollouts])
        errors = Counter((attempt.error or "").partition("\n")[0] for attempt in attempts if attempt.error)
        calls = await self._server.store.calls([attempt.id for attempt in attempts if attempt.status == "succeeded"])
        return Trial(
            success=np.clip((np.nan_to_num(exam.rewards, nan=low) - low) / (high - low), 0, 1),
            failed=exam.failed,
            error=errors.most_common(1)[0][0] if errors else "",
            truncated=float(np.mean([call.finish_reason == "length" for call in calls])) if calls else 0.0,
            heads=frozenset(beginning(answer) for answer in recorded(calls[:LOOKED_AT])),
        )


@asynccontextmanager
async def trying_out(
    config: Config, folder: Path, tasks: Sequence[Task], *, model: Path, watcher: Watcher
) -> AsyncIterator[Tryout]:
    """Serve a model folder to the agent while the block runs. Records and agents.log are written to `folder`."""
    check_local(config)
    engine = EngineConfig(slots=config.engine.slots, max_length=config.engine.max_length)
    tried = one_policy(config, engine=engine, path=str(model.resolve()))
    async with lightning(tried, folder) as server:
        loop = server.loop(watcher)
        yield Tryout(server, loop, _numbered(tasks))


def _numbered(tasks: Sequence[Task]) -> list[Task]:
    """Tasks with new ids: a teacher may do a task of a file several times, so ids repeat."""
    return [Task(id=str(number), input=task.input, split=task.split) for number, task in enumerate(tasks)]
