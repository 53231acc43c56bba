"""What a rollout taught. Advantages are not stored: they are recomputed with the functions that training uses.

Advantages compare rollouts of the whole batch, so all records of the step are read (`look.step`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightningrl.data.forest import Lesson
from lightningrl.look.credit import CallCredit, credits_of, words_of
from lightningrl.look.opened import Opened
from lightningrl.look.step import TRAINED, StepTaught
from lightningrl.types import Floats, Reward, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a policy that answered calls of the rollout turns rewards into advantages."""

    policy: str
    credit: str
    advantage: str
    group_by: str
    """`task` or `role`."""
    words: str
    """The same as sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """What the calls of one rollout taught."""

    step: int | None
    """Optimizer step, from 1; None: not a training rollout, or one without readable settings."""
    learnt: bool
    """Whether the weights of that step are published. If not, the rollout has yet to teach its `lessons`."""
    why_not: str | None
    """Why the rollout teaches nothing, or why that is not known; None if there are lessons."""
    lessons: Mapping[str, Lesson] = field(default_factory=dict[str, Lesson])
    """Call id → lesson for the policy that answered the call."""
    credits: Mapping[str, CallCredit] = field(default_factory=dict[str, CallCredit])
    """Call id → how its advantage came about."""
    rules: tuple[Rule, ...] = ()
    """One for each policy that learns from calls of the rollout."""
    rewards: tuple[Reward, ...] = ()
    """Rewards by the recipe's AIR rules."""
    entropies: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Call id → [C] entropy in nats before each sampled token, of the weights that sampled it, where it was measured.
    """
    logprobs_after: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Call id → [C] log-probability of each sampled token after the step, where it was measured."""
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Policy → why what was measured for its calls cannot be read. Without those for which it can."""


async def teaching_of(run: Opened, rollout: Rollout) -> Teaching:
    """What the accepted attempt of a rollout taught."""
    named = TRAINED.match(rollout.id)
    if named is None or run.config is None:
        reason = "exams only measure" if rollout.id.startswith("exam-") else "it is not a training rollout"
        if named is not None:
            reason = f"unknown, because {run.no_config}"
        return Teaching(step=None, learnt=False, why_not=reason)
    number = int(named["step"])
    step, learnt = await run.step(run.config, number)
    rewards = tuple(step.air.get(rollout.accepted_attempt_id or "", ()))
    lessons = step.lessons.get(rollout.id, {})
    if not lessons:
        why_not = _why_nothing(step, rollout)
        return Teaching(step=number + 1, learnt=learnt, why_not=why_not, rewards=rewards)
    recorded = await run.records.rewards([rollout.accepted_attempt_id] if rollout.accepted_attempt_id else [])
    taught = [policy.taught for policy in step.policies.values() if policy.taught is not None]
    return Teaching(
        step=number + 1,
        learnt=learnt,
        why_not=None,
        lessons=lessons,
        credits=credits_of(step, rollout.id, lessons=lessons, recorded=recorded, air=rewards),
        rules=_rules(step, lessons),
        rewards=rewards,
        entropies={call: one.entropies[call] for one in taught for call in lessons if call in one.entropies},
        logprobs_after={
            call: one.logprobs_after[call] for one in taught for call in lessons if call in one.logprobs_after
        },
        unreadable={name: policy.unreadable for name, policy in step.policies.items() if policy.unreadable},
    )


def _why_nothing(step: StepTaught, rollout: Rollout) -> str:
    if rollout.accepted_attempt_id is None:
        return "no attempt was accepted: failed rollouts are left out of their group"
    if step.unknown is not None:
        return step.unknown
    return "it made no call, or dynamic sampling replaced its group, as all rewards in it were equal"


def _rules(step: StepTaught, lessons: Mapping[str, Lesson]) -> tuple[Rule, ...]:
    """For the policies whose calls have lessons."""
    return tuple(
        Rule(
            policy=name,
            credit=policy.algorithm.credit,
            advantage=policy.algorithm.advantage,
            group_by=policy.algorithm.group_by,
            words=words_of(policy.algorithm),
        )
        for name, policy in step.policies.items()
        if policy.own & lessons.keys()
    )
