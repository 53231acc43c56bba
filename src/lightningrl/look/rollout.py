"""Everything about one rollout: task, group, attempts, calls, rewards, and what each call taught.

records → `look_at` → `RolloutView` → terminal, page, or `as_json` (docs/look.md)
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl.chat.detokenizer import Detokenizer
from lightningrl.data.forest import Lesson
from lightningrl.errors import UserError
from lightningrl.look.conversation import Said, conversation
from lightningrl.look.opened import Opened
from lightningrl.look.teaching import Teaching, air_of, teaching_of
from lightningrl.store import Records, Where
from lightningrl.tracing import spans_of, united
from lightningrl.types import FINAL, Attempt, Call, Reward, Rollout, Span

RECENT = 500
"""If no rollout is named, one of this many latest rollouts is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One call of the attempt that is shown."""

    call: Call
    said: Said
    pieces: tuple[str, ...] | None
    """[C] text of each sampled token; None without a tokenizer."""
    tools: tuple[Span, ...]
    """Spans of the tools that its answer called, if they were traced."""
    rewards: tuple[Reward, ...]
    """Rewards of this call alone."""
    lesson: Lesson | None
    """None: the call teaches nothing, or that is not known."""

    @property
    def advantage(self) -> float | None:
        """The same for all of its tokens; None if not known."""
        return float(self.lesson.advantages[0]) if self.lesson is not None and len(self.lesson.advantages) else None

    @property
    def left_out(self) -> str | None:
        """Why the call is not trained; None: it is trained, or that is not known."""
        return None if self.lesson is None else self.lesson.transition.left_out

    def as_json(self) -> dict[str, Any]:
        call, lesson = self.call, self.lesson
        tokens = {
            "ids": call.completion_ids.tolist(),
            "logprobs": [round(float(x), 6) for x in call.logprobs],
            "texts": self.pieces,
        }
        plain = ("id", "index", "parent_call_id", "agent", "policy", "policy_version", "dialect")
        capture = ("capture", "capture_reason", "finish_reason")
        return {
            **{name: getattr(call, name) for name in (*plain, *capture)},
            "seconds": round(call.ended_at - call.started_at, 3),
            "prompt_tokens": len(call.prompt_ids),
            "sampled_tokens": len(call.completion_ids),
            **self.said.as_json(),
            "tools": [
                {name: getattr(tool, name) for name in ("name", "status", "error", "input", "output")}
                for tool in self.tools
            ],
            "rewards": [_reward_json(reward) for reward in self.rewards],
            "advantage": self.advantage,
            "weight": float(lesson.weights.sum()) if lesson is not None else None,
            "left_out": self.left_out,
            "tokens": tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """One rollout, with the calls of its accepted attempt, or else of its latest one."""

    store: str
    rollout: Rollout
    attempts: tuple[Attempt, ...]
    attempt: Attempt | None
    """The attempt whose calls are shown; None: no attempt has begun."""
    calls: tuple[CallView, ...]
    rewards: tuple[Reward, ...]
    """Rewards of that attempt as a whole."""
    group: Mapping[str, float | None]
    """Rollout id → final reward, for the whole group; None: no reward."""
    teaching: Teaching

    @property
    def reward(self) -> float | None:
        return self.group.get(self.rollout.id)

    @property
    def group_mean(self) -> float | None:
        return _mean(self.group.values())

    def as_json(self) -> dict[str, Any]:
        task, teaching = self.rollout.task, self.teaching
        return {
            "store": self.store,
            "rollout": self.rollout.id,
            "status": self.rollout.status,
            "task": asdict(task),
            "step": teaching.step,
            "reward": self.reward,
            "rewards": [_reward_json(reward) for reward in self.rewards],
            "group": {"id": self.rollout.group_id, "mean": self.group_mean, "rewards": self.group},
            "attempts": [_attempt_json(attempt) for attempt in self.attempts],
            "attempt": self.attempt.id if self.attempt else None,
            "calls": [call.as_json() for call in self.calls],
            "teaching": {"learnt": teaching.learnt, "why_not": teaching.why_not},
        }


async def look_at(run: Opened, rollout_id: str | None = None) -> RolloutView:
    """The view of one rollout; without an id, of the one that `pick` chooses. Raises `UserError` for an unknown id."""
    rollout = await _named(run.records, rollout_id) if rollout_id else await pick(run.records)
    attempts = await run.records.attempts([rollout.id])
    accepted = next((attempt for attempt in attempts if attempt.id == rollout.accepted_attempt_id), None)
    shown = accepted or (attempts[-1] if attempts else None)
    ids = [shown.id] if shown else []
    calls, spans = await run.records.calls(ids), await run.records.spans(ids)
    teaching = await teaching_of(run, rollout)
    air = _air(run, teaching, calls, spans)
    members = await run.records.rollouts(group_ids=[rollout.group_id])
    rewards = (*await run.records.rewards(ids), *air)
    return RolloutView(
        store=str(run.file),
        rollout=rollout,
        attempts=tuple(attempts),
        attempt=shown,
        calls=_views(run, calls, spans=spans, rewards=rewards, teaching=teaching),
        rewards=tuple(reward for reward in rewards if reward.call_id is None),
        group=await final_rewards(run.records, members),
        teaching=teaching,
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
        reward, mean = rewards[rollout.id], _mean(groups[rollout.group_id])
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
    raise UserError(f"the run has no rollout `{rollout_id}`", hint=f"{meant}`lightningrl rollouts RUN_DIR` lists them")


def _air(run: Opened, teaching: Teaching, calls: Sequence[Call], spans: Sequence[Span]) -> tuple[Reward, ...]:
    """The rewards of the AIR rules. They are computed for exams, too, although exams teach nothing."""
    if teaching.lessons or run.config is None:
        return teaching.rewards
    try:
        return tuple(air_of(run.config, spans, calls))
    except UserError:  # `teaching.why_not` has the message
        return ()


def _views(
    run: Opened, calls: Sequence[Call], *, spans: Sequence[Span], rewards: Sequence[Reward], teaching: Teaching
) -> tuple[CallView, ...]:
    makers = {policy: run.detokenizer(policy) for policy in {call.policy for call in calls}}
    tools = [span for span in united(spans, spans_of(calls)) if span.kind in ("tool", "retrieval")]
    return tuple(
        CallView(
            call=call,
            said=said,
            pieces=_pieces(call, makers[call.policy]),
            tools=tuple(tool for tool in tools if tool.call_id == call.id),
            rewards=tuple(reward for reward in rewards if reward.call_id == call.id),
            lesson=teaching.lessons.get(call.id),
        )
        for call, said in zip(calls, conversation(calls), strict=True)
    )


def _pieces(call: Call, make: Callable[[], Detokenizer] | None) -> tuple[str, ...] | None:
    """[C] text of each sampled token. A character that spans several tokens belongs to the last of them."""
    if make is None:
        return None
    detokenizer = make()
    pieces = [detokenizer.feed([token_id]) for token_id in call.completion_ids.tolist()]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return tuple(pieces)


def _mean(rewards: Iterable[float | None]) -> float | None:
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / len(known) if known else None


def _reward_json(reward: Reward) -> dict[str, Any]:
    return {"name": reward.name, "value": reward.value, "source": reward.source, "call_id": reward.call_id}


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    """The attempt without its lease and the hash of its token."""
    names = ("id", "number", "status", "worker", "error", "output", "started_at", "ended_at")
    return {name: getattr(attempt, name) for name in names}
