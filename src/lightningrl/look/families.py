"""What followed from a call that was sampled once, and played back in branches?"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from lightningrl.branches import is_branching
from lightningrl.look.rollout import mean_of
from lightningrl.types import Call, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Which rollouts of a group repeat which. Empty: none does."""

    samplers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Id of a call → the rollout that made it."""
    places: Mapping[str, Mapping[int, Sequence[str]]] = field(default_factory=dict[str, dict[int, list[str]]])
    """Trunk → number of a branching call, from 1 → the branches there."""
    answers: frozenset[str] = frozenset()
    """Ids of branching calls that several answered, of trunks and of branches."""

    def place(self, rollout_id: str) -> int | None:
        """Number of the call of its trunk that a branch answers afresh; None: it is no branch, or that is unknown."""
        places = (place for of in self.places.values() for place, there in of.items() if rollout_id in there)
        return next(places, None)

    def mean(
        self, members: Collection[str], played_back: Mapping[str, str], rewards: Mapping[str, float | None]
    ) -> float | None:
        """Mean over the members that sampled a call, of what followed from it; None: nothing has a reward.

        `played_back`: rollout → the one that sampled the call, for members that did not.
        """
        own = [member for member in members if played_back.get(member) not in members]
        return mean_of(self._followed(member, played_back.keys(), rewards) for member in own)

    def _followed(self, rollout_id: str, repeating: Set[str], rewards: Mapping[str, float | None]) -> float | None:
        """The final reward; above a place, the mean of the siblings there. `repeating`: who played the call back."""
        value = rewards.get(rollout_id)
        places = self.places.get(rollout_id, {})
        for place in sorted(places, reverse=True):
            there = [branch for branch in places[place] if rewards.get(branch) is not None]
            if repeating >= set(there):
                value = mean_of([value, *(self._followed(branch, repeating, rewards) for branch in there)])
        return value


def families_of(rollouts: Sequence[Rollout], calls: Mapping[str, Sequence[Call]]) -> Families:
    """`calls`: those of each rollout. A branch whose trunk is not among the rollouts stands for itself."""
    made = {call.id: (rollout_id, call) for rollout_id, own in calls.items() for call in own}
    places: dict[str, dict[int, list[str]]] = {}
    answers = set[str]()
    for rollout in rollouts:
        found = made.get(rollout.branch.call_id or "") if rollout.branch is not None else None
        if found is None:
            continue
        trunk, place = found
        places.setdefault(trunk, {}).setdefault(place.index + 1, []).append(rollout.id)
        fresh = next((call.id for call in calls[rollout.id] if is_branching(call, place)), None)
        answers |= set() if fresh is None else {place.id, fresh}
    samplers = {call_id: rollout_id for call_id, (rollout_id, _) in made.items()}
    return Families(samplers=samplers, places=places, answers=frozenset(answers))
