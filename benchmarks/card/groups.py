"""Rollouts of one task as forests: merged, one conversation a row, or one call a row.

Rows follow one another without padding, so they waste nothing: the strongest way to compute without sharing prefixes.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from lightningrl.data.forest import Forest, Lesson, build_forest, unweighted
from lightningrl.types import Transition

GROUP, TURNS = 8, 3
"""Rollouts of a task, and calls of a rollout."""


def group(context: int, *, vocabulary: int, members: int = GROUP, seed: int = 0) -> list[list[Lesson]]:
    """[rollout][call] of one task. Half of the longest call is the common prompt; the other half are completions and
    what follows them, in equal parts.
    """
    rng = np.random.default_rng(seed)
    prompt, part = context // 2, context // (4 * TURNS)
    task = rng.integers(0, vocabulary, prompt)
    made: list[list[Lesson]] = []
    for member in range(members):
        history, calls = task, list[Lesson]()
        for turn in range(TURNS):
            completion = rng.integers(0, vocabulary, part)
            calls.append(_lesson(f"{member}/{turn}", history, completion, rng))
            history = np.concatenate((history, completion, rng.integers(0, vocabulary, part)))
        made.append(calls)
    return made


def _lesson(name: str, prompt: Any, completion: Any, rng: np.random.Generator) -> Lesson:
    C = len(completion)
    call = Transition(
        call_id=name,
        parent_call_id=None,
        agent="",
        policy_version=0,
        prompt_ids=prompt.astype(np.int32),
        completion_ids=completion.astype(np.int32),
        logprobs=np.full(C, -12.0, np.float32),
        reward=None,
    )
    advantages, weights = rng.normal(size=C).astype(np.float32), np.full(C, 1e-4)
    return replace(unweighted(call, rollout_id=name.partition("/")[0]), advantages=advantages, weights=weights)


def merged(rollouts: Sequence[Sequence[Lesson]]) -> Forest:
    """Every prefix once."""
    return build_forest([lesson for calls in rollouts for lesson in calls])


def conversations(rollouts: Sequence[Sequence[Lesson]]) -> list[Forest]:
    """The calls of a rollout in one row: perfectly merged rows."""
    return [build_forest(calls) for calls in rollouts]


def calls(rollouts: Sequence[Sequence[Lesson]]) -> list[Forest]:
    """Each call in a row of its own."""
    return [build_forest([lesson]) for calls in rollouts for lesson in calls]


WAYS: dict[str, Callable[[Sequence[Sequence[Lesson]]], list[Forest]]] = {
    "calls": calls,
    "conversations": conversations,
    "forest": lambda rollouts: [merged(rollouts)],
}


def passes(forests: Sequence[Forest], *, most_tokens: int) -> list[Forest]:
    """Forests side by side, in passes of at most so many tokens, or of one forest with more."""
    made: list[list[Forest]] = []
    room = 0
    for forest in forests:
        tokens = len(forest.token_ids)
        if not made or tokens > room:
            made.append([])
            room = most_tokens
        made[-1].append(forest)
        room -= tokens
    return [beside(part) for part in made]


def beside(forests: Sequence[Forest]) -> Forest:
    """One forest of all, which share nothing."""

    def lengths(of: Callable[[Forest], int]) -> list[int]:
        return np.cumsum([0, *map(of, forests)])[:-1].tolist()

    tokens, segments = lengths(lambda f: len(f.token_ids)), lengths(lambda f: len(f.parents))
    numbers = lengths(lambda f: len(f.call_ids))
    shifted = [
        replace(
            forest,
            starts=forest.starts[:-1] + token,
            parents=np.where(forest.parents < 0, -1, forest.parents + segment),
            sources=forest.sources + token,
            states=forest.states + token,
            calls=forest.calls + number,
            rollouts=forest.rollouts + number,
        )
        for forest, token, segment, number in zip(forests, tokens, segments, numbers, strict=True)
    ]
    arrays: dict[str, Any] = {
        field.name: np.concatenate([getattr(forest, field.name) for forest in shifted])
        for field in fields(Forest)
        if field.name not in ("call_ids", "returns")
    }
    N = sum(len(forest.token_ids) for forest in forests)
    arrays["starts"] = np.append(arrays["starts"], N).astype(np.int32)
    arrays = {name: array.astype(np.int32) if array.dtype.kind == "i" else array for name, array in arrays.items()}
    return Forest(**arrays, call_ids=tuple(name for forest in forests for name in forest.call_ids), returns=None)
