"""When is a warm start good enough? When the agent succeeds on a fifth to a half of its tasks: reward then has
something to compare.

learn a stretch → try the agent → below: go on; above: go back to the stretch before, and take half of it; in between:
stop.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightningrl.trainer.imitation import Imitation
from lightningrl.warmstart.tryout import Trial, Tryout

LOW, HIGH = 0.2, 0.5
"""Success at which learning from reward starts well: a group of 8 then nearly always has both good and bad rollouts."""
AIM = 0.35
"""The way goes on until here: the higher a start, the faster reward teaches, and chance alone does not make it up."""
LOOKS = 12
"""Stretches in `steps`."""
SHORTEST = 4
"""Steps; a stretch is not halved below."""
PASSES = 3
"""Times `steps` that are taken at most; each after the first begins at a lower learning rate."""
LOST = 0.7
"""Nats a token; above, a model of one's own cannot do anything yet, and trying the agent would only cost time."""
AGAIN = 1e-3
"""The highest learning rate for a model that was trained before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Where the way has got to."""

    step: int
    loss: float
    """Mean over the stretch, in nats a token."""
    trial: Trial | None
    """None: the agent was not tried."""


class Way(Protocol):
    """Makes a pass over the demonstrations with this peak learning rate; None: the first one's own."""

    def __call__(self, peak: float | None) -> Imitation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How it ended."""

    steps: int
    """Steps that the model has taken."""
    losses: Sequence[float]
    """Of each stretch."""
    trial: Trial

    @property
    def reached(self) -> bool:
        return LOW <= self.trial.mean <= HIGH


async def straight(way: Way, tryout: Tryout, *, told: Callable[[Look], None]) -> Arrival:
    """All steps, and a trial at the end."""
    course, losses = way(None), list[float]()
    while course.left > 0:
        losses.append(await asyncio.to_thread(course.advance, _stretch(course)))
        if course.left > 0:
            told(Look(step=course.step, loss=losses[-1], trial=None))
    trial = await tryout()
    told(Look(step=course.step, loss=losses[-1] if losses else math.nan, trial=trial))
    return Arrival(steps=course.step, losses=losses, trial=trial)


async def steered(way: Way, tryout: Tryout, *, shelf: Path, told: Callable[[Look], None]) -> Arrival:
    """Until the agent succeeds often enough, and not too often. `shelf`: a folder for what there is to go back to."""
    first = way(None)
    taken, losses, trial = await _passed(first, tryout, shelf=shelf, told=told, before=0)
    for _ in range(PASSES - 1):
        if trial.mean >= LOW:
            break
        steps, more, trial = await _passed(way(AGAIN), tryout, shelf=shelf, told=told, before=taken)
        taken, losses = taken + steps, [*losses, *more]
    return Arrival(steps=taken, losses=losses, trial=trial)


async def _passed(
    course: Imitation, tryout: Tryout, *, shelf: Path, told: Callable[[Look], None], before: int
) -> tuple[int, list[float], Trial]:
    """One pass, or as much of it as it takes: (steps, losses, the last trial). `before`: steps of earlier passes."""
    losses: list[float] = []
    stretch, kept = _stretch(course), course.save(shelf)
    while True:
        losses.append(await asyncio.to_thread(course.advance, stretch))
        ended = course.left <= 0
        hopeless = losses[-1] > LOST and not ended
        trial = None if hopeless else await tryout()
        told(Look(step=before + course.step, loss=losses[-1], trial=trial))
        if trial and trial.mean > HIGH and stretch > SHORTEST:
            course.back_to(kept, shelf)
            stretch = max(SHORTEST, stretch // 2)
            losses.pop()
        elif trial and (ended or trial.mean >= AIM):
            return course.step, losses, trial
        else:
            kept = course.save(shelf)


def _stretch(course: Imitation) -> int:
    return max(1, -(-course.steps // LOOKS))


def shortcoming(arrival: Arrival, *, heads: frozenset[tuple[str, str]], unseen: float, count: int) -> tuple[str, str]:
    """(the likeliest reason why success is too low, what to change). `unseen`: loss on demonstrations that were held
    back; NaN: there were none.
    """
    trial, losses = arrival.trial, arrival.losses
    tasks = len(trial.success)
    if trial.failed * 2 > tasks:
        return (
            f"{trial.failed} of {tasks} rollouts failed: {trial.error}",
            "an agent should get by with answers that make no sense; agents.log has more",
        )
    if trial.heads and not trial.heads & heads:
        return (
            "the agent asks with another system prompt, or with other tools, than the demonstrations have",
            "take both from what the agent sends: a `warmstart.teacher` records it, or `lightningrl run`",
        )
    if trial.truncated > 0.2:
        return (
            f"`{trial.truncated:.0%}` of the answers ran into their token limit",
            "raise the agent's `max_tokens` or `engine.max_length`",
        )
    late = losses[-1] if losses else math.nan
    if unseen > 1.5 * late + 0.02:
        return (
            f"the model knows its {count:,} demonstrations by heart: loss {late:.2f} on them, {unseen:.2f} on others",
            f"more demonstrations: `warmstart.count={10 * count}`, on different tasks",
        )
    if len(losses) > 3 and late < 0.95 * losses[-3]:
        return f"the loss was still falling ({losses[-3]:.3f} → {late:.3f})", "more steps: raise `warmstart.steps`"
    return (
        f"the loss has come to rest at {late:.2f} nats a token, and that is not enough to do the tasks",
        "simpler tasks, demonstrations without mistakes, or a larger model: `warmstart.shape={hidden = 160, layers = 4}`, or a `warmstart.base`",
    )
