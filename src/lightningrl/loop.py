"""collect → credit → pack → step → publish. Read this first.

The loop asks the store for rollouts and waits for them; agents run elsewhere and know nothing of it. What it learns from are
records alone, so a run that is killed anywhere goes on from its last published weights as if nothing had happened.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np

from lightningrl.algorithms import lessons_of
from lightningrl.config import Config
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.packing import minibatches, pack
from lightningrl.data.tasks import derived_seed, load_tasks
from lightningrl.data.transitions import trajectories_of
from lightningrl.engine import Engine
from lightningrl.errors import AgentError, EngineError, GraderError, UserError
from lightningrl.store import Store
from lightningrl.trainer import Trainer
from lightningrl.trainer.metrics import merged
from lightningrl.types import FINAL, Call, Doubles, Ints, Rollout, Sampling, Task, Weights

Mode: TypeAlias = Literal["sampled", "greedy"]
MODES: tuple[Mode, ...] = ("sampled", "greedy")
TEMPERATURE: dict[Mode, float] = {"sampled": 1.0, "greedy": 0.0}
CHECKPOINTS_KEPT = 2
TRAINER = "trainer"
"""The folder in a checkpoint that holds what only a trainer needs."""
PROGRESS_EVERY_S = 0.5
PROBES = tuple(tuple((salt * 11 + i * i * 3 + i) % 31 + 1 for i in range(8)) for salt in range(8))
"""Prompts of ids that any vocabulary has. Several, so that an engine of several servers is looked at from several sides. What is drawn is sampled
and not greedy: greedy tokens are those that the policy is surest of, where old and new weights agree."""
PROBE_TOKENS = 8
PROBE_TIMEOUT_S = 300.0
"""A server may have to compile first."""
SERVED_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |Δ logprob| in nats up to which engine and trainer are taken to have the same weights. Measured with the SQL recipe's model: 1e-6 in float32
and 0.02 in bfloat16 with the same weights; one update further 0.3 at a learning rate of 5e-4, and 7e-4 at 1e-6, which adds up until it shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """How the policy did on the first held-out tasks."""

    version: int
    mode: Mode
    rollouts: tuple[Rollout, ...]
    """One a task, in the order of the tasks."""
    rewards: Doubles
    """[tasks] a rollout that failed has NaN."""

    @property
    def failed(self) -> int:
        """Rollouts without a reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def mean(self) -> float:
        """Over the rollouts that did not fail."""
        return float(np.nanmean(self.rewards))


