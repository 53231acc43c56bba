"""One policy that learns: its weights, the engine that serves them, the trainer that changes them. Records in, new
weights out.

A run has one learner or several; they share the rollouts and nothing else, and each learns from its own calls alone.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.selection import learnable
from lightningrl.config import LearnerConfig, RouteConfig
from lightningrl.data.forest import Forest, Lesson, build_forest, unweighted
from lightningrl.data.packing import minibatches, pack, teaching_under
from lightningrl.engine import Engine
from lightningrl.errors import EngineError
from lightningrl.trainer import Trainer
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.metrics import merged
from lightningrl.types import Call, Doubles, Ints, Reward, Rollout, Sampling, Trajectory, Weights

Result = TypeVar("Result")

TRAINER = "trainer"
"""The folder in a checkpoint that holds what only a trainer needs."""
PROBES = tuple(tuple((salt * 11 + i * i * 3 + i) % 31 + 1 for i in range(8)) for salt in range(8))
"""Prompts of ids that any vocabulary has. Several, so that an engine of several servers is looked at from several
sides. What is drawn is sampled and not greedy: greedy tokens are those that the policy is surest of, where old and new
weights agree.
"""
PROBE_TOKENS = 8
PROBE_TIMEOUT_S = 300.0
"""A server may have to compile first."""
SERVED_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean |Δ logprob| in nats up to which engine and trainer are taken to have the same weights. Measured with the SQL
recipe's model: 1e-6 in float32 and 0.02 in bfloat16 with the same weights; one update further 0.3 at a learning rate of
5e-4, and 7e-4 at 1e-6, which adds up until it shows.
"""


