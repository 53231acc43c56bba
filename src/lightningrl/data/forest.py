"""Forest: a batch packed so that each unique prefix is computed once. Lessons in, forests out.

Legend: N unique tokens · S segments · M sampled tokens (each one a term of the loss, never merged) · K calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.data.trie import build_trie
from lightningrl.types import Doubles, Floats, Ints, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One call, with the advantage and the loss weight of each of its sampled tokens."""

    rollout_id: str
    """Lessons of one rollout stay in one forest: a loss may use all tokens of the rollout."""
    group_id: str
    """Lessons of one group stay in one minibatch."""
    transition: Transition
    advantages: Floats
    """[C] one per sampled token."""
    weights: Doubles
    """[C] weight of each sampled token in the loss of the whole batch; 0: not trained."""
    returns: float | None = None
    """Target of the critic at the last token of the prompt; None without a critic."""
    proximal: Doubles | None = None
    """[C] log-probabilities before the first update on the batch; None: use the recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Token trees, flattened. Segment `s` has the tokens `starts[s]:starts[s + 1]`; parents come before children.

    Two calls of one attempt, and a call of a second attempt with another answer to the same prompt `[1 2 3]`:

        c1  [1 2 3] → [7 9]          token_ids  1 2 3 | 7 9 4 6 | 8
        c2  [1 2 3 7 9 4] → [6 9]    segment    0       1         2
        c3  [1 2 3] → [8 9]          parents   -1       0         0

    The last token of a completion predicts nothing, so it is in the forest only if another call continues after it. A
    loss term takes the hidden state at `sources[m]` and predicts the token `targets[m]`: for c1, (2 → 7) and (3 → 9),
    where the numbers on the left are positions in `token_ids`.
    """

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N] distance from the root."""
    starts: Ints
    """[S + 1]"""
    parents: Ints
    """[S] -1 for a root."""
    sources: Ints
    """[M] index into `token_ids`."""
    targets: Ints
    """[M] token ids."""
    logprobs: Doubles
    """[M] log-probabilities (nats) under the policy that sampled the tokens."""
    proximal: Doubles
    """[M] log-probabilities before the first update on the batch; the same as `logprobs` if they were not computed."""
    advantages: Doubles
    """[M]"""
    weights: Doubles
    """[M] computed once over the whole batch, so that packing cannot change the loss."""
    temperatures: Doubles
    """[M] softmax temperature of `logprobs`."""
    calls: Ints
    """[M] index into `call_ids`."""
    rollouts: Ints
    """[M] number of the rollout, from 0."""
    call_ids: tuple[str, ...]
    """[K]"""
    states: Ints
    """[K] index into `token_ids` of the last token of the call's prompt: the critic's input."""
    returns: Doubles | None
    """[K] targets of the critic; None without a critic."""


def build_forest(lessons: Sequence[Lesson], *, whole: bool = False) -> Forest:
    """Merge calls that share prefixes. Terms keep the order of the lessons; the order of tokens depends only on the
    tokens. `whole`: keep calls and tokens without a weight too, e.g. for evaluation.
    """
    kept = [lesson for lesson in lessons if whole or lesson.weights.any()]
    counts = [len(lesson.weights) for lesson in kept]
    trie = build_trie([read_ids(lesson.transition) for lesson in kept], tails=[max(n, 1) for n in counts])
    taught = np.concatenate([(lesson.weights != 0) | whole for lesson in kept] or [np.zeros(0, bool)])
    number = {rollout_id: i for i, rollout_id in enumerate(dict.fromkeys(lesson.rollout_id for lesson in kept))}
    returns = [lesson.returns for lesson in kept if lesson.returns is not None]
    assert len(returns) in (0, len(kept)), "either all calls have returns or none"

    def terms(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return (np.concatenate(arrays)[taught] if arrays else np.zeros(0)).astype(dtype)

    def spread(values: Sequence[float], dtype: type) -> np.ndarray:
        return np.repeat(np.array(values, dtype), counts)[taught]

    return Forest(
        token_ids=trie.token_ids,
        positions=trie.positions,
        starts=trie.starts,
        parents=trie.parents,
        sources=terms([tail[:n] for tail, n in zip(trie.tails, counts, strict=True)], np.int32),
        targets=terms([lesson.transition.completion_ids for lesson in kept], np.int32),
        logprobs=terms([lesson.transition.logprobs for lesson in kept], np.float64),
        proximal=terms([_proximal(lesson) for lesson in kept], np.float64),
        advantages=terms([lesson.advantages for lesson in kept], np.float64),
        weights=terms([lesson.weights for lesson in kept], np.float64),
        temperatures=spread([lesson.transition.temperature for lesson in kept], np.float64),
        calls=spread(range(len(kept)), np.int32),
        rollouts=spread([number[lesson.rollout_id] for lesson in kept], np.int32),
        call_ids=tuple(lesson.transition.call_id for lesson in kept),
        states=np.array([tail[0] for tail in trie.tails], np.int32),
        returns=np.array(returns) if returns else None,
    )


def unweighted(transition: Transition, *, rollout_id: str = "", group_id: str = "") -> Lesson:
    """A lesson without weights, for a forest that is only evaluated."""
    nothing = np.zeros(len(transition.completion_ids))
    return Lesson(
        rollout_id=rollout_id,
        group_id=group_id,
        transition=transition,
        advantages=nothing.astype(np.float32),
        weights=nothing,
    )


def question(prompt_ids: Ints, completion_ids: Ints, *, call_id: str = "", rollout_id: str = "") -> Lesson:
    """A lesson without weights that asks how likely a completion [C] is after a prompt [P]."""
    call = Transition(
        call_id=call_id,
        parent_call_id=None,
        agent="",
        policy_version=0,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=np.zeros(len(completion_ids), np.float32),
        reward=None,
    )
    return unweighted(call, rollout_id=rollout_id)


def one_call(prompt_ids: Ints, completion_ids: Ints) -> Forest:
    """A forest of one call without weight, for `Trainer.evaluate`."""
    return build_forest([question(prompt_ids, completion_ids)], whole=True)


def is_finite(forest: Forest) -> bool:
    """Whether all values are finite, including those that the loss does not read."""
    arrays = [forest.logprobs, forest.proximal, forest.advantages, forest.weights]
    if forest.returns is not None:
        arrays.append(forest.returns)
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _proximal(lesson: Lesson) -> Floats | Doubles:
    return lesson.transition.logprobs if lesson.proximal is None else lesson.proximal


def read_ids(transition: Transition) -> Ints:
    """[P + C - 1] the tokens of a call whose hidden states predict its sampled tokens."""
    return np.concatenate((transition.prompt_ids, transition.completion_ids[:-1]))
