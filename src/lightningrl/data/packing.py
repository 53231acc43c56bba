"""Which lessons are updated from together, and which fit in one forward and backward? Whole groups stay together where they can.

Weights were computed over the whole batch. Micro-batches only split its sum; minibatches are also scaled by their number, so that each
has the scale of a full-batch mean and their average is the full batch's loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lightningrl.data.forest import Lesson, read_ids
from lightningrl.data.trie import count_unique, sort_sequences


def minibatches(lessons: Sequence[Lesson], count: int, *, seed: int) -> list[list[Lesson]]:
    """Split a batch into at most `count` optimizer steps by whole groups; the order of groups follows from `seed` alone.

    Groups that teach are dealt evenly; there are never more steps than such groups, and none if nothing teaches.
    """
    groups = _by_group(lessons)
    shuffled = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    teaching = [group for group in shuffled if any(map(teaches, group))]
    silent = [group for group in shuffled if not any(map(teaches, group))]
    steps = min(count, len(teaching))
    dealt: list[list[Lesson]] = [[] for _ in range(steps)]
    for i, group in enumerate(teaching + silent if steps else []):
        dealt[i % steps] += [replace(lesson, weights=lesson.weights * steps) for lesson in group]
    return dealt


def pack(lessons: Sequence[Lesson], *, max_tokens: int) -> list[list[Lesson]]:
    """Lessons of one optimizer step → those of each forest, of at most `max_tokens` unique tokens. A longer call has a forest of its own.

    Calls whose advantages are all 0 have no gradient under any loss there is, and are left out: there is nothing to compute.
    """
    packs: list[list[Lesson]] = []
    room = 0
    for group in _by_group(lesson for lesson in lessons if teaches(lesson)):
        size = count_unique([read_ids(lesson.transition) for lesson in group])
        for piece, tokens in [(group, size)] if size <= max_tokens else _cut(group, max_tokens=max_tokens):
            if not packs or tokens > room:
                packs.append([])
                room = max_tokens
            packs[-1] += piece
            room -= tokens
    return packs


def teaches(lesson: Lesson) -> bool:
    """Whether any token of the call has a gradient."""
    return bool(np.any(lesson.weights * lesson.advantages))


def _by_group(lessons: Iterable[Lesson]) -> list[list[Lesson]]:
    groups: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(lesson.group_id, []).append(lesson)
    return list(groups.values())


def _cut(group: Sequence[Lesson], *, max_tokens: int) -> list[tuple[list[Lesson], int]]:
    """Cut one large group where neighbours in token order share least work; each piece comes with its number of unique tokens."""
    sequences = [read_ids(lesson.transition) for lesson in group]
    pieces: list[tuple[list[Lesson], int]] = []
    for i, shared in zip(*sort_sequences(sequences), strict=True):
        fresh = len(sequences[i]) - shared
        if pieces and pieces[-1][1] + fresh <= max_tokens:
            pieces[-1] = ([*pieces[-1][0], group[i]], pieces[-1][1] + fresh)
        else:
            pieces.append(([group[i]], len(sequences[i])))
    return pieces
