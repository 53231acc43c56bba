"""Checks invariants 1 to 3 on one real batch of any recipe: an agent is trained on exactly what was served to it.

    batch = await collected(Path("recipe.toml"), folder, overrides=["loop.tasks_per_step=4"])
    check(batch)

    agent ⇄ its own SDK ⇄ gateway ⇄ tap ⇄ engine
                             ↓
                           store → forest → trainer

1. The store and the forest hold the token ids that the engine read and sampled.
2. Engine, trainer and Hugging Face's own code give every token the same log-probability.
3. Every sampled token is a target once, or counted with the reason why not.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from lightningrl.data.forest import Forest, build_forest
from lightningrl.data.packing import pack, with_weight
from lightningrl.engine.base import Delta, EngineSetup
from lightningrl.engine.embedded import embedded
from lightningrl.learner import Learner
from lightningrl.loop import Loop
from lightningrl.models.plain import plain_logprobs
from lightningrl.progress import Exam
from lightningrl.recipe import load_config
from lightningrl.serve import lightning
from lightningrl.types import Call, Doubles, Floats, Ints, Rollout, Sampling, Weights

GAP = 1e-4
"""Largest difference of log-probabilities in float32, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation, as the engine saw it."""

    policy: str
    version: int
    """Version of the weights; -1 if the generation ended before its first token."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One forest, with the trainer's log-probabilities."""

    policy: str
    forest: Forest
    logprobs: Doubles
    """[M] in the order of the forest, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The records of one batch, from the engine to the trainer."""

    heard: tuple[Generation, ...]
    """All generations while the batch was collected."""
    calls: tuple[Call, ...]
    """Calls in the store from the same time, of all attempts, failed ones included."""
    rollouts: tuple[Rollout, ...]
    """Rollouts to train on."""
    trained: tuple[Trained, ...]
    """All forests of tokens with a weight, whatever their advantage."""
    left_out: Mapping[str, Mapping[str, int]]
    """Policy → reason → number of sampled tokens that are not trained, as the run reports it."""
    plain: Mapping[str, Doubles]
    """Call id → [C] log-probabilities by Hugging Face's own code, for every call in a forest."""

    @property
    def accepted(self) -> tuple[Call, ...]:
        """The calls of the accepted attempts."""
        ids = {rollout.accepted_attempt_id for rollout in self.rollouts}
        return tuple(call for call in self.calls if call.attempt_id in ids)


# from the agent to the trainer

RECORDED: ContextVar[list[Generation]] = ContextVar("recorded")


class Tap:
    """The embedded engine with a record of all its requests and answers."""

    def __init__(self, setup: EngineSetup) -> None:
        self._engine = embedded(setup)
        self._recorded = RECORDED.get()

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        read, given = tuple(prompt_ids), list[Delta]()
        deltas = self._engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)
        try:
            async with contextlib.aclosing(cast("AsyncGenerator[Delta, None]", deltas)) as closing:
                async for delta in closing:
                    given.append(delta)
                    yield delta
        finally:
            generation = Generation(
                policy=policy,
                version=given[0].policy_version if given else -1,
                prompt_ids=read,
                token_ids=tuple(token_id for delta in given for token_id in delta.token_ids),
                logprobs=tuple(logprob for delta in given for logprob in delta.logprobs),
            )
            self._recorded.append(generation)

    async def load(self, weights: Weights) -> None:
        await self._engine.load(weights)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._engine.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()


class SilentWatcher:
    """A `Watcher` that ignores all events."""

    def doing(self, what: str, done: int = 0, total: int = 0) -> None: ...

    def voided(self, step: int, why: str) -> None: ...

    def stepped(self, step: int, metrics: dict[str, float]) -> None: ...

    def examined(self, exam: Exam) -> None: ...


