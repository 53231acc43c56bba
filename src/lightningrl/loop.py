"""collect → credit → learn → publish: one step of training. Read this file first.

    collect   enqueue rollouts, wait until agents have run them                rollouts.py
    credit    records → trajectories → lessons                                 learner.py, algorithms/
    learn     pack lessons into forests; forward, backward, optimizer step     learner.py, data/, trainer/
    publish   save the weights, record the version, load it into the engine    checkpoints.py, learner.py

    lesson    one call with an advantage and a loss weight for each sampled token
    forest    lessons of many calls as token trees, in which each shared prefix is computed once
    AIR       automatic intermediate rewards: rules that reward a call for what it caused, e.g. a failed tool

Agents and the loop communicate only through the store. Given the records of its rollouts and the last checkpoint, a
step is deterministic. A killed run resumes at that checkpoint. It keeps the rollouts that have ended and runs the
others again, with the same sampling seeds.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from lightningrl.algorithms.air import air_rewards
from lightningrl.checkpoints import Checkpoints
from lightningrl.config import Config
from lightningrl.cpu import CpuSplit
from lightningrl.data.dump import dump_lessons
from lightningrl.data.forest import Lesson
from lightningrl.data.metrics import batch_metrics, fork_metrics, share_of_logs, void_attempts
from lightningrl.data.tasks import asked, derived_seed
from lightningrl.data.taught import keep_taught
from lightningrl.errors import UserError
from lightningrl.hosted.cost import Spent
from lightningrl.learner import Learner
from lightningrl.progress import MODES, Exam, Mode, Summary, Watcher
from lightningrl.rollouts import Rollouts, never_called
from lightningrl.store import Store
from lightningrl.tracing import spans_of, united
from lightningrl.types import Attempt, Call, Reward, Rollout, accepted_attempts


class Loop:
    """Trains the policies of one recipe. Several policies share the rollouts; each learns from its own calls."""

    def __init__(
        self,
        config: Config,
        *,
        store: Store,
        learners: Sequence[Learner],
        checkpoints: Checkpoints,
        folder: Path,
        watcher: Watcher,
        spent: Spent | None = None,
    ) -> None:
        """`spent`: what a service has processed; None: this machine computes."""
        self.config = config
        self.store = store
        self.learners = learners
        self.checkpoints = checkpoints
        self.folder = folder
        self.watcher = watcher
        self.spent = spent
        self.rollouts = Rollouts(config, store=store, checkpoints=checkpoints, folder=folder, watcher=watcher)
        self.cpu = CpuSplit()

    async def run(self) -> Summary:
        """Train up to step `loop.steps`, starting from the newest published version."""
        config, steps = self.config.loop, self.config.loop.steps
        version = await self.restore()
        self.cpu.lap("rest")
        resumed = version > 0 or self.checkpoints.published > 0  # 0 and above: all later versions are damaged
        if not resumed:
            await self.rollouts.try_out()
        before: dict[Mode, Exam] = {
            mode: await self.examine(0, mode, when="before training", recall=resumed) for mode in MODES
        }
        for step in range(version, steps):
            if step and config.eval_every and step % config.eval_every == 0:
                await self.examine(step, "sampled", when=f"after {step} steps", count=config.eval_tasks)
            await self.step(step)
        after: dict[Mode, Exam] = {mode: await self.examine(steps, mode, when="after training") for mode in MODES}
        return Summary(before=before, after=after, rollouts=sum((await self.store.count()).values()))

    async def restore(self) -> int:
        """Load the newest undamaged version, serve it, and return its number. A new run publishes its initial weights
        as version 0.

        If a newer version was published and is damaged, the older one is not served yet. Its steps are first computed
        again from the stored rollouts; queued rollouts of later steps would otherwise be answered by older weights.
        """
        version = await self.checkpoints.restore()
        if version < 0:
            await self.publish(0)
            return 0
        if version >= self.checkpoints.published:
            await self._serve(version)
        return version

    async def step(self, step: int) -> None:
        """Turn version `step` of the weights into version `step + 1`."""
        started, spent = time.monotonic(), self.cpu.seconds
        batch = await self.collect(step)
        collected = time.monotonic()
        self.cpu.lap("gateway")
        self.watcher.doing(f"step {step + 1}: learning from {len(batch)} rollouts")
        lessons, metrics = await self.credit(step, batch)
        metrics |= await self.learn(step, lessons)
        self.watcher.doing(f"step {step + 1}: saving the new weights and serving them")
        metrics |= await self.publish(step + 1)
        metrics |= {"time/collect_s": collected - started, "time/learn_s": time.monotonic() - collected}
        self.cpu.lap("training")
        self.watcher.stepped(step, metrics | self.cpu.since(spent) | self.service_metrics())

    async def collect(self, step: int) -> list[Rollout]:
        """Complete groups of rollouts: each has succeeded or failed."""
        return await self.rollouts.collect(step)

    async def credit(self, step: int, batch: Sequence[Rollout]) -> tuple[dict[str, list[Lesson]], dict[str, float]]:
        """Compute the advantage and the loss weight of each sampled token. Returns policy → lessons, and metrics."""
        accepted = accepted_attempts(batch)
        calls, rewards = await self.store.calls(accepted), await self.store.rewards(accepted)
        if accepted and not calls:
            raise never_called(f"no call in {len(accepted)} rollouts", log=self.folder / "agents.log")
        air = await self._air(accepted, calls)
        metrics = batch_metrics(batch, calls, [*rewards, *air], heldout=self._heldout)
        void = await self._void(batch)
        if void:
            self.watcher.voided(step, f"`{void[0].id}` is {(void[0].error or '').splitlines()[0]}")
        metrics |= fork_metrics(batch, calls, void)
        if self.config.agent.command is not None:
            attempts = await self.store.attempts([rollout.id for rollout in batch])
            metrics["answers/logs"] = share_of_logs(attempts, rewards)
        lessons, left_out = dict[str, list[Lesson]](), Counter[str]()
        oldest = step - self.config.loop.max_off_policy_steps
        for learner in self.learners:
            lessons[learner.name], own, reasons = await learner.lessons(
                batch, calls, rewards, air=air, oldest_version=oldest
            )
            metrics |= self._named(learner, own)
            left_out.update(reasons)
        if calls and not any(lesson.weights.any() for own in lessons.values() for lesson in own):
            reasons = ", ".join(f"`{reason}` {count} times" for reason, count in left_out.items())
            raise UserError(f"no call can be trained: {reasons}", hint="check `routes`: is there a role that learns?")
        return lessons, metrics

    async def learn(self, step: int, lessons: Mapping[str, Sequence[Lesson]]) -> dict[str, float]:
        """Update each policy from its own lessons. Returns metrics. What the update did to some tokens is saved in the
        run's folder. An optimizer step with a non-finite gradient is skipped, and the lessons of the batch are saved;
        the next version is published all the same.
        """
        metrics = dict[str, float]()
        remaining = 1.0 - step / self.config.loop.steps
        seed = derived_seed(self.config.seed, "minibatches", step)
        for learner in self.learners:
            await learner.prepare(lessons[learner.name])
        # An engine may share its weights with the trainer. `publish` resumes it.
        await asyncio.gather(*(learner.engine.pause() for learner in self.learners))
        for learner in self.learners:
            own, taught = await learner.update(lessons[learner.name], seed=seed, remaining=remaining)
            metrics |= self._named(learner, own)
            await asyncio.to_thread(keep_taught, taught, self.folder, step=step, policy=learner.name)
            if own.get("optim/skipped"):
                trained = [lesson for lesson in lessons[learner.name] if lesson.weights.any()]
                path = self.folder / "skipped" / f"step-{step:05d}-{learner.name}.npz"
                await asyncio.to_thread(dump_lessons, path, trained)
        return metrics

    async def publish(self, version: int) -> dict[str, float]:
        """Save the weights and record them in the store, then serve them. Returns metrics."""
        await self.checkpoints.save(version)
        return await self._serve(version)

    async def examine(
        self, version: int, mode: Mode, *, when: str = "", count: int | None = None, recall: bool = False
    ) -> Exam:
        """Evaluate the weights `version` on the first `count` held-out tasks; None: on all. See `Rollouts.examine`."""
        total = self.config.tasks.heldout
        tasks = self.rollouts.heldout(total if count is None else min(count, total))
        exam = await self.rollouts.examine(tasks, version=version, mode=mode, when=when, recall=recall)
        self.cpu.lap("gateway")
        return exam

    def service_metrics(self) -> dict[str, float]:
        """What a service has processed since the last call: in a step, and in the exams before it."""
        return {} if self.spent is None else self.spent.metrics({**self.config.service.prices})

    async def _serve(self, version: int) -> dict[str, float]:
        metrics = dict[str, float]()
        for learner in self.learners:
            metrics |= self._named(learner, await learner.serve(learner.weights(version)))
        return metrics

    async def _air(self, attempt_ids: Sequence[str], calls: Sequence[Call]) -> list[Reward]:
        """Rewards that the recipe's rules give for spans (AIR). They follow from records and are not stored."""
        if not self.config.air:
            return []
        spans = united(await self.store.spans(attempt_ids), spans_of(calls))
        return air_rewards(spans, self.config.air, root=self.config.root)

    async def _void(self, batch: Sequence[Rollout]) -> list[Attempt]:
        """The attempts of void branches."""
        failed = [rollout.id for rollout in batch if rollout.branch is not None and rollout.status == "failed"]
        return void_attempts(await self.store.attempts(failed)) if failed else []

    @cached_property
    def _heldout(self) -> frozenset[bytes]:
        """Inputs of the held-out tasks."""
        return frozenset(map(asked, self.rollouts.heldout(self.config.tasks.heldout)))

    def _named(self, learner: Learner, metrics: dict[str, float]) -> dict[str, float]:
        """With several policies, each metric gets the policy's name as a prefix."""
        if len(self.learners) == 1:
            return metrics
        return {f"{learner.name}/{name}": value for name, value in metrics.items()}
