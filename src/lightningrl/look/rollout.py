"""Everything about one rollout: task, group, attempts, calls, rewards, and what each call taught.

records → `look_at` → `RolloutView` → terminal, page, or `as_json` (docs/look.md)
"""

import asyncio
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl.errors import Missing, UserError
from lightningrl.look.call import CallView, SpanView, reward_json, views
from lightningrl.look.logs import Logs, logs_of
from lightningrl.look.opened import Opened
from lightningrl.look.step import air_of
from lightningrl.look.teaching import Rule, Teaching, teaching_of
from lightningrl.store import Records, Where
from lightningrl.types import FINAL, Attempt, Call, Reward, Rollout, RolloutStatus, Span

RECENT = 500
"""If no rollout is named, one of this many latest rollouts is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sibling:
    """One rollout of the group."""

    id: str
    reward: float | None
    """Final reward; None: it has none (yet)."""
    status: RolloutStatus


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
        return mean_of(self.group.values())

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
    rollout = await _named(run.records, rollout_id) if rollout_id else await pick(run.records)
    attempts = await run.records.attempts([rollout.id])
    shown = chosen(rollout, attempts, attempt)
    ids = [shown.id] if shown else []
    calls, spans = await run.records.calls(ids), await run.records.spans(ids)
    teaching = await _teaching(run, rollout, attempts, shown)
    air = _air(run, teaching, calls, spans)
    members = await run.records.rollouts(group_ids=[rollout.group_id])
    final = await final_rewards(run.records, members)
    rewards = (*await run.records.rewards(ids), *air)
    policies = {call.policy for call in calls} if texts else set[str]()
    of_call, of_span = views(
        calls,
        recorded=spans,
        rewards=rewards,
        teaching=teaching,
        texts={policy: run.texts(policy) for policy in policies},
    )
    return RolloutView(
        store=str(run.file),
        rollout=rollout,
        attempts=tuple(attempts),
        attempt=shown,
        calls=of_call,
        spans=of_span,
        rewards=tuple(reward for reward in rewards if reward.call_id is None),
        siblings=tuple(Sibling(id=member.id, reward=final[member.id], status=member.status) for member in members),
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
        groups.setdefault(rollout.group_id, []).append(rewards[rollout.id])
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


async def _named(records: Records, rollout_id: str) -> Rollout:
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


async def _teaching(run: Opened, rollout: Rollout, attempts: Sequence[Attempt], shown: Attempt | None) -> Teaching:
    """What the shown attempt taught."""
    teaching = await teaching_of(run, rollout)
    accepted = next((attempt for attempt in attempts if attempt.id == rollout.accepted_attempt_id), None)
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
