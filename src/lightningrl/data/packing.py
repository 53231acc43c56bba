"""Which lessons share an optimizer step, and which one pass? Groups stay in one step, rollouts in one pass.

The weights of tokens are computed over the whole batch. Micro-batches split the sum. Minibatches are also scaled by
their number, so that each has the scale of the batch mean, and their average is the loss of the batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from lightningrl.config import LossConfig
from lightningrl.data.forest import Lesson, read_ids
from lightningrl.data.trie import count_unique, sort_sequences

Teaching: TypeAlias = Callable[[Sequence[Lesson]], list[Lesson]]
"""The lessons of one rollout → those with a gradient. `list` keeps all."""


def with_advantage(rollout: Sequence[Lesson]) -> list[Lesson]:
    """Lessons with a gradient if the loss of a token is proportional to its advantage."""
    return [lesson for lesson in rollout if teaches(lesson)]


def with_weight(rollout: Sequence[Lesson]) -> list[Lesson]:
    """Lessons with a gradient under a KL term, an entropy bonus or a critic, which do not depend on the advantage."""
    return [lesson for lesson in rollout if lesson.weights.any()]


def as_a_whole(rollout: Sequence[Lesson]) -> list[Lesson]:
    """Lessons with a gradient if the ratio is over the whole rollout: all or none."""
    return with_weight(rollout) if any(map(teaches, rollout)) else []


def teaching_under(loss: LossConfig, *, critic: bool = False) -> Teaching:
    """The selection for this loss, and for a critic if there is one."""
    if loss.kl_coef or loss.entropy_coef or (critic and loss.value_coef):
        return with_weight
    return as_a_whole if loss.ratio == "rollout" or loss.importance.startswith("rollout") else with_advantage


def minibatches(
    lessons: Sequence[Lesson], count: int, *, seed: int, teaching: Teaching = with_advantage
) -> list[list[Lesson]]:
    """Split a batch into at most `count` optimizer steps, by whole groups. `seed` determines the order of the groups.

    Groups with a gradient are distributed evenly. There are never more steps than such groups.
    """
    groups = _by_group(lessons)
    shuffled = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    silent = [not any(map(teaching, _by_rollout(group))) for group in shuffled]
    steps = min(count, len(groups) - sum(silent))
    dealt: list[list[Lesson]] = [[] for _ in range(steps)]
    for n, i in enumerate(np.argsort(silent, kind="stable") if steps else []):
        dealt[n % steps] += [replace(lesson, weights=lesson.weights * steps) for lesson in shuffled[i]]
    return dealt


def pack(lessons: Sequence[Lesson], *, max_tokens: int, teaching: Teaching = with_advantage) -> list[list[Lesson]]:
    """Lessons of one optimizer step → lessons of each forest, with at most `max_tokens` unique tokens. A rollout with
    more gets its own forest. Lessons without a gradient are left out.
    """
    packs: list[list[Lesson]] = []
    room = 0
    for group in _by_group(lessons):
        rollouts = [kept for rollout in _by_rollout(group) if (kept := teaching(rollout))]
        for piece, tokens in _pieces(rollouts, max_tokens=max_tokens):
            if not packs or tokens > room:
                packs.append([])
                room = max_tokens
            packs[-1] += piece
            room -= tokens
    return packs


def teaches(lesson: Lesson) -> bool:
    """Whether any token of the call has both a weight and an advantage."""
    return bool(np.any(lesson.weights * lesson.advantages))


def _by_group(lessons: Iterable[Lesson]) -> list[list[Lesson]]:
    groups: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        groups.setdefault(lesson.group_id, []).append(lesson)
    return list(groups.values())


def _by_rollout(lessons: Iterable[Lesson]) -> list[list[Lesson]]:
    rollouts: dict[str, list[Lesson]] = {}
    for lesson in lessons:
        rollouts.setdefault(lesson.rollout_id, []).append(lesson)
    return list(rollouts.values())


def _pieces(rollouts: Sequence[list[Lesson]], *, max_tokens: int) -> list[tuple[list[Lesson], int]]:
    """Pieces of a group that is too large, each with its unique tokens; split where rollouts share few tokens."""
    whole = [lesson for rollout in rollouts for lesson in rollout]
    size = _unique_tokens(whole)
    if size <= max_tokens:
        return [(whole, size)] if whole else []
    order, _ = sort_sequences([read_ids(rollout[0].transition) for rollout in rollouts])
    pieces: list[tuple[list[Lesson], int]] = []
    for i in order:
        joined = [*pieces[-1][0], *rollouts[i]] if pieces else rollouts[i]
        size = _unique_tokens(joined)
        if pieces and size <= max_tokens:
            pieces[-1] = (joined, size)
        else:
            pieces.append((rollouts[i], _unique_tokens(rollouts[i])))
    return pieces


def _unique_tokens(lessons: Sequence[Lesson]) -> int:
    return count_unique([read_ids(lesson.transition) for lesson in lessons])
