"""Which other answers is a call compared with by `credit = "fork"`? In numbers, for the sentence about its credit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from lightningrl.causal import consequences
from lightningrl.types import Trajectory

Places: TypeAlias = dict[str, dict[str, int]]
"""Id of a call of a trunk → rollouts of the branches there → index of their own answer to its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a call is compared with, and what its value is the mean of."""

    siblings: int
    """Other answers at the latest place that the call is, or follows; 0: it follows none."""
    place: int | None
    """Number of the call at that place, in the call's own rollout, from 1; None: as above."""
    ways: int
    """Rollouts that have this call, in which something else followed from it."""

    def baseline(self, number: int, *, families: int, shrinkage: float) -> str:
        """The name of the baseline of call `number`. `families`: trunks of the group."""
        if self.place is None:
            others = "the other rollout" if families == 2 else f"the other {families - 1} rollouts"
            return f"mean of {others} of the task"
        where = "at this call" if self.place == number else f"at call {self.place}"
        shrunk = ", shrunk towards the mean before it" if shrinkage else ""
        return f"mean of {self.siblings} sibling{'' if self.siblings == 1 else 's'} {where}{shrunk}"


def standings(group: Sequence[Trajectory]) -> dict[str, Standing]:
    """Call id → its standing, for all calls that were sampled in a group."""
    places = _places(group)
    found: dict[str, Standing] = {}
    for trajectory in group:
        recorded = [call.replays or call.call_id for call in trajectory.transitions]
        met = {recorded.index(name): len(there) for name, there in places.items() if name in recorded}
        met |= {there[trajectory.rollout_id]: len(there) for there in places.values() if trajectory.rollout_id in there}
        after = consequences(trajectory.transitions)
        for c, call in enumerate(trajectory.transitions):
            latest = max((p for p in met if p == c or after[p, c]), default=None)
            found[call.call_id] = Standing(
                siblings=0 if latest is None else met[latest],
                place=None if latest is None else latest + 1,
                ways=1 + _repeating(call.call_id, group, places),
            )
    return found


def _places(group: Sequence[Trajectory]) -> Places:
    calls = {call.call_id: call for t in group if t.branch is None for call in t.transitions}
    found: Places = {}
    for branch in group:
        place = calls.get(branch.branch.call_id or "") if branch.branch is not None else None
        if place is None:
            continue
        for c, call in enumerate(branch.transitions):
            if call.replays is None and np.array_equal(call.prompt_ids, place.prompt_ids):
                found.setdefault(place.call_id, {})[branch.rollout_id] = c
                break
    return found


def _repeating(call_id: str, group: Sequence[Trajectory], places: Places) -> int:
    """Number of branches that repeat a call, at places where all do."""
    repeating = {t.rollout_id for t in group if any(call.replays == call_id for call in t.transitions)}
    return sum(len(there) for there in places.values() if repeating.issuperset(there))
