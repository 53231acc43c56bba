"""Everything about one rollout: task, group, attempts, calls, rewards, and what each call taught.

records → `look_at` → `RolloutView` → terminal, page, or `as_json` (docs/look.md)
"""

import asyncio
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightningrl.errors import Missing, UserError
from lightningrl.look.branches import Branched, BranchView, branch_of, branches_of, trunk_name, void_of
from lightningrl.look.call import CallView, SpanView, reward_json, views
from lightningrl.look.logs import Logs, logs_of
from lightningrl.look.opened import Opened
from lightningrl.look.step import air_of
from lightningrl.look.teaching import Rule, Teaching, teaching_of
from lightningrl.store import Records, Where
from lightningrl.types import FINAL, Attempt, Call, Reward, Rollout, RolloutStatus, Span

VOID_TEACHES = "its agent went another way than the recorded attempt, so it is left out of its group"
"""What is told of a void branch."""
RECENT = 500
"""If no rollout is named, one of this many latest rollouts is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """One rollout of the group."""

    id: str
    reward: float | None
    """Final reward; None: it has none (yet)."""
    status: RolloutStatus
    trunk: str | None
    """The rollout that it is a branch of; None: it is no branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout, with the calls of one attempt: the accepted one, or else the latest, unless another is asked for."""

    store: str
    rollout: Rollout
    attempts: tuple[Attempt, ...]
    attempt: Attempt | None
    """The attempt whose calls are shown; None: no attempt has begun."""
    calls: tuple[CallView, ...]
    spans: tuple[SpanView, ...]
    """Tools, retrievals, agents and guardrails of that attempt, in order of time."""
    rewards: tuple[Reward, ...]
    """Rewards of that attempt as a whole."""
    siblings: tuple[Sibling, ...]
    """The rollouts of the group, this one among them, in queue order."""
    branch: BranchView | None
    """Where it parts from the attempt that it repeats; None: it repeats none."""
    branches: tuple[Branched, ...]
    """The rollouts of the group that repeat the shown attempt, by place."""
    teaching: Teaching
    logs: Logs | None
    """What that attempt printed; None: nothing, or it is not in the run's folder (any more)."""

    @property
    def group(self) -> Mapping[str, float | None]:
        """Rollout id → final reward, for the whole group; None: no reward."""
        return {sibling.id: sibling.reward for sibling in self.siblings}

    @property
    def reward(self) -> float | None:
        return self.group.get(self.rollout.id)

    def beside(self, distance: int) -> str | None:
        """Id of the rollout `distance` places further in the group; None: the group ends before."""
        place = [sibling.id for sibling in self.siblings].index(self.rollout.id) + distance
        return self.siblings[place].id if 0 <= place < len(self.siblings) else None

    @property
    def group_mean(self) -> float | None:
        return group_mean(self.group, branches={one.id for one in self.siblings if one.trunk is not None})

    def as_json(self, *, tokens: bool = True) -> dict[str, Any]:
        """`tokens`: also the sampled tokens of each call, which are most of the answer."""
        task, teaching = self.rollout.task, self.teaching
        return {
            "store": self.store,
            "rollout": self.rollout.id,
            "status": self.rollout.status,
            "task": asdict(task),
            "step": teaching.step,
            "reward": self.reward,
            "rewards": [reward_json(reward) for reward in self.rewards],
            "group": {"id": self.rollout.group_id, "mean": self.group_mean, "rewards": self.group},
            "branch": None if self.branch is None else self.branch.as_json(),
            "branches": [asdict(branch) for branch in self.branches],
            "attempts": [_attempt_json(attempt) for attempt in self.attempts],
            "siblings": [asdict(sibling) for sibling in self.siblings],
            "previous": self.beside(-1),
            "next": self.beside(1),
            "attempt": self.attempt.id if self.attempt else None,
            "number": self.attempt.number if self.attempt else None,
            "calls": [call.as_json(tokens=tokens) for call in self.calls],
            "spans": [span.as_json() for span in self.spans],
            "teaching": {"learnt": teaching.learnt, "why_not": teaching.why_not},
            "credit": _credit_json(teaching.rules),
            "logs": None if self.logs is None else asdict(self.logs),
        }


