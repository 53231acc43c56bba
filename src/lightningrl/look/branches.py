"""Which attempt does a rollout repeat, and up to which call? A branch, its trunk, and the siblings at one place.

    trunk    1  2  3  4    reward 1
    branch   1  2  3'      reward 0    calls 1 and 2 are played back, and call 3 is answered afresh: the branching call

Both answers to the prompt of call 3 are siblings. They share everything before it, so their rewards compare them alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightningrl.branches import VOID, is_branching
from lightningrl.types import Attempt, Call, Rollout, RolloutStatus

PLAYED_BACK = "played back"
"""Why a call whose answer was played back is not trained: the trunk's is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The recorded call whose answer was played back."""

    rollout: str | None
    """None: its records are not in this run."""
    call: int | None
    """Its number, from 1; None as above."""

    @property
    def words(self) -> str:
        return PLAYED_BACK if self.rollout is None else f"{PLAYED_BACK} from call {self.call} of {self.rollout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rollout ended."""

    rollout: str
    reward: float | None
    """Final reward; None: it has none (yet)."""
    status: RolloutStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched(Ended):
    """A rollout that repeats the attempt that is shown."""

    call: int | None
    """Number of the branching call, from 1; None: all calls are played back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchView:
    """Where the rollout that is shown parts from its trunk."""

    rollout: str | None
    """The trunk; None: its records are not in this run."""
    attempt: str
    call: int | None
    """Number of the branching call in the trunk, from 1; None: all calls are played back, or `rollout` is None."""
    is_replay: bool
    """Whether all calls are played back."""
    here: int | None
    """Number of the branching call in the attempt that is shown; None: there is none, or it was not reached."""
    answers: tuple[Ended, ...]
    """The siblings: the trunk, and all of its branches at this call, this rollout among them. Empty: as `call`."""
    void: str | None
    """Why the attempt that is shown teaches nothing: its agent went another way. None: it went the same way."""
    played: Mapping[str, Played] = field(default_factory=dict[str, Played])
    """Id of a call of the trunk → what is told of it."""

    @property
    def words(self) -> str:
        """`a branch of train-00003-001-00 at call 4`"""
        trunk = self.rollout or f"attempt {self.attempt}, which is not recorded here"
        if self.is_replay:
            return f"a replay of {trunk}"
        return f"a branch of {trunk}" + ("" if self.call is None else f" at call {self.call}")

    def as_json(self) -> dict[str, Any]:
        names = ("rollout", "attempt", "call", "is_replay", "here", "void")
        found = {name: getattr(self, name) for name in names}
        return {**found, "answers": [asdict(answer) for answer in self.answers]}


def branch_of(
    rollout: Rollout,
    *,
    shown: Attempt | None,
    calls: Sequence[Call],
    trunk: Rollout | None,
    recorded: Sequence[Call],
    among: Sequence[Rollout],
    rewards: Mapping[str, float | None],
) -> BranchView | None:
    """None: the rollout is no branch. `calls`: of the attempt `shown`; `recorded`: of the trunk's attempt. `among`: the
    rollouts of the group; `rewards`: their final ones, and the trunk's.
    """
    branch = rollout.branch
    if branch is None:
        return None
    place = next((call for call in recorded if call.id == branch.call_id), None)
    here = next((call for call in calls if place is not None and is_branching(call, place)), None)
    alike = [other for other in among if other.branch == branch]
    name = None if trunk is None else trunk.id
    return BranchView(
        rollout=name,
        attempt=branch.attempt_id,
        call=None if place is None else place.index + 1,
        is_replay=branch.call_id is None,
        here=None if here is None else here.index + 1,
        answers=tuple(
            Ended(rollout=one.id, reward=rewards.get(one.id), status=one.status)
            for one in ([trunk, *alike] if trunk is not None and place is not None else [])
        ),
        void=void_of(shown),
        played={call.id: Played(rollout=name, call=call.index + 1) for call in recorded},
    )


def branches_of(
    attempt: Attempt | None, calls: Sequence[Call], *, among: Sequence[Rollout], rewards: Mapping[str, float | None]
) -> tuple[Branched, ...]:
    """The rollouts that repeat an attempt, by place. `calls`: all of the attempt. `among`: rollouts of the group."""
    if attempt is None:
        return ()
    numbers = {call.id: call.index + 1 for call in calls}
    found = [
        Branched(
            rollout=one.id,
            reward=rewards.get(one.id),
            status=one.status,
            call=numbers.get(one.branch.call_id or ""),
        )
        for one in among
        if one.branch is not None and one.branch.attempt_id == attempt.id
    ]
    return tuple(sorted(found, key=lambda branch: branch.call or 0))


def places_of(branches: Sequence[Branched]) -> dict[int | None, list[Branched]]:
    """Number of the branching call → the branches there."""
    found: dict[int | None, list[Branched]] = {}
    for branch in branches:
        found.setdefault(branch.call, []).append(branch)
    return found


def branched_words(branches: Sequence[Branched]) -> list[str]:
    """`branched at call 4: 2 branches, rewards 0 and 1`, for each place."""
    return [
        _counted(there, "replay", "replays") if call is None else f"branched at call {call}: {_counted(there)}"
        for call, there in places_of(branches).items()
    ]


def void_of(attempt: Attempt | None) -> str | None:
    """Why an attempt is void, without the traceback; None: it is not."""
    error = (attempt.error or "") if attempt is not None else ""
    return error.splitlines()[0].removeprefix(VOID) if error.startswith(VOID) else None


def trunk_name(attempt_id: str) -> str:
    """The rollout that an attempt belongs to; attempts are named `ROLLOUT.NUMBER`."""
    return attempt_id.rpartition(".")[0]


def _counted(there: Sequence[Branched], one: str = "branch", many: str = "branches") -> str:
    rewards = [f"{branch.reward:.3g}" for branch in there if branch.reward is not None]
    open_ = len(there) - len(rewards)
    parts = [f"{len(there)} {one if len(there) == 1 else many}"]
    if rewards:
        parts.append(f"reward{'' if len(rewards) == 1 else 's'} {_listed(rewards)}")
    if open_:
        parts.append(f"{open_} without a reward")
    return ", ".join(parts)


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
