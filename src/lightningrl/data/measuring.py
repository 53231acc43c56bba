"""Which groups of a step are measured token by token, so that people can look at what an update did to them?"""

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.data.forest import Forest, Lesson
from lightningrl.types import Doubles, Floats


def measured_groups(lessons: Sequence[Lesson], *, tokens: float) -> list[Lesson]:
    """The lessons of whole groups that have at most `tokens` sampled tokens together, and of one group in any case.
    Groups whose advantages differ most come first; among equal ones, those that come first in the batch.

    Four groups of 10 tokens with advantages of ±1, ±2, ±1 and 0, and 20 tokens: the second and the first.
    """
    groups: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(lesson.group_id, []).append(lesson)
    measured: list[Lesson] = []
    for group in sorted(groups.values(), key=_difference, reverse=True):  # stable
        if measured and _tokens(measured) + _tokens(group) > tokens:
            break
        measured += group
    return measured


def by_call(forest: Forest, tokens: Doubles) -> Mapping[str, Floats]:
    """The values [M] of a forest's tokens → call id → those of its tokens [C]. Without calls with a value that is not
    finite.
    """
    parts = [part.astype(np.float32) for part in split_by_call(forest, tokens)]
    return {call_id: part for call_id, part in zip(forest.call_ids, parts, strict=True) if np.isfinite(part).all()}


def split_by_call(forest: Forest, tokens: Doubles) -> list[Doubles]:
    """The values [M] of a forest's tokens → those of each of its calls, [C] each."""
    return np.split(tokens, np.searchsorted(forest.calls, np.arange(1, len(forest.call_ids))))  # terms are in order


def _difference(group: Sequence[Lesson]) -> float:
    """Largest minus smallest advantage."""
    return max(float(lesson.advantages.max()) for lesson in group) - min(
        float(lesson.advantages.min()) for lesson in group
    )


def _tokens(lessons: Sequence[Lesson]) -> int:
    return sum(len(lesson.weights) for lesson in lessons)