class Watcher(Protocol):
    """Somebody who wants to know how it goes. Nothing it does changes the run."""

    def collecting(self, what: str, done: int, total: int) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...

    def examined(self, exam: Exam) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The run in a few figures: held-out exams before and after."""

    before: dict[Mode, Exam]
    after: dict[Mode, Exam]
    rollouts: int


class Loop:
    """One policy, learning from one recipe."""

    def __init__(self, config: Config, *, store: Store, engine: Engine, trainer: Trainer, folder: Path, watcher: Watcher) -> None:
        self.config = config
        self.store = store
        self.engine = engine
        self.trainer = trainer
        self.folder = folder
        self.watcher = watcher
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def run(self) -> Summary:
        """Learn for `loop.steps` steps, from wherever the store says we are."""
        config, steps = self.config.loop, self.config.loop.steps
        version = await self.restore()
        before: dict[Mode, Exam] = {mode: await self.examine(0, mode, self.config.tasks.heldout, recall=version > 0) for mode in MODES}
        for step in range(version, steps):
            if step and config.eval_every and step % config.eval_every == 0:
                await self.examine(step, "sampled", min(config.eval_tasks, self.config.tasks.heldout))
            started = time.monotonic()
            batch = await self.collect(step)
            collected = time.monotonic()
            metrics = await self.learn(step, batch)
            await self.publish(step + 1)
            metrics |= {"time/collect_s": collected - started, "time/learn_s": time.monotonic() - collected}
            self.watcher.stepped(step, metrics)
        after: dict[Mode, Exam] = {mode: await self.examine(steps, mode, self.config.tasks.heldout) for mode in MODES}
        return Summary(before=before, after=after, rollouts=len(await self.store.rollouts()))

    async def restore(self) -> int:
        """Go back to the last published weights; the first time, publish those that the model came with."""
        latest = await self.store.weights(self.config.policy)
        if latest is None:
            await self.publish(0)
            return 0
        self.trainer.load(self.folder / latest.uri / TRAINER)
        await self._serve(latest)
        return latest.version

    async def collect(self, step: int) -> list[Rollout]:
        """Run every task of this step `group_size` times, and wait for all of them."""
        config = self.config
        seed = derived_seed(config.seed, "train", step)
        tasks = load_tasks(config.tasks, "train", seed=seed, count=config.loop.tasks_per_step, root=config.root)
        return await self._finish(
            [
                self._rollout(f"train-{step:05d}-{index:03d}-{member:02d}", task, group_id=f"train-{step:05d}-{index:03d}", temperature=1.0)
                for index, task in enumerate(tasks)
                for member in range(config.loop.group_size)
            ],
            what=f"step {step + 1}",
        )

    async def learn(self, step: int, batch: Sequence[Rollout]) -> dict[str, float]:
        """Turn the records of a batch into new weights."""
        lessons, metrics = await self.credit(batch)
        decay = 1.0 - step / self.config.loop.steps if self.config.trainer.schedule == "linear" else 1.0
        rate = self.config.trainer.learning_rate * decay
        seed = derived_seed(self.config.seed, "minibatches", step)
        await self.engine.pause()
        metrics |= await asyncio.get_running_loop().run_in_executor(self._compute, self._update, lessons, seed, rate)
        return metrics | {"optim/learning_rate": rate}

    async def credit(self, batch: Sequence[Rollout]) -> tuple[list[Lesson], dict[str, float]]:
        """records → trajectories → what each sampled token is to teach."""
        accepted = [rollout.accepted_attempt_id for rollout in batch if rollout.accepted_attempt_id]
        calls, rewards = await self.store.calls(accepted), await self.store.rewards(accepted)
        trajectories, census = trajectories_of(batch, calls, rewards, policy=self.config.policy, trains=self._trains)
        if trajectories and not calls:
            raise AgentError("the agent never called the model", hint="it must take its base URL from OPENAI_BASE_URL, as OpenAI's SDKs do")
        if calls and not census.trained_calls:
            reasons = ", ".join(f"`{reason}` {count} times" for reason, count in census.left_out_calls.items())
            raise UserError(f"no call may be trained: {reasons}", hint="check `routes`: is there a role that learns?")
        lessons, statistics = lessons_of(trajectories, self.config.algorithm, root=self.config.root)
        return lessons, _census(batch, calls) | census.metrics() | statistics

    async def publish(self, version: int) -> None:
        """Save, then say so, then serve: a crash in between repeats work and loses none. The folder is a model that anything loads."""
        weights = Weights(policy=self.config.policy, version=version, uri=f"checkpoints/step-{version:05d}")
        checkpoint = self.folder / weights.uri
        self.trainer.publish(checkpoint)
        self.trainer.save(checkpoint / TRAINER)
        await self.store.publish(weights)
        for stale in sorted(checkpoint.parent.glob("step-*"))[:-CHECKPOINTS_KEPT]:
            shutil.rmtree(stale)
        await self._serve(weights)

    async def examine(self, version: int, mode: Mode, count: int, *, recall: bool = False) -> Exam:
        """Try the policy on held-out tasks, the same ones every time. `recall`: read an exam of earlier weights, and run nothing."""
        config = self.config
        tasks = load_tasks(config.tasks, "heldout", seed=config.tasks.seed, count=count, root=config.root)
        rollouts = [
            self._rollout(f"exam-{version:05d}-{mode}-{index:04d}", task, seed_of=f"exam-{mode}-{index}", temperature=TEMPERATURE[mode])
            for index, task in enumerate(tasks)
        ]
        if recall:
            rollouts = await self.store.rollouts(ids=[rollout.id for rollout in rollouts])
        else:
            rollouts = await self._finish(rollouts, what=f"{mode} exam of version {version}")
        accepted = [rollout.accepted_attempt_id for rollout in rollouts if rollout.accepted_attempt_id]
        rewards = {reward.attempt_id: reward.value for reward in await self.store.rewards(accepted) if reward.name == FINAL}
        exam = Exam(
            version=version,
            mode=mode,
            rollouts=tuple(rollouts),
            rewards=np.array([rewards.get(rollout.accepted_attempt_id or "", np.nan) for rollout in rollouts]),
        )
        self.watcher.examined(exam)
        return exam

    def _rollout(self, rollout_id: str, task: Task, *, temperature: float, group_id: str | None = None, seed_of: str | None = None) -> Rollout:
        """Its sampling seed follows from its name, so a repeated attempt draws the same tokens."""
        return Rollout(
            id=rollout_id,
            group_id=group_id or rollout_id,
            task=task,
            max_attempts=self.config.agent.max_attempts,
            timeout_s=self.config.agent.timeout_s,
            sampling={"temperature": temperature, "top_p": 1.0, "top_k": 0, "seed": derived_seed(self.config.seed, seed_of or rollout_id)},
        )

    async def _finish(self, rollouts: Sequence[Rollout], *, what: str) -> list[Rollout]:
        """Enqueue, wait, report progress. Rollouts that failed are part of the answer, unless all did."""
        ids = [rollout.id for rollout in rollouts]
        await self.store.enqueue(rollouts)
        ended: list[Rollout] = []
        while len(ended) < len(ids):
            ended = await self.store.wait(ids, timeout_s=PROGRESS_EVERY_S)
            self.watcher.collecting(what, len(ended), len(ids))
        if all(rollout.status == "failed" for rollout in ended):
            await self._give_up(ended, what=what)
        return await self.store.rollouts(ids=ids)

    async def _give_up(self, failed: Sequence[Rollout], *, what: str) -> None:
        """Say whose failure it was: the most frequent first line, with its traceback."""
        errors = [attempt.error or "no error was given" for attempt in await self.store.attempts([rollout.id for rollout in failed])]
        line, count = Counter(error.splitlines()[0] for error in errors).most_common(1)[0]
        example = next(error for error in errors if error.startswith(line))
        kind = GraderError if line.startswith("GraderError") else AgentError
        hint = f"the agents' own output is in {self.folder / 'agents.log'}"
        if (self.folder / "config.toml").exists():
            hint = f"nothing was lost: mend it, then `lightningrl train {self.folder}/config.toml --run-dir {self.folder} --resume`; {hint}"
        raise kind(f"all {len(failed)} rollouts of {what} failed; {count} times: {example}", hint=hint)

    def _trains(self, agent: str) -> bool:
        """Whether a role learns: what the route says that gives it its name, else the first whose pattern fits, else the first at all."""
        named = [route for route in self.config.routes if route.agent == agent]
        unnamed = [route for route in self.config.routes if not route.agent]
        fitting = [route for route in unnamed if fnmatchcase(agent, route.model)]
        return any(route.train for route in (named or fitting or unnamed)[:1])

    async def _serve(self, weights: Weights) -> None:
        await self.engine.pause()
        await self.engine.load(replace(weights, uri=str(self.folder / weights.uri)))
        await self.engine.resume()
        await self._check_served(weights)

    async def _check_served(self, weights: Weights) -> None:
        """Does the engine speak for the weights that were published? It draws a few tokens, and the trainer says how likely these are."""
        sampling = Sampling(max_tokens=PROBE_TOKENS, seed=0)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            drawn = await asyncio.gather(*(self._draw(prompt, sampling) for prompt in PROBES))
        look, run = self.trainer.logprobs, asyncio.get_running_loop().run_in_executor
        expected = [await run(self._compute, look, np.array(prompt, np.int32), ids) for prompt, (ids, _) in zip(PROBES, drawn, strict=True)]
        gap = float(np.mean(np.abs(np.concatenate(expected) - np.concatenate([logprobs for _, logprobs in drawn]))))
        if not gap <= SERVED_GAP[self.config.model.dtype]:  # nor NaN
            raise EngineError(
                f"the engine serves other weights than were published: logprobs of version {weights.version} differ by `{gap:.2g}` on average",
                hint="see docs/engines.md: did every server load the folder, in the trainer's dtype?",
            )

    async def _draw(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Ints, Doubles]:
        """A completion and its logprobs."""
        deltas = [delta async for delta in self.engine.generate(prompt, sampling=sampling, policy=self.config.policy)]
        token_ids = np.array([token_id for delta in deltas for token_id in delta.token_ids], np.int32)
        return token_ids, np.array([logprob for delta in deltas for logprob in delta.logprobs])

    def _update(self, lessons: Sequence[Lesson], seed: int, rate: float) -> dict[str, float]:
        """Optimizer steps over the minibatches of one batch."""
        found: list[dict[str, float]] = []
        for minibatch in minibatches(lessons, self.config.trainer.minibatches, seed=seed):
            packs = pack(minibatch, max_tokens=self.config.trainer.max_tokens)
            parts = merged([self.trainer.forward_backward(build_forest(lessons)).metrics for lessons in packs])
            found.append(parts | self.trainer.optim_step(learning_rate=rate))
        # Only the first minibatch is evaluated by the very weights that sampled it.
        gap = {"policy/logprob_gap": found[0]["policy/logprob_gap_max"]} if found else {}
        return _over_minibatches(found) | gap


def _census(batch: Sequence[Rollout], calls: Sequence[Call]) -> dict[str, float]:
    """What the batch was made of, taught from or not."""
    accepted = sum(rollout.accepted_attempt_id is not None for rollout in batch)
    captures = Counter(call.capture for call in calls)
    return {
        "calls/per_rollout": len(calls) / max(accepted, 1),
        "calls/truncated": float(sum(call.finish_reason == "length" for call in calls)),
        "tokens/sampled": float(sum(len(call.completion_ids) for call in calls)),
        "tokens/per_call": float(np.mean([len(call.completion_ids) for call in calls])) if calls else 0.0,
        **{f"calls/{capture}": float(captures[capture]) for capture in ("bridged", "rendered", "forked", "incomplete")},
    }


def _over_minibatches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """What the metrics of several optimizer steps say about all of them: counts add up, counters go on, the rest is a mean."""

    def merge(name: str, values: list[float]) -> float:
        if name.endswith("_max"):
            return max(values)
        if name.startswith("tokens/"):
            return sum(values)
        return values[-1] if name == "optim/steps" else float(np.mean(values))

    return {name: merge(name, [row[name] for row in rows]) for name in (rows[0] if rows else {})}
