"""How did the advantage of a call come about? In numbers, and in one sentence with the same numbers.

    advantage = (value - baseline) / scale

`algorithms` computes the three numbers; here the value is taken apart into rewards, and all of them get names.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl.algorithms.lessons import Account
from lightningrl.algorithms.options import discount_of
from lightningrl.causal import consequences, distances
from lightningrl.config import AlgorithmConfig
from lightningrl.data.forest import Lesson
from lightningrl.look.siblings import Standing, standings
from lightningrl.look.step import PolicyStep, StepTaught
from lightningrl.types import Reward, Trajectory

CREDITS: Mapping[str, str] = {
    "uniform": "Each call is worth the final reward.",
    "discounted": "Each call is worth the rewards that follow from it, the nearer ones more.",
    "air": "Each call is worth the final reward, and the rewards of this call and of those that follow from it.",
    "gae_calls": "Each call is worth what followed from it, compared with what the critic expected.",
    "gigpo": "Each call is worth the final reward and what followed from it, compared with calls from the same state.",
    "tree_loo": "Each call is worth what followed from it, compared with other rollouts that came to the same state.",
    "fork": "Each call is worth what followed from it. It is compared with its siblings, that is, other answers to the "
    "same prompt, and where there are none, with the other rollouts of the task.",
}
ADVANTAGES: Mapping[str, str] = {
    "grpo": "The mean of {group} is subtracted, and the difference is divided by their spread.",
    "dr_grpo": "The mean of {group} is subtracted.",
    "rloo": "The mean of the others of {group} is subtracted.",
    "opo": "The mean of {group}, weighted by tokens, is subtracted.",
    "reinforce++": "The mean over all tokens of the step is subtracted, and the difference is divided by their spread.",
    "reinforce++-baseline": "The mean of {group} is subtracted. The differences are centred and scaled over all tokens "
    "of the step.",
}
SCALED: Mapping[str, str] = {
    "grpo": "their spread in the group",
    "reinforce++": "their spread over all tokens of the step",
    "reinforce++-baseline": "their spread over all tokens of the step",
}
AT_A_PLACE = "their spread at this place, and in the group"
"""What `grpo` divides by where the credit compares siblings."""
BASELINES: Mapping[str, str] = {
    "gae_calls": "what the critic expected",
    "gigpo": "mean of what followed from this state",
    "tree_loo": "what the other rollouts got from this state",
    "fork": "mean of its siblings",
}
VALUES: Mapping[str, str] = {
    "gae_calls": "return by `gae_calls`",
    "gigpo": "what followed from here",
}
"""Names of what is not taken apart: of the whole value or, of `gigpo`, of all but the final reward."""
ROUNDING = 1e-9
"""Smaller parts of a value are differences of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of a value or of a baseline."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCredit:
    """How the advantage of one call came about."""

    value: float
    """What the call is worth by the credit function, minus the truncation penalty."""
    terms: tuple[Term, ...]
    """Parts of the value, which sum to it."""
    baseline: float | None
    """What the value is compared with; None: the advantage is the recipe's own, so it is not known."""
    baselines: tuple[Term, ...]
    """Parts of the baseline, which sum to it."""
    scale: float | None
    """The difference is divided by it; None: not known, as above."""
    air: tuple[Term, ...]
    """Rewards of the call by AIR rules."""
    words: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def credits_of(
    step: StepTaught,
    rollout_id: str,
    *,
    lessons: Mapping[str, Lesson],
    recorded: Sequence[Reward],
    air: Sequence[Reward],
) -> dict[str, CallCredit]:
    """Call id → how its advantage came about. `recorded` and `air`: rewards of the rollout's accepted attempt."""
    found: dict[str, CallCredit] = {}
    for policy in step.policies.values():
        trajectory = policy.trajectories.get(rollout_id)
        if trajectory is None:
            continue
        terms = _terms(policy.algorithm, trajectory, recorded=recorded, air=air)
        group = [t for t in policy.trajectories.values() if t.group_id == trajectory.group_id]
        standing = standings(group) if policy.algorithm.credit == "fork" else dict[str, Standing]()
        for place, call in enumerate(trajectory.transitions):
            account = policy.accounts.get(call.call_id)
            if account is not None and call.call_id in lessons and call.call_id in policy.own:
                advantage = float(lessons[call.call_id].advantages[0]) if len(call.completion_ids) else 0.0
                among = standing.get(call.call_id)
                own = tuple(Term(name=r.name, value=r.value) for r in air if r.call_id == call.call_id)
                found[call.call_id] = _credit(
                    policy,
                    account,
                    _named(account, terms[place], among, truncated=call.truncated, algorithm=policy.algorithm),
                    air=own,
                    role=call.agent,
                    group=group,
                    against=_against(policy.algorithm, group, among, number=place + 1),
                    spread=_spread(policy.algorithm, among),
                    advantage=advantage,
                )
    return found


