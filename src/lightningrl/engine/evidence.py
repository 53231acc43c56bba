"""Which weights does an engine serve? Compare the change of its log-probabilities with the trainer's change.

Engine and trainer round differently, so their log-probabilities differ by more than a small update changes them. The
constant part of that difference cancels in changes; what is left is noise. The direction of the change comes from a
second view of the trainer: the same contexts without their first token. Its rounding is independent of both sides, so
noise cannot feign a change (an instrumental variable). Each probe then votes, and the votes are counted with binomial
tails: nothing is assumed about the size of the noise, but that it is symmetric and independent between probes.

Legend: P probes (contexts) · K tokens whose log-probability is compared at each.
"""

from dataclasses import dataclass
from math import comb
from typing import Literal, TypeAlias

import numpy as np

from lightningrl.types import Doubles

Verdict: TypeAlias = Literal["new", "unclear", "old", "part", "other"]
"""The engine serves the new weights; the change is too small to tell; the old weights; a mixture of both; others."""

ALARM = 1e-7
"""Chance of a false alarm of each test that can stop a run. `judge` makes three, on at most two pairs of versions, and
a test of the cache is the seventh: in all, below 1e-6 per publication. Several servers share it.
"""
CONFIRM = 1e-3
"""Chance that old weights pass for new ones. It stops nothing: it only ends the comparison with these old weights."""
MARGIN = 0.1
"""Only a lack or an excess of more than this share of the change counts: two programs never agree to the last digit."""
SKEW = 0.55
"""Share of votes against new weights that noise alone is assumed to reach. Measured with benchmarks/proof.py: 0.50 to
0.53 where noise dominates.
"""
STAYED = 0.2
"""Below this slope, nothing of the change is there; half of the tensors make 0.4 to 0.5."""
ELSEWHERE = 0.8
"""From this size on, an engine without the change has another one. Old weights on a server that rounds differently each
time move by the noise alone, and the trainer by noise and change.
"""
STILL = 0.05
"""Share of the engine's answers that may stay as they are, bit for bit, if all of the trainer's change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Log-probabilities in nats of the same tokens [P K] under one version of the weights."""

    engine: Doubles
    """[P K] NaN: the engine did not report it."""
    trainer: Doubles
    """[P K] the trainer's on the same contexts."""
    second: Doubles
    """[P K] the trainer's on contexts that lack the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the probes say about one publication."""

    probes: int
    """Number of probes that the trainer answers differently since the update. The others tell nothing."""
    nearer: int
    """Probes at which the engine is nearer to the new weights than to the old ones."""
    lacking: int
    """Probes at which the engine's change lacks more than a tenth of the trainer's."""
    beyond: int
    """Probes at which it exceeds the trainer's by more than a tenth."""
    slope: float
    """The engine's change per change of the trainer. 1: new weights; 0: old ones; NaN: nothing changed."""
    size: float
    """Norm of the engine's change per norm of the trainer's, noise included. NaN: the trainer's is 0."""
    still: int
    """Probes that the engine answers as before, bit for bit."""
    trainer_still: int
    """The same for the trainer, in `answers` of its two views."""
    answers: int


def weigh(before: Answers, after: Answers) -> Evidence:
    """Count the votes of the probes."""
    d_engine, d_trainer = after.engine - before.engine, after.trainer - before.trainer
    d_second = after.second - before.second
    known = np.isfinite(d_engine)
    d_engine, d_trainer, d_second = (np.where(known, change, 0.0) for change in (d_engine, d_trainer, d_second))
    size = np.linalg.norm(d_second, axis=1, keepdims=True)
    direction = np.divide(d_second, size, out=np.zeros_like(d_second), where=size > 0)
    moved_by_engine, moved_by_trainer = (direction * d_engine).sum(1), (direction * d_trainer).sum(1)
    telling = (size[:, 0] > 0) & (moved_by_trainer != 0)
    e, t = moved_by_engine[telling], moved_by_trainer[telling]
    trainer_still = int((~d_trainer.any(1)).sum() + (~d_second.any(1)).sum())
    return Evidence(
        probes=len(e),
        nearer=int((e > 0.5 * t).sum()),
        lacking=int((e < (1 - MARGIN) * t).sum()),
        beyond=int((e > (1 + MARGIN) * t).sum()),
        slope=_ratio(float(e.sum()), float(t.sum())),
        size=_ratio(float(np.linalg.norm(d_engine)), float(np.linalg.norm(d_trainer))),
        still=int((known.any(1) & ~d_engine.any(1)).sum()),
        trainer_still=trainer_still,
        answers=2 * len(d_engine),
    )


def judge(evidence: Evidence, *, alarm: float = ALARM) -> Verdict:
    """The verdict. `new` and `unclear` let a run go on. `alarm`: chance of a false alarm of each test."""
    expected = STILL + 2 * evidence.trainer_still / max(evidence.answers, 1)
    if tail(evidence.still, evidence.answers // 2, chance=min(expected, 1.0)) < alarm:
        return "old"
    if tail(evidence.lacking, evidence.probes, chance=SKEW) < alarm:
        return _named(evidence)
    if tail(evidence.beyond, evidence.probes, chance=SKEW) < alarm:
        return "other"
    return "new" if tail(evidence.nearer, evidence.probes, chance=0.5) < CONFIRM else "unclear"


def _named(evidence: Evidence) -> Verdict:
    """The name for weights that lack some of the change: it is small, or goes elsewhere."""
    if abs(evidence.slope) < STAYED:
        return "old" if evidence.size < ELSEWHERE else "other"
    return "part" if STAYED <= evidence.slope < 1.0 else "other"


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("nan")


def tail(count: int, trials: int, *, chance: float) -> float:
    """P(X ≥ count) for X ~ Binomial(trials, chance)."""
    return sum(comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(count, trials + 1))