async def look_at(
    run: Opened,
    rollout_id: str | None = None,
    *,
    attempt: int | None = None,
    texts: bool = True,
    logs: bool = True,
) -> RolloutView:
    """The view of one rollout; without an id, of the one that `pick` chooses.

    `attempt`: the number of the attempt to show. `texts`: also the text of each sampled token. `logs`: also what
    the attempt printed. Raises `Missing` for an unknown id or attempt.
    """
    rollout = await named(run.records, rollout_id) if rollout_id else await pick(run.records)
    attempts = await run.records.attempts([rollout.id])
    shown = chosen(rollout, attempts, attempt)
    ids = [shown.id] if shown else []
    calls, spans = await run.records.calls(ids), await run.records.spans(ids)
    teaching = await _teaching(run, rollout, attempts, shown)
    air = _air(run, teaching, calls, spans)
    members = await run.records.rollouts(group_ids=[rollout.group_id])
    trunk, recorded = await _trunk(run.records, rollout)
    final = await final_rewards(run.records, [*members, *([] if trunk is None else [trunk])])
    branch = branch_of(rollout, shown=shown, calls=calls, trunk=trunk, recorded=recorded, among=members, rewards=final)
    rewards = (*await run.records.rewards(ids), *air)
    policies = {call.policy for call in calls} if texts else set[str]()
    of_call, of_span = views(
        calls,
        recorded=spans,
        rewards=rewards,
        teaching=teaching,
        texts={policy: run.texts(policy) for policy in policies},
        played={} if branch is None else branch.played,
    )
    return RolloutView(
        store=str(run.file),
        rollout=rollout,
        attempts=tuple(attempts),
        attempt=shown,
        calls=of_call,
        spans=of_span,
        rewards=tuple(reward for reward in rewards if reward.call_id is None),
        siblings=tuple(_sibling(member, final[member.id]) for member in members),
        branch=branch,
        branches=branches_of(shown, calls, among=members, rewards=final),
        teaching=teaching,
        logs=await asyncio.to_thread(logs_of, run.file.parent, shown.id) if shown and logs else None,
    )


async def pick(records: Records) -> Rollout:
    """The rollout that is most worth a look.

    The latest one with a reward below its group's mean; else, in this order, the latest with the lowest reward, the
    latest that failed, the latest.
    """
    recent = await records.rollouts(limit=RECENT)
    if not recent:
        raise UserError("the run has no rollouts yet", hint="wait until it has begun")
    rewards = await final_rewards(records, recent)
    groups: dict[str, list[float | None]] = {}
    for rollout in recent:
        known_rewards = groups.setdefault(rollout.group_id, [])
        if rollout.branch is None:
            known_rewards.append(rewards[rollout.id])
    for rollout in reversed(recent):
        reward, mean = rewards[rollout.id], mean_of(groups[rollout.group_id])
        if reward is not None and mean is not None and reward < mean - 1e-9:
            return rollout
    known = [(reward, -place) for place, rollout in enumerate(recent) if (reward := rewards[rollout.id]) is not None]
    failed = [rollout for rollout in recent if rollout.status == "failed"]
    if known:
        return recent[-min(known)[1]]
    return failed[-1] if failed else recent[-1]