def _against(algorithm: AlgorithmConfig, group: Sequence[Trajectory], among: Standing | None, *, number: int) -> str:
    """The name of the baseline of call `number`, if it is the credit's own."""
    if among is None:
        return BASELINES.get(algorithm.credit, f"baseline of credit `{algorithm.credit}`")
    families = sum(trajectory.branch is None for trajectory in group)
    return among.baseline(number, families=families, shrinkage=float(algorithm.credit_options.get("shrinkage", 1.0)))


def words_of(algorithm: AlgorithmConfig) -> str:
    """How an algorithm turns rewards into advantages."""
    group = "the rollouts of the task"
    if algorithm.group_by == "role":
        group = "the task's calls of the same role"
    credit = CREDITS.get(algorithm.credit, f"Each call is worth what `{algorithm.credit}` says.")
    advantage = ADVANTAGES.get(algorithm.advantage, f"`{algorithm.advantage}` compares the values.").format(group=group)
    if algorithm.credit in BASELINES and algorithm.advantage in ADVANTAGES:
        scaled = algorithm.advantage in SCALED
        advantage = "The difference is divided by its spread." if scaled else "The difference is the advantage."
    return f"{credit} {advantage}"


def _spread(algorithm: AlgorithmConfig, among: Standing | None) -> str | None:
    """What the difference is divided by; None: by nothing."""
    at_a_place = among is not None and among.place is not None and algorithm.advantage == "grpo"
    return AT_A_PLACE if at_a_place else SCALED.get(algorithm.advantage)


def _terms(
    algorithm: AlgorithmConfig, trajectory: Trajectory, *, recorded: Sequence[Reward], air: Sequence[Reward]
) -> list[list[Term]]:
    """[calls] the known parts of each call's value, before the truncation penalty."""
    name, R = algorithm.reward, trajectory.reward
    if algorithm.credit in ("uniform", "gigpo"):
        return [[Term(name=name, value=R)] for _ in trajectory.transitions]
    if algorithm.credit not in ("discounted", "air", "tree_loo", "fork"):
        return [[] for _ in trajectory.transitions]
    discount = discount_of(algorithm)
    D = distances(consequences(trajectory.transitions))
    rewards = [_own_terms(algorithm, call.call_id, call.reward, recorded, air) for call in trajectory.transitions]
    found: list[list[Term]] = []
    for c in range(len(trajectory.transitions)):
        faded = 1.0 if algorithm.credit == "air" else discount ** float(D[c].max())
        terms = [Term(name=name if faded == 1 else f"{_shown(faded)} × {name}", value=faded * R), *rewards[c]]
        for d, distance in enumerate(D[c].tolist()):
            later = sum(term.value for term in rewards[d]) * discount ** max(distance, 0)
            if distance > 0 and later:
                terms.append(Term(name=f"rewards of call {d + 1}", value=later))
        found.append(terms)
    return found


def _own_terms(
    algorithm: AlgorithmConfig, call_id: str, total: float | None, recorded: Sequence[Reward], air: Sequence[Reward]
) -> list[Term]:
    """The rewards of one call, by name. With potential-based shaping, AIR rewards become one difference."""
    potential = algorithm.shaping == "potential"
    named: dict[str, float] = {}
    for reward in itertools.chain(recorded, () if potential else air):
        if reward.call_id == call_id:
            named[reward.name] = named.get(reward.name, 0.0) + reward.value
    rest = (total or 0.0) - sum(named.values())
    shaping = [Term(name="shaping by AIR rewards", value=rest)] if potential and abs(rest) > ROUNDING else []
    return [*(Term(name=name, value=value) for name, value in named.items() if value), *shaping]


def _named(
    account: Account, terms: Sequence[Term], among: Standing | None, *, truncated: bool, algorithm: AlgorithmConfig
) -> list[Term]:
    """The parts of the value. What is not known of it is one part."""
    penalty = algorithm.truncation_penalty if truncated else 0.0
    less = [Term(name="truncation penalty", value=-penalty)] if penalty else []
    if among is not None and among.ways > 1:
        return [Term(name=f"mean of what followed in {among.ways} rollouts", value=account.value + penalty), *less]
    if terms and algorithm.credit not in VALUES:
        return [*terms, *less]
    name = VALUES.get(algorithm.credit, f"value by `{algorithm.credit}`")
    rest = account.value + penalty - sum(term.value for term in terms)
    return [*terms, Term(name=name, value=rest), *less]


