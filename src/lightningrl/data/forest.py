"""Forest: a batch packed so that each unique prefix is computed once. Lessons in, forests out.

Legend: N unique tokens · S segments · M sampled tokens (each one a term of the loss, never merged).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightningrl.data.trie import build_trie
from lightningrl.types import Doubles, Floats, Ints, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One call together with what it is to teach."""

    group_id: str
    """Lessons of one group are updated from together."""
    transition: Transition
    advantages: Floats
    """[C] one per sampled token."""
    weights: Doubles
    """[C] share of each sampled token in the loss of the whole batch; 0 leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Token trees, flattened. Segment `s` holds the tokens `starts[s]:starts[s + 1]`; parents come before children.

    Two calls of one attempt, and a sibling that drew another answer to the same prompt `[1 2 3]`:

        c1  [1 2 3] → [7 9]          token_ids  1 2 3 | 7 9 4 6 | 8
        c2  [1 2 3 7 9 4] → [6 9]    segment    0       1         2
        c3  [1 2 3] → [8 9]          parents   -1       0         0

    Nobody reads what follows the last token of a completion, so it is in the forest only where another call goes on from it.
    A loss term reads the hidden state at `sources[m]` and asks for the token `targets[m]`: for c1 they are (2 → 7), (3 → 9).
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
    """[M] under the policy that sampled them."""
    advantages: Doubles
    """[M]"""
    weights: Doubles
    """[M] computed once, up front, over the whole batch: packing cannot change the loss."""
    temperatures: Doubles
    """[M] the softmax temperature `logprobs` refer to."""
    calls: Ints
    """[M] index into `call_ids`."""
    call_ids: tuple[str, ...]


def build_forest(lessons: Sequence[Lesson]) -> Forest:
    """Merge calls by their tokens. Terms come in the order of the lessons; tokens come in an order that depends on the tokens alone."""
    kept = [lesson for lesson in lessons if lesson.weights.any()]
    trie = build_trie([read_ids(lesson.transition) for lesson in kept], tails=[len(lesson.weights) for lesson in kept])
    taught = np.concatenate([lesson.weights != 0 for lesson in kept] or [np.zeros(0, bool)])

    def terms(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return (np.concatenate(arrays)[taught] if arrays else np.zeros(0)).astype(dtype)

    counts = [len(lesson.weights) for lesson in kept]
    return Forest(
        token_ids=trie.token_ids,
        positions=trie.positions,
        starts=trie.starts,
        parents=trie.parents,
        sources=terms(trie.tails, np.int32),
        targets=terms([lesson.transition.completion_ids for lesson in kept], np.int32),
        logprobs=terms([lesson.transition.logprobs for lesson in kept], np.float64),
        advantages=terms([lesson.advantages for lesson in kept], np.float64),
        weights=terms([lesson.weights for lesson in kept], np.float64),
        temperatures=terms([np.full(n, lesson.transition.temperature) for n, lesson in zip(counts, kept, strict=True)], np.float64),
        calls=terms([np.full(n, i) for i, n in enumerate(counts)], np.int32),
        call_ids=tuple(lesson.transition.call_id for lesson in kept),
    )


def read_ids(transition: Transition) -> Ints:
    """[P + C - 1] the tokens whose hidden states the call's sampled tokens are predicted from."""
    return np.concatenate((transition.prompt_ids, transition.completion_ids[:-1]))