async def final_rewards(records: Records, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Rollout id → final reward, in order; None: no reward. If there are several, the grader's counts."""
    rollout_of = {rollout.accepted_attempt_id: rollout.id for rollout in rollouts if rollout.accepted_attempt_id}
    found: dict[str, float | None] = {rollout.id: None for rollout in rollouts}
    final = [
        reward for reward in await records.rewards(list(rollout_of)) if reward.name == FINAL and reward.call_id is None
    ]
    for reward in sorted(final, key=lambda reward: reward.source == "grader"):
        found[rollout_of[reward.attempt_id]] = reward.value
    return found


async def named(records: Records, rollout_id: str) -> Rollout:
    """The rollout with this id, or the only one whose id begins so. Raises `Missing`."""
    for rollout in await records.rollouts(ids=[rollout_id]):
        return rollout
    begins = await records.rollouts(where=Where(prefix=rollout_id), limit=2)
    if len(begins) == 1:
        return begins[0]
    known = [rollout.id for rollout in begins or await records.rollouts(limit=RECENT)]
    near = difflib.get_close_matches(rollout_id, known, n=1)
    meant = f"did you mean `{near[0]}`? " if near else ""
    raise Missing(
        f"the run has no rollout `{rollout_id}`",
        hint=f"{meant}the table of rollouts has them all: `lightningrl rollouts RUN_DIR`",
    )


def chosen(rollout: Rollout, attempts: Sequence[Attempt], number: int | None) -> Attempt | None:
    """The attempt with this number; without one the accepted attempt, or else the latest."""
    if number is None:
        accepted = next((attempt for attempt in attempts if attempt.id == rollout.accepted_attempt_id), None)
        return accepted or (attempts[-1] if attempts else None)
    found = next((attempt for attempt in attempts if attempt.number == number), None)
    if found is None:
        known = ", ".join(str(attempt.number) for attempt in attempts) or "none"
        raise Missing(f"rollout `{rollout.id}` has no attempt `{number}`", hint=f"its attempts: {known}")
    return found


async def _trunk(records: Records, rollout: Rollout) -> tuple[Rollout | None, list[Call]]:
    """The rollout that a branch repeats, and the calls of that attempt; without its records, nothing."""
    if rollout.branch is None:
        return None, []
    trunk = await records.rollouts(ids=[trunk_name(rollout.branch.attempt_id)])
    return (trunk[0], await records.calls([rollout.branch.attempt_id])) if trunk else (None, [])


def _sibling(member: Rollout, reward: float | None) -> Sibling:
    trunk = None if member.branch is None else trunk_name(member.branch.attempt_id)
    return Sibling(id=member.id, reward=reward, status=member.status, trunk=trunk)


async def _teaching(run: Opened, rollout: Rollout, attempts: Sequence[Attempt], shown: Attempt | None) -> Teaching:
    """What the shown attempt taught."""
    teaching = await teaching_of(run, rollout)
    accepted = next((attempt for attempt in attempts if attempt.id == rollout.accepted_attempt_id), None)
    if accepted is None and void_of(shown) is not None:
        return replace(teaching, why_not=VOID_TEACHES)
    if accepted is None or accepted is shown or teaching.step is None:
        return teaching
    why = f"attempt {accepted.number} was accepted, and only that one teaches"
    return Teaching(step=teaching.step, learnt=teaching.learnt, why_not=why)


def _air(run: Opened, teaching: Teaching, calls: Sequence[Call], spans: Sequence[Span]) -> tuple[Reward, ...]:
    """The rewards of the AIR rules. They are computed for exams, too, although exams teach nothing."""
    if teaching.lessons or run.config is None:
        return teaching.rewards
    try:
        return tuple(air_of(run.config, spans, calls))
    except UserError:  # `teaching.why_not` has the message
        return ()


def group_mean(rewards: Mapping[str, float | None], *, branches: Collection[str]) -> float | None:
    """Mean of the final rewards of a group, by rollout. A branch repeats a part of its trunk, which counts already; so
    branches count only if nothing else has a reward.
    """
    own = mean_of(reward for name, reward in rewards.items() if name not in branches)
    return mean_of(rewards.values()) if own is None else own


def mean_of(rewards: Iterable[float | None]) -> float | None:
    """Mean of the rewards that are known; None if none is."""
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def _credit_json(rules: Sequence[Rule]) -> dict[str, Any] | None:
    """The first policy's rule. The words are those of all policies, if their rules differ."""
    if not rules:
        return None
    same = len({rule.words for rule in rules}) == 1
    words = rules[0].words if same else " ".join(f"{rule.policy}: {rule.words}" for rule in rules)
    names = ("credit", "advantage", "group_by")
    return {**{name: getattr(rules[0], name) for name in names}, "words": words}


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    """The attempt without its lease and the hash of its token."""
    names = ("id", "number", "status", "worker", "error", "output", "started_at", "ended_at")
    return {name: getattr(attempt, name) for name in names}