def _credit(
    policy: PolicyStep,
    account: Account,
    terms: Sequence[Term],
    *,
    air: tuple[Term, ...],
    role: str,
    group: Sequence[Trajectory],
    against: str,
    spread: str | None,
    advantage: float,
) -> CallCredit:
    known = account.baseline is not None
    parts = _baselines(policy.algorithm, account, role=role, group=group, against=against) if known else []
    if account.silent:
        parts = [Term(name="nothing to compare with", value=account.value)]
    return CallCredit(
        value=account.value,
        terms=tuple(terms),
        baseline=sum(part.value for part in parts) if known else None,
        baselines=tuple(parts),
        scale=account.scale if known else None,
        air=air,
        words=_words(policy.algorithm, account, terms, parts, spread=spread, advantage=advantage),
    )


def _baselines(
    algorithm: AlgorithmConfig, account: Account, *, role: str, group: Sequence[Trajectory], against: str
) -> list[Term]:
    """The parts of the baseline, of which one is known. `group`: the task's rollouts. `against`: the credit's own."""
    baseline = account.baseline or 0.0
    batch = f"all `{role}` calls" if algorithm.group_by == "role" else "all calls"
    shift = Term(name=f"mean over the tokens of {batch} in the step", value=account.shift)
    if account.own:
        overall = []
        if algorithm.credit == "gigpo":
            name = f"mean {algorithm.reward} reward of the task's {len(group)} rollouts"
            overall = [Term(name=name, value=sum(t.reward for t in group) / len(group))]
        rest = Term(name=against, value=baseline - sum(term.value for term in overall))
        return [*overall, rest, *([shift] if account.shift else [])]
    if algorithm.advantage == "reinforce++":
        return [shift]
    all_ = _group(account, algorithm, role=role)
    others = f"mean of the other {account.rollouts - 1} rollouts of the task"
    if algorithm.group_by == "role":
        others = f"mean of the `{role}` calls in the other {account.rollouts - 1} rollouts"
    means = {"rloo": others, "opo": f"mean of {all_}, weighted by tokens"}
    mean = Term(name=means.get(algorithm.advantage, f"mean of {all_}"), value=baseline)
    return [mean, *([shift] if account.shift else [])]


def _group(account: Account, algorithm: AlgorithmConfig, *, role: str) -> str:
    if algorithm.group_by == "role":
        return f"the `{role}` calls in the task's {account.rollouts} rollouts"
    return f"the task's {account.rollouts} rollouts"


def _words(
    algorithm: AlgorithmConfig,
    account: Account,
    terms: Sequence[Term],
    parts: Sequence[Term],
    *,
    spread: str | None,
    advantage: float,
) -> str:
    value = _sum(terms)
    if account.baseline is None:
        return f"{value}; `{algorithm.advantage}` makes it the advantage {_signed(advantage)}."
    if account.silent and account.rollouts < 2 and algorithm.advantage != "reinforce++":
        return f"{value}; the advantage is 0, as there is no other rollout of the task to compare it with."
    if account.silent:
        return f"{value}; the advantage is 0, as all values that it is compared with are the same."
    minus = "".join(f" {_minus(part.value)} ({part.name})" for part in parts)
    difference = account.value - sum(part.value for part in parts)
    if spread is None:
        return f"{value}{minus} = advantage {_signed(difference)}."
    divided = f"divided by {_shown(account.scale)} ({spread})"
    return f"{value}{minus} = {_signed(difference)}; {divided}, that is an advantage of {_signed(advantage)}."


def _sum(terms: Sequence[Term]) -> str:
    """`1 (final) + 0.1 (tool_ok)`"""
    first, *others = terms
    return f"{_shown(first.value)} ({first.name})" + "".join(f" {_plus(term.value)} ({term.name})" for term in others)


def _plus(value: float) -> str:
    return f"+ {_shown(value)}" if value >= 0 else f"− {_shown(-value)}"


def _minus(value: float) -> str:
    return f"− {_shown(value)}" if value >= 0 else f"+ {_shown(-value)}"


def _shown(value: float) -> str:
    return f"{value:.4g}".replace("-", "−") if abs(value) > ROUNDING else "0"


def _signed(value: float) -> str:
    return f"{value:+.4g}".replace("-", "−") if abs(value) > ROUNDING else "0"
