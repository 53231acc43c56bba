"""One policy that learns: its weights, the engine that serves them and the trainer that changes them.

    records  → lessons   each sampled token with its advantage and its weight in the loss
    lessons  → update    forests → forward, backward → optimizer step
    weights  → save, serve

A run has one learner or several. They share the rollouts; each learns from the calls of its own policy.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.selection import learnable
from lightningrl.config import LearnerConfig, RouteConfig
from lightningrl.data.forest import Forest, Lesson, build_forest, is_finite, question, unweighted
from lightningrl.data.measuring import by_call, measured_groups, split_by_call
from lightningrl.data.packing import minibatches, pack, teaching_under
from lightningrl.data.taught import Taught
from lightningrl.engine import Engine
from lightningrl.engine.proof import Proof
from lightningrl.trainer import Trainer
from lightningrl.trainer.base import TRAINER, Evaluation, TrainerLost
from lightningrl.trainer.metrics import merged, over_minibatches
from lightningrl.types import Call, Doubles, Floats, Ints, Reward, Rollout, Trajectory, Weights

Result = TypeVar("Result")

log = logging.getLogger(__name__)

UPDATES = 3
"""How often an update is tried, if the trainer loses its weights."""


class Learner:
    """Turns records into new weights of one policy, and serves them."""

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
        shares_weights: bool = False,
        servers: Sequence[str] = (),
    ) -> None:
        """`compute`: the one thread that runs all training. `folder`: the run's. `checkpoints`: the folder of a version
        in it, e.g. `checkpoints/step-{:05d}`. `root`: where the recipe's own functions are imported from.
        `shares_weights`: the engine reads the trainer's own tensors. `servers`: the URLs of the engine's servers.
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
        self._latest: Weights | None = None
        """The version that the trainer has saved or loaded last."""
        self._proof = Proof(
            engine,
            policy=name,
            dtype=config.model.dtype,
            evaluate=self._logprobs,
            shares_weights=shares_weights,
            servers=servers,
        )

    # records → lessons

    async def lessons(
        self,
        batch: Sequence[Rollout],
        calls: Sequence[Call],
        rewards: Sequence[Reward],
        *,
        air: Sequence[Reward],
        oldest_version: int,
    ) -> tuple[list[Lesson], dict[str, float], dict[str, int]]:
        """The lessons of a batch, metrics, and how many calls were left out for which reason. `air`: automatic
        intermediate rewards. `oldest_version`: calls that older weights answered are not trained.
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
            trajectories = await self._run(self._with_values, trajectories)
        lessons, statistics = lessons_of(trajectories, algorithm, root=self._root)
        return lessons, report.metrics() | statistics, dict(report.left_out_calls)

    def _with_values(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with the critic's value at the end of each trained call's prompt."""
        unvalued = [
            unweighted(call, rollout_id=trajectory.rollout_id)
            for trajectory in trajectories
            for call in trajectory.transitions
            if call.left_out is None
        ]
        values: dict[str, float] = {}
        for forest, evaluation in self._evaluate(unvalued):
            assert evaluation.values is not None, "the trainer has no critic"
            values.update(zip(forest.call_ids, evaluation.values.tolist(), strict=True))
        return [
            replace(t, transitions=tuple(replace(call, value=values.get(call.call_id)) for call in t.transitions))
            for t in trajectories
        ]

    # lessons → update

    async def prepare(self, lessons: Sequence[Lesson]) -> None:
        """Before an update: ask the engine, while it serves the old weights, what `serve` compares with later."""
        await self._proof.before_update(lessons)

    async def update(
        self, lessons: Sequence[Lesson], *, seed: int, remaining: float
    ) -> tuple[dict[str, float], Taught]:
        """One optimizer step for each minibatch. Returns metrics, and what the update did to some of the tokens. `seed`
        shuffles groups into minibatches. A linear schedule multiplies the learning rate by `remaining`, the share of
        the run that is left. The engine must be paused: it may share the weights in memory.
        """
        rate = self.config.trainer.learning_rate
        if self.config.trainer.schedule == "linear":
            rate *= remaining
        await self._proof.trainer_before()
        metrics, taught = await self._updated(lessons, seed, rate)
        await self._proof.trainer_after()
        return metrics | {"optim/learning_rate": rate}, taught

    async def _updated(self, lessons: Sequence[Lesson], seed: int, rate: float) -> tuple[dict[str, float], Taught]:
        """The update; made again from the version before it if the trainer has lost its weights."""
        lost = 0
        while True:
            try:
                if lost and self._latest is not None:
                    await self.load(self._latest)
                metrics, taught = await self._run(self._update, lessons, seed, rate)
            except TrainerLost as error:
                lost += 1
                if self._latest is None or lost == UPDATES:
                    raise
                log.warning("an update of `%s` is made again: %s", self.name, error.message)
            else:
                return metrics | ({"optim/repeated": float(lost)} if lost else {}), taught

    def _update(self, lessons: Sequence[Lesson], seed: int, rate: float) -> tuple[dict[str, float], Taught]:
        config = self.config.trainer
        values = {le.transition.call_id: le.transition.value for le in lessons}
        taught = Taught(values={call_id: value for call_id, value in values.items() if value is not None})
        teaching = teaching_under(self.config.loss, critic=needs_critic(self.config))
        if self.config.loss.proximal:
            lessons = self._with_proximal(lessons)
        rows: list[dict[str, float]] = []
        first: list[tuple[Forest, Evaluation]] = []
        for minibatch in minibatches(lessons, config.minibatches, seed=seed, teaching=teaching):
            packs = pack(minibatch, max_tokens=self.trainer.max_tokens, teaching=teaching)
            # The forests that are not finite come first: a service cannot take back what others have added.
            forests = sorted(map(build_forest, packs), key=is_finite)
            parts = [(forest, self.trainer.forward_backward(forest)) for forest in forests]
            rows.append(merged([found.metrics for _, found in parts]) | self.trainer.optim_step(learning_rate=rate))
            first = first or parts
        if not rows:
            return {}, taught
        # Only before the first optimizer step do the trainer's weights equal those that sampled the batch.
        metrics = over_minibatches(rows) | {"policy/logprob_gap": rows[0]["policy/logprob_gap_max"]}
        if not config.measured:
            return metrics, taught
        began = time.perf_counter()
        taught = self._measured(taught, lessons, first)
        return metrics | {"time/measure_s": time.perf_counter() - began}, taught

    def _measured(
        self, taught: Taught, lessons: Sequence[Lesson], first: Sequence[tuple[Forest, Evaluation]]
    ) -> Taught:
        """`taught` with the entropies of some calls before the update, and their log-probabilities after it. `first`:
        what the first minibatch has computed. It has the entropies, so they cost no pass of their own.
        """
        computed = {call_id for forest, _ in first for call_id in forest.call_ids}
        tokens = self.config.trainer.measured * sum(np.count_nonzero(lesson.weights) for lesson in lessons)
        chosen = measured_groups([le for le in lessons if le.transition.call_id in computed], tokens=tokens)
        entropies, after = dict[str, Floats](), dict[str, Floats]()
        for forest, found in first:
            if found.entropies is not None:
                entropies |= by_call(forest, found.entropies)
        for forest, found in self._evaluate(chosen):
            after |= by_call(forest, found.logprobs)
        ids = [lesson.transition.call_id for lesson in chosen]
        return replace(
            taught,
            entropies={call_id: entropies[call_id] for call_id in ids if call_id in entropies},
            logprobs_after=after,
        )

    def _with_proximal(self, lessons: Sequence[Lesson]) -> list[Lesson]:
        """The lessons with the log-probabilities of their tokens under the current weights, before any update."""
        logprobs = self._logprobs_of([lesson for lesson in lessons if lesson.weights.any()])
        return [replace(lesson, proximal=logprobs.get(lesson.transition.call_id)) for lesson in lessons]

    def _evaluate(self, lessons: Sequence[Lesson]) -> Iterator[tuple[Forest, Evaluation]]:
        """Evaluate the lessons without a gradient, in as many forests as the trainer's memory requires."""
        for piece in pack(lessons, max_tokens=self.trainer.max_tokens, teaching=list):
            forest = build_forest(piece, whole=True)
            yield forest, self.trainer.evaluate(forest)

    async def _run(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compute, compute, *arguments)

    # weights → save, serve

    def weights(self, version: int) -> Weights:
        """The record that describes a version. Writes nothing."""
        return Weights(policy=self.name, version=version, uri=self._checkpoints.format(version), kind=self._kind)

    async def save(self, weights: Weights) -> None:
        """Write the folder that the engine loads, and in it what the trainer needs to resume."""
        await self._run(self.trainer.publish, self._folder / weights.uri)
        await self._run(self.trainer.save, self._folder / weights.uri / TRAINER)
        self._latest = weights

    async def load(self, weights: Weights) -> None:
        """Resume from a version. Pause the engine first: it may share the weights in memory."""
        await self._run(self.trainer.load, self._folder / weights.uri / TRAINER)
        self._latest = weights

    async def export(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder."""
        await self._run(self.trainer.export, folder)

    async def serve(self, weights: Weights) -> dict[str, float]:
        """Load the weights into the engine. Returns metrics. Raises `EngineError`, with the fault's name, if the engine
        does not serve them: see `engine.proof`.
        """
        await self.engine.pause()
        await self.engine.load(replace(weights, uri=str(self._folder / weights.uri)))
        await self.engine.resume()
        return await self._proof.check(weights.version)

    async def _logprobs(self, asked: Sequence[tuple[Ints, Ints]]) -> list[Doubles]:
        """The log-probabilities of completions [C] after their prompts [P], at temperature 1, [C] each."""
        lessons = [
            question(prompt_ids, completion_ids, call_id=str(k), rollout_id=prompt_ids.tobytes().hex())
            for k, (prompt_ids, completion_ids) in enumerate(asked)
        ]
        found = await self._run(self._logprobs_of, lessons)
        return [found[lesson.transition.call_id] for lesson in lessons]

    def _logprobs_of(self, lessons: Sequence[Lesson]) -> dict[str, Doubles]:
        """Call id → [C] log-probabilities under the current weights."""
        found: dict[str, Doubles] = {}
        for forest, evaluation in self._evaluate(lessons):
            found.update(zip(forest.call_ids, split_by_call(forest, evaluation.logprobs), strict=True))
        return found


def needs_critic(config: LearnerConfig) -> bool:
    """Whether the credit of this policy needs a value for each call."""
    return config.algorithm.credit == "gae_calls"