class Learner:
    """`compute` is the one thread that all training runs in; `root` is where a recipe's own functions are imported
    from.
    """

    def __init__(
        self,
        name: str,
        config: LearnerConfig,
        *,
        engine: Engine,
        trainer: Trainer,
        compute: Executor,
        folder: Path,
        checkpoints: str,
        kind: Literal["full", "lora"],
        routes: Sequence[RouteConfig],
        root: Path,
    ) -> None:
        """`checkpoints`: where a version goes in the run's `folder`, e.g. `checkpoints/step-{:05d}`; `kind`: what it is
        there.
        """
        self.name = name
        self.config = config
        self.engine = engine
        self.trainer = trainer
        self._compute = compute
        self._folder = folder
        self._checkpoints = checkpoints
        self._kind: Literal["full", "lora"] = kind
        self._routes = routes
        self._root = root

    # records → what to learn

    async def lessons(
        self,
        batch: Sequence[Rollout],
        calls: Sequence[Call],
        rewards: Sequence[Reward],
        *,
        air: Sequence[Reward],
        oldest_version: int,
    ) -> tuple[list[Lesson], dict[str, float], dict[str, int]]:
        """What each sampled token is to teach, what there is to say about it, and why calls were left out. `air`:
        rewards that follow from spans.
        """
        algorithm = self.config.algorithm
        trajectories, report = learnable(
            batch,
            calls,
            rewards,
            air=air,
            policy=self.name,
            algorithm=algorithm,
            routes=self._routes,
            root=self._root,
            oldest_version=oldest_version,
        )
        if needs_critic(self.config):
            trajectories = await self._computed(self._with_values, trajectories)
        made, statistics = lessons_of(trajectories, algorithm, root=self._root)
        return made, report.metrics() | statistics, dict(report.left_out_calls)

    def _with_values(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """What the critic expects of every call that is trained."""
        seen = [
            unweighted(call, rollout_id=t.rollout_id)
            for t in trajectories
            for call in t.transitions
            if call.left_out is None
        ]
        values: dict[str, float] = {}
        for forest, found in self._looks(seen):
            assert found.values is not None, "the trainer was made with a critic"
            values |= zip(forest.call_ids, found.values.tolist(), strict=True)
        return [
            replace(t, transitions=tuple(replace(call, value=values.get(call.call_id)) for call in t.transitions))
            for t in trajectories
        ]

    # what to learn → new weights

    async def update(self, lessons: Sequence[Lesson], *, seed: int, decay: float) -> dict[str, float]:
        """Optimizer steps over the minibatches of one batch. `decay` scales the learning rate, if its schedule follows
        the run.
        """
        rate = self.config.trainer.learning_rate * (decay if self.config.trainer.schedule == "linear" else 1.0)
        return await self._computed(self._update, lessons, seed, rate) | {"optim/learning_rate": rate}

    def _update(self, lessons: Sequence[Lesson], seed: int, rate: float) -> dict[str, float]:
        config = self.config.trainer
        teaching = teaching_under(self.config.loss, critic=needs_critic(self.config))
        if self.config.loss.proximal:
            lessons = self._with_proximal(lessons)
        found: list[dict[str, float]] = []
        for minibatch in minibatches(lessons, config.minibatches, seed=seed, teaching=teaching):
            packs = pack(minibatch, max_tokens=config.max_tokens, teaching=teaching)
            parts = merged([self.trainer.forward_backward(build_forest(lessons)).metrics for lessons in packs])
            found.append(parts | self.trainer.optim_step(learning_rate=rate))
        # Only the first minibatch is evaluated by the very weights that sampled it.
        gap = {"policy/logprob_gap": found[0]["policy/logprob_gap_max"]} if found else {}
        return _over_minibatches(found) | gap

    def _with_proximal(self, lessons: Sequence[Lesson]) -> list[Lesson]:
        """How likely is every trained token under the weights that this batch is first learnt by?"""
        logprobs: dict[str, Doubles] = {}
        for forest, found in self._looks([lesson for lesson in lessons if lesson.weights.any()]):
            logprobs |= {call_id: found.logprobs[forest.calls == k] for k, call_id in enumerate(forest.call_ids)}
        return [replace(lesson, proximal=logprobs.get(lesson.transition.call_id)) for lesson in lessons]

    def _looks(self, lessons: Sequence[Lesson]) -> Iterator[tuple[Forest, Evaluation]]:
        """All of these calls, evaluated in as many forests as it takes."""
        for piece in pack(lessons, max_tokens=self.config.trainer.max_tokens, teaching=list):
            forest = build_forest(piece, whole=True)
            yield forest, self.trainer.evaluate(forest)

    async def _computed(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compute, compute, *arguments)

    # weights are records too

    def weights(self, version: int) -> Weights:
        return Weights(policy=self.name, version=version, uri=self._checkpoints.format(version), kind=self._kind)

    async def save(self, weights: Weights) -> None:
        """Write a folder that anything loads, with what the trainer needs to go on."""
        await self.export(self._folder / weights.uri)
        await self._computed(self.trainer.save, self._folder / weights.uri / TRAINER)

    async def load(self, weights: Weights) -> None:
        """Go on from a version. The engine must be paused: it may share the weights."""
        await self._computed(self.trainer.load, self._folder / weights.uri / TRAINER)

    async def export(self, folder: Path) -> None:
        """Write the weights as they are now, as a model that anything loads."""
        await self._computed(self.trainer.publish, folder)

    async def serve(self, weights: Weights) -> None:
        """Have the engine answer with these weights, and make sure that it does."""
        await self.engine.pause()
        await self.engine.load(replace(weights, uri=str(self._folder / weights.uri)))
        await self.engine.resume()
        await self._check_served(weights)

    async def _check_served(self, weights: Weights) -> None:
        """The engine draws a few tokens, and the trainer says how likely these are."""
        sampling = Sampling(max_tokens=PROBE_TOKENS, seed=0)
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            drawn = await asyncio.gather(*(self._draw(prompt, sampling) for prompt in PROBES))
        look = self.trainer.logprobs
        expected = [
            await self._computed(look, np.array(prompt, np.int32), ids)
            for prompt, (ids, _) in zip(PROBES, drawn, strict=True)
        ]
        gap = float(np.mean(np.abs(np.concatenate(expected) - np.concatenate([logprobs for _, logprobs in drawn]))))
        if not gap <= SERVED_GAP[self.config.model.dtype]:  # nor NaN
            raise EngineError(
                f"the engine serves other weights than were published: logprobs of version {weights.version} of `{self.name}` "
                f"differ by `{gap:.2g}` on average",
                hint="see docs/engines.md: did every server load the folder, in the trainer's dtype?",
            )

    async def _draw(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Ints, Doubles]:
        """A completion and its logprobs."""
        deltas = [delta async for delta in self.engine.generate(prompt, sampling=sampling, policy=self.name)]
        token_ids = np.array([token_id for delta in deltas for token_id in delta.token_ids], np.int32)
        return token_ids, np.array([logprob for delta in deltas for logprob in delta.logprobs])


def needs_critic(config: LearnerConfig) -> bool:
    """Whether the credit asks what was to be expected of a call."""
    return config.algorithm.credit == "gae_calls"


def _over_minibatches(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """What the metrics of several optimizer steps say about all of them: counts add up, counters go on, the rest is a
    mean.
    """

    def merge(name: str, values: list[float]) -> float:
        if name.endswith("_max"):
            return max(values)
        if name.startswith("tokens/"):
            return sum(values)
        return values[-1] if name == "optim/steps" else float(np.mean(values))

    return {name: merge(name, [row[name] for row in rows]) for name in (rows[0] if rows else {})}
