"""When a warm start ends: when the agent succeeds on 35 to 50 % of its tasks, or at the last step on 20 %.

learn a stretch → try the agent → success too low: continue
                                  too high: go back one stretch, and halve it
                                  in between: stop
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
"""Success from which learning from reward starts well: a group of 8 then nearly always has good and bad rollouts."""
AIM = 0.35
"""Success at which training stops. A higher start learns faster from reward, and `LOW` alone could be noise."""
LOOKS = 12
"""Number of stretches in `steps`."""
SHORTEST = 4
"""Least number of steps in a stretch."""
PASSES = 3
"""Most passes of `steps` steps; each after the first begins at a lower learning rate."""
LOST = 0.7
"""Loss in nats a token. Above it, a new model cannot do anything yet, so the agent is not tried."""
AGAIN = 1e-3
"""Peak learning rate for a model that was trained before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state after one stretch."""

    step: int
    loss: float
    """Mean over the stretch, in nats a token."""
    trial: Trial | None
    """None: the agent was not tried."""


class Way(Protocol):
    """Makes a pass over the demonstrations with this peak learning rate; None: the default of the first pass."""

    def __call__(self, peak: float | None) -> Imitation: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The result of training."""

    steps: int
    """Number of optimizer steps."""
    losses: Sequence[float]
    """[stretches] mean loss in nats a token."""
    trial: Trial

    @property
    def reached(self) -> bool:
        return LOW <= self.trial.mean <= HIGH


async def straight(way: Way, tryout: Tryout, *, told: Callable[[Look], None]) -> Arrival:
    """Take all steps, then try the agent once."""
    course, losses = way(None), list[float]()
    while course.left > 0:
        losses.append(await asyncio.to_thread(course.advance, _stretch(course)))
        if course.left > 0:
            told(Look(step=course.step, loss=losses[-1], trial=None))
    trial = await tryout()
    told(Look(step=course.step, loss=losses[-1] if losses else math.nan, trial=trial))
    return Arrival(steps=course.step, losses=losses, trial=trial)


async def steered(way: Way, tryout: Tryout, *, shelf: Path, told: Callable[[Look], None]) -> Arrival:
    """Train until success is between `LOW` and `HIGH`. `shelf` is a folder for the state to go back to."""
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
    """At most one pass: (steps, losses, last trial). `before`: number of steps in earlier passes."""
    losses: list[float] = []
    stretch, kept = _stretch(course), await asyncio.to_thread(course.save, shelf)
    while True:
        losses.append(await asyncio.to_thread(course.advance, stretch))
        ended = course.left <= 0
        hopeless = losses[-1] > LOST and not ended
        trial = None if hopeless else await tryout()
        told(Look(step=before + course.step, loss=losses[-1], trial=trial))
        if trial and trial.mean > HIGH and stretch > SHORTEST:
            await asyncio.to_thread(course.back_to, kept, shelf)
            stretch = max(SHORTEST, stretch // 2)
            losses.pop()
        elif trial and (ended or trial.mean >= AIM):
            return course.step, losses, trial
        else:
            kept = await asyncio.to_thread(course.save, shelf)


def _stretch(course: Imitation) -> int:
    return max(1, -(-course.steps // LOOKS))


def shortcoming(arrival: Arrival, *, heads: frozenset[tuple[str, str]], unseen: float, count: int) -> tuple[str, str]:
    """(likeliest reason why success is too low, what to change).

    `unseen` is the loss on held-back demonstrations; NaN: none were held back.
    """
    trial, losses = arrival.trial, arrival.losses
    tasks = len(trial.success)
    if trial.failed * 2 > tasks:
        return (
            f"{trial.failed} of {tasks} rollouts failed: {trial.error}",
            "make the agent survive answers that make no sense; agents.log has the errors",
        )
    if trial.heads and not trial.heads & heads:
        return (
            "the agent sends another system prompt, or other tools, than the demonstrations have",
            "use what the agent sends: record it with a `warmstart.teacher` or with `lightningrl run`",
        )
    if trial.truncated > 0.2:
        return (
            f"`{trial.truncated:.0%}` of the answers reached their token limit",
            "raise the agent's `max_tokens` or `engine.max_length`",
        )
    late = losses[-1] if losses else math.nan
    if unseen > 1.5 * late + 0.02:
        return (
            f"the model has memorized its {count:,} demonstrations: loss {late:.2f} on them, {unseen:.2f} on others",
            f"use more demonstrations, on different tasks: `warmstart.count={10 * count}`",
        )
    if len(losses) > 3 and late < 0.95 * losses[-3]:
        return f"the loss was still falling ({losses[-3]:.3f} → {late:.3f})", "raise `warmstart.steps`"
    return (
        f"the loss stopped falling at {late:.2f} nats a token, which is too high to do the tasks",
        "use simpler tasks, demonstrations without mistakes, or a larger model: "
        "`warmstart.shape={hidden = 160, layers = 4}`, or a `warmstart.base`",
    )
