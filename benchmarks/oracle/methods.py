"""The rows and columns of the table: credits and advantages, each credit's objective, and theory's claim on the bias.

exact     the mean of the estimator is the gradient
scaled    it is the gradient times a number that all parameters share, e.g. (G-1)/G if a rollout is part of its own
          baseline
biased    it has another direction
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from lightningrl.algorithms.air import shaped
from lightningrl.algorithms.credit import returns_to_go, step_rewards

from .designs import Design
from .worlds import Path

Claim: TypeAlias = Literal["exact", "scaled", "biased"]
Prepare: TypeAlias = Callable[[Sequence[Path]], list[Path]]

ADVANTAGES = ("rloo", "dr_grpo", "opo", "grpo", "reinforce++", "reinforce++-baseline")
SCALED = ("grpo", "reinforce++", "reinforce++-baseline")
"""Divide by a deviation that includes the rollout itself: biased in any world with more than two reward values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the table."""

    name: str
    credit: str
    options: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    by_role: bool = False
    final: float = 1.0
    """Weight of the final reward in the objective."""
    steps: float = 1.0
    """Weight of the step rewards in it."""
    baseline: Literal["group", "group, of equal values", "own"] = "group"
    biased_in: tuple[str, ...] = ()
    """Worlds in which it is biased, whatever the advantage."""
    worlds: tuple[str, ...] = ("fork", "retry", "team", "words")
    prepare: Prepare = list
    """Preparation of the paths: adds a critic's values, or shapes rewards."""
    design: Design | None = None
    """How groups are branched; None: not at all."""
    advantages: tuple[str, ...] = ADVANTAGES

    def claim(self, advantage: str, world: str) -> Claim:
        """Theory's claim."""
        if advantage in SCALED or world in self.biased_in:
            return "biased"
        if self.baseline == "own" or advantage == "rloo":
            return "exact"
        if self.baseline == "group, of equal values" and (advantage == "dr_grpo" or world != "retry"):
            return "scaled"
        return "biased"

    def objective(self, path: Path) -> float:
        return self.final * path.trajectory.reward + self.steps * float(step_rewards(path.trajectory).sum())


def critic(error: float) -> Prepare:
    """A critic that knows the expected return at each prompt, plus or minus `error`."""

    def look(paths: Sequence[Path]) -> list[Path]:
        seen: dict[bytes, list[tuple[float, float]]] = {}
        for path in paths:
            for call, G in zip(path.trajectory.transitions, returns_to_go(path.trajectory, discount=1.0), strict=True):
                seen.setdefault(call.prompt_ids.tobytes(), []).append((path.probability, G))
        V = {state: sum(p * G for p, G in of) / sum(p for p, _ in of) for state, of in seen.items()}
        off = {state: error * np.cos(3.0 * i) for i, state in enumerate(V)}
        return [_with_values(path, {state: V[state] + off[state] for state in V}) for path in paths]

    return look


def _with_values(path: Path, V: Mapping[bytes, float]) -> Path:
    calls = tuple(replace(call, value=float(V[call.prompt_ids.tobytes()])) for call in path.trajectory.transitions)
    return replace(path, trajectory=replace(path.trajectory, transitions=calls))


def potential(paths: Sequence[Path]) -> list[Path]:
    """Move all step rewards into AIR, as differences of a potential."""

    def make(path: Path) -> Path:
        bare = tuple(replace(call, reward=None) for call in path.trajectory.transitions)
        given = {call.call_id: call.reward or 0.0 for call in path.trajectory.transitions}
        return replace(path, trajectory=shaped(replace(path.trajectory, transitions=bare), given))

    return [make(path) for path in paths]


ALL = ("fork", "retry", "team", "words")
METHODS = (
    Method(name="uniform", credit="uniform", steps=0.0, baseline="group, of equal values"),
    Method(
        name="uniform, by role",
        credit="uniform",
        steps=0.0,
        baseline="group, of equal values",
        by_role=True,
        worlds=("team",),
    ),
    Method(name="discounted γ=1", credit="discounted", options={"discount": 1.0}),
    Method(name="discounted γ=0.8", credit="discounted", options={"discount": 0.8}, biased_in=ALL),
    Method(name="air", credit="air"),
    Method(name="air, by role", credit="air", by_role=True, worlds=("team",)),
    Method(name="air, potential", credit="air", steps=0.0, prepare=potential),
    Method(
        name="gae_calls λ=1, wrong critic",
        credit="gae_calls",
        options={"trace_decay": 1.0},
        baseline="own",
        prepare=critic(0.3),
    ),
    # A critic cannot know the number of retries, or the rewards of solvers that work in parallel. So its steps do not
    # have expectation 0.
    Method(
        name="gae_calls λ=0.5, right critic",
        credit="gae_calls",
        options={"trace_decay": 0.5},
        baseline="own",
        prepare=critic(0.0),
        biased_in=("retry", "team"),
    ),
    Method(
        name="gae_calls λ=0.5, wrong critic",
        credit="gae_calls",
        options={"trace_decay": 0.5},
        baseline="own",
        prepare=critic(0.3),
        biased_in=ALL,
    ),
    Method(name="gigpo ω=1", credit="gigpo", options={"discount": 1.0}, final=2.0, baseline="own", biased_in=ALL),
    Method(name="tree_loo κ=0", credit="tree_loo", options={"shrinkage": 0.0}, baseline="own"),
    Method(name="tree_loo κ=1", credit="tree_loo", options={"shrinkage": 1.0}, baseline="own"),
    Method(name="tree_loo κ=8", credit="tree_loo", options={"shrinkage": 8.0}, baseline="own"),
    *(
        Method(
            name=f"fork κ={shrinkage:g}, shared",
            credit="fork",
            options={"shrinkage": shrinkage, "siblings": "shared"},
            baseline="own",
            design=Design(),
            advantages=("rloo", "grpo"),
        )
        for shrinkage in (0.0, 1.0)
    ),
    # Siblings have more weight than what came before their place.
    Method(
        name="fork κ=1, full",
        credit="fork",
        options={"shrinkage": 1.0, "siblings": "full"},
        baseline="own",
        biased_in=ALL,
        design=Design(),
        advantages=("rloo", "grpo"),
    ),
)

DESIGNS: Mapping[Design, tuple[str, ...]] = {
    Design(forks=2): ("fork", "retry", "panel"),
    Design(places=2): ("fork", "panel"),
    Design(places=2, rule="one trunk"): ("fork", "retry", "panel"),
    Design(rule="own length"): ("fork", "retry", "panel"),
    Design(rule="own reward"): ("fork", "retry", "words", "panel"),
}
"""Others in which "fork κ=1, shared" is tried, and the worlds that have few enough groups."""
LOOKS = {"own length": ("retry",), "own reward": ("fork", "retry", "words", "panel")}
"""Rules that look at what followed a place, and the worlds in which this matters."""