async def collected(recipe: Path, folder: Path, *, overrides: Sequence[str] = (), steps: int = 0) -> Batch:
    """Run the agent of a recipe on one batch of tasks, after `steps` training steps. `folder` is the run's folder.

    The embedded engine is used, whatever the recipe sets.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorded = list[Generation]()
    RECORDED.set(recorded)
    config = load_config(recipe, [*overrides, f"engine.name={__name__}:{Tap.__name__}"])
    async with lightning(config, folder) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        for step in range(steps):
            lessons, _ = await loop.credit(step, await loop.collect(step))
            await loop.learn(step, lessons)
            await loop.publish(step + 1)
        before = {rollout.id for rollout in await server.store.rollouts()}
        recorded.clear()
        rollouts = await loop.collect(steps)
        await asyncio.gather(*(learner.engine.pause() for learner in server.learners))
        heard = tuple(recorded)
        ids = [rollout.id for rollout in await server.store.rollouts() if rollout.id not in before]
        calls = await server.store.calls([attempt.id for attempt in await server.store.attempts(ids)])
        trained, left_out = await _trained(loop, steps, rollouts)
        plain = [_plainly(learner, folder, steps, calls, trained) for learner in server.learners]
    return Batch(
        heard=heard,
        calls=tuple(calls),
        rollouts=tuple(rollouts),
        trained=tuple(trained),
        left_out=left_out,
        plain={call_id: logprobs for found in plain for call_id, logprobs in found.items()},
    )


async def _trained(
    loop: Loop, step: int, rollouts: Sequence[Rollout]
) -> tuple[list[Trained], dict[str, dict[str, int]]]:
    """(forests of a step, policy → reason → number of tokens left out)"""
    lessons, metrics = await loop.credit(step, rollouts)
    trained: list[Trained] = []
    left_out: dict[str, dict[str, int]] = {}
    for learner in loop.learners:
        for piece in pack(lessons[learner.name], max_tokens=learner.trainer.max_tokens, teaching=with_weight):
            forest = build_forest(piece)
            trained.append(
                Trained(policy=learner.name, forest=forest, logprobs=learner.trainer.forward_backward(forest).logprobs)
            )
        said = ("" if len(loop.learners) == 1 else f"{learner.name}/") + "tokens/left_out_"
        left_out[learner.name] = {
            name.removeprefix(said): int(n) for name, n in metrics.items() if name.startswith(said)
        }
    return trained, left_out


def _plainly(
    learner: Learner, folder: Path, version: int, calls: Sequence[Call], trained: Sequence[Trained]
) -> dict[str, Doubles]:
    """Call id → log-probabilities by the published model folder, for the calls that the policy trains on."""
    learnt = {call_id for made in trained if made.policy == learner.name for call_id in made.forest.call_ids}
    kept = [call for call in calls if call.id in learnt]
    asked = ((call.prompt_ids, call.completion_ids, call.sampling.temperature) for call in kept)
    return dict(
        zip([call.id for call in kept], plain_logprobs(folder / learner.weights(version).uri, asked), strict=True)
    )


# the checks


def the_store_holds_what_the_engine_read_and_sampled(batch: Batch) -> None:
    """Invariants 1 and 3: no generation is changed or lost, even if its attempt fails. Nothing was generated for a
    played-back call.
    """
    did = Counter(
        _exact(heard.policy, heard.version, heard.prompt_ids, heard.token_ids, heard.logprobs)
        for heard in batch.heard
        if heard.token_ids
    )
    keys = {call.id: _exact_of(call) for call in batch.calls}
    answered = [call for call in batch.calls if call.replays is None]
    stored = Counter(keys[call.id] for call in answered if len(call.completion_ids))
    odd = [call.id for call in answered if keys[call.id] in stored - did]
    assert not odd, f"calls {odd[:3]} differ from what the engine read and sampled"
    assert not did - stored, f"{(did - stored).total()} generations of the engine are not in the store as they were"


def a_played_back_call_is_what_was_recorded(batch: Batch) -> None:
    """Invariant 1: its ids and log-probabilities are those of a call of the trunk, bit for bit. An incomplete call has
    only the first of them: its agent hung up.
    """
    keys = {call.id: _exact_of(call) for call in batch.calls}
    for call in batch.calls:
        if call.replays is not None and call.capture != "incomplete":
            assert keys[call.id] == keys.get(call.replays), f"`{call.id}` is not what `{call.replays}` has recorded"


def a_history_is_what_was_read_and_sampled(batch: Batch) -> None:
    """Invariant 1: a prompt that continues a call begins with the ids of that call."""
    calls = {call.id: call for call in batch.calls}
    for call in batch.calls:
        if call.capture in ("bridged", "partly"):
            parent = calls[call.parent_call_id or ""]
            history = np.concatenate((parent.prompt_ids, parent.completion_ids))
            assert np.array_equal(call.prompt_ids[: len(history)], history), (
                f"the prompt of `{call.id}` does not begin with the ids of `{parent.id}`"
            )


def the_trainer_reads_what_the_engine_read(batch: Batch) -> None:
    """Invariant 1: a path of the forest has the ids of a call, and each token is predicted from its own prefix."""
    calls = {call.id: call for call in batch.calls}
    for call_id, made, terms in _terms(batch):
        call, forest = calls[call_id], made.forest
        path = _path(forest, int(forest.sources[terms[-1]]))
        read = np.concatenate((call.prompt_ids, call.completion_ids[:-1]))
        assert np.array_equal(forest.token_ids[path], read), (
            f"the trainer reads other ids than the engine for `{call_id}`"
        )
        assert np.array_equal(forest.positions[path], np.arange(len(read))), (
            f"tokens of `{call_id}` have other positions than in the engine"
        )
        assert np.array_equal(forest.sources[terms], path[-len(terms) :]), (
            f"tokens of `{call_id}` are predicted from another prefix"
        )


def every_sampled_token_is_learnt_from_once_or_counted(batch: Batch) -> None:
    """Invariant 3: every token of an accepted attempt is a target once, or counted. Those of a played-back call were
    sampled in its trunk.
    """
    accepted = {call.id: call for call in batch.accepted}
    targets: dict[str, list[int]] = {}
    by_policy: Counter[str] = Counter()
    for call_id, made, terms in _terms(batch):
        targets.setdefault(call_id, []).extend(made.forest.targets[terms].tolist())
        by_policy[made.policy] += len(terms)
    assert targets.keys() <= accepted.keys(), (
        f"{sorted(targets.keys() - accepted.keys())[:3]} belong to no accepted attempt"
    )
    for call_id, found in targets.items():
        assert found == accepted[call_id].completion_ids.tolist(), (
            f"the tokens of `{call_id}` are not each a target once"
        )
    sampled = sum(len(call.completion_ids) for call in accepted.values() if call.replays is None)
    for policy, reasons in batch.left_out.items():
        counted = by_policy[policy] + sum(reasons.values())
        assert counted == sampled, (
            f"`{sampled}` tokens were sampled, but `{policy}` accounts for `{counted}`: "
            f"{by_policy[policy]} trained, {reasons}"
        )


def all_give_every_token_the_same_logprob(batch: Batch) -> None:
    """Invariant 2, for engine, trainer and Hugging Face's own code; the engine's values are those in the store."""
    calls = {call.id: call for call in batch.calls}
    for call_id, made, terms in _terms(batch):
        engine, trainer, plain = calls[call_id].logprobs, made.logprobs[terms], batch.plain[call_id]
        for name, others in (("the trainer", trainer), ("Hugging Face's code", plain)):
            gap = float(np.abs(others - engine).max())
            assert gap < GAP, f"{name} and the engine differ by `{gap:.2g}` on a token of `{call_id}`"


CHECKS: tuple[Callable[[Batch], None], ...] = (
    the_store_holds_what_the_engine_read_and_sampled,
    a_played_back_call_is_what_was_recorded,
    a_history_is_what_was_read_and_sampled,
    the_trainer_reads_what_the_engine_read,
    every_sampled_token_is_learnt_from_once_or_counted,
    all_give_every_token_the_same_logprob,
)


def check(batch: Batch) -> None:
    """Run all checks. Raises `AssertionError` with the first that fails."""
    for holds in CHECKS:
        holds(batch)


def _exact_of(call: Call) -> tuple[object, ...]:
    return _exact(call.policy, call.policy_version, call.prompt_ids, call.completion_ids, call.logprobs)


def _exact(policy: str, version: int, *arrays: Sequence[float] | Ints | Floats) -> tuple[object, ...]:
    """A key that is equal only for bit-identical generations."""
    prompt, completion, logprobs = arrays
    return (
        policy,
        version,
        np.asarray(prompt, np.int32).tobytes(),
        np.asarray(completion, np.int32).tobytes(),
        np.asarray(logprobs, np.float32).tobytes(),
    )


def _terms(batch: Batch) -> Iterator[tuple[str, Trained, Ints]]:
    """(call id, forest, indices of its terms) for every call of every forest."""
    for made in batch.trained:
        for k, call_id in enumerate(made.forest.call_ids):
            yield call_id, made, np.flatnonzero(made.forest.calls == k).astype(np.int32)


def _path(forest: Forest, last: int) -> Ints:
    """Indices in the forest of the tokens from the root to `last`."""
    pieces: list[Ints] = []
    segment = int(np.searchsorted(forest.starts, last, side="right")) - 1
    while segment >= 0:
        pieces.insert(0, np.arange(forest.starts[segment], last + 1, dtype=np.int32))
        segment = int(forest.parents[segment])
        last = int(forest.starts[segment + 1]) - 1
    return np.concatenate(pieces)
