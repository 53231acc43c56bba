"""How an advantage came about: the numbers reproduce it, and the sentence has the same numbers."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.advantage import EPS
from lightningrl.algorithms.lessons import accounts_of
from lightningrl.config import AlgorithmConfig
from lightningrl.look.credit import CallCredit, credits_of, words_of
from lightningrl.look.step import PolicyStep, StepTaught
from lightningrl.types import Branch, Reward, RewardSource, Trajectory, Transition
from tests.algorithms.rollouts import call, rollout

GIVEN: tuple[tuple[str, RewardSource], ...] = (("tool_ok", "air"), ("style", "agent"))
RULES = {
    "grpo": AlgorithmConfig(),
    "rloo": AlgorithmConfig(advantage="rloo"),
    "dr_grpo": AlgorithmConfig(advantage="dr_grpo"),
    "reinforce++": AlgorithmConfig(advantage="reinforce++"),
    "reinforce++-baseline": AlgorithmConfig(advantage="reinforce++-baseline"),
    "opo": AlgorithmConfig(advantage="opo"),
    "gae_calls": AlgorithmConfig(credit="gae_calls", advantage="reinforce++"),
    "gae_calls alone": AlgorithmConfig(credit="gae_calls", advantage="dr_grpo"),
    "gigpo": AlgorithmConfig(credit="gigpo"),
    "tree_loo": AlgorithmConfig(credit="tree_loo", advantage="dr_grpo"),
    "air": AlgorithmConfig(credit="air", credit_options={"discount": 0.5}),
    "discounted": AlgorithmConfig(credit="discounted", credit_options={"discount": 0.9}, truncation_penalty=0.25),
    "roles": AlgorithmConfig(credit="air", group_by="role"),
    "roles rloo": AlgorithmConfig(advantage="rloo", group_by="role"),
    "fork": AlgorithmConfig(credit="fork", advantage="dr_grpo", truncation_penalty=0.25),
    "fork, grpo": AlgorithmConfig(credit="fork", credit_options={"shrinkage": 0.0}),
    "fork, roles": AlgorithmConfig(credit="fork", advantage="reinforce++", group_by="role"),
}


def batch(*, seed: int = 0, groups: int = 3, members: int = 4, equal: bool = False) -> list[Trajectory]:
    """Groups of rollouts with one to four calls of two roles, rewards of calls, and a critic's values."""
    draw = np.random.default_rng(seed)

    def transition(name: str, c: int) -> Transition:
        return call(
            f"{name}/{c}",
            prompt=range(1 + c),
            tokens=int(draw.integers(1, 6)),
            reward=None if equal else [None, 0.25, -0.5][int(draw.integers(3))],
            value=float(draw.random()),
            parent=f"{name}/{c - 1}" if c else None,
            agent=["writer", "checker"][c % 2],
            truncated=bool(draw.random() < 0.2),
        )

    return [
        Trajectory(
            rollout_id=f"{g}-{m}",
            group_id=str(g),
            task_id=str(g),
            transitions=tuple(transition(f"{g}-{m}", c) for c in range(int(draw.integers(1, 5)))),
            reward=1.0 if equal else float(draw.choice([0.0, 0.5, 1.0])),
        )
        for g in range(groups)
        for m in range(members)
    ]


def branched(seed: int) -> list[Trajectory]:
    """The same, with three branches of one trunk in each group: two at one call, and one at any call."""
    draw = np.random.default_rng(seed)
    found = batch(seed=seed)
    for trunk in found[::4]:
        calls = trunk.transitions
        first, second = int(draw.integers(len(calls))), int(draw.integers(len(calls)))
        for name, place in (("b", first), ("c", first), ("d", second)):
            own = [replace(call, call_id=f"{call.call_id}/{name}", parent_call_id=None) for call in calls]
            played = [
                replace(new, replays=old.call_id, left_out="replayed") for new, old in zip(own, calls, strict=True)
            ]
            branch = Branch(attempt_id=trunk.rollout_id, call_id=calls[place].call_id)
            made = (*played[:place], *own[place:])
            parents = [None, *(call.call_id for call in made)]
            made = tuple(replace(call, parent_call_id=parent) for call, parent in zip(made, parents, strict=False))
            reward = float(draw.random())
            found.append(
                replace(trunk, rollout_id=f"{trunk.rollout_id}-{name}", transitions=made, reward=reward, branch=branch)
            )
    return found


def batch_for(rule: str, seed: int = 0) -> list[Trajectory]:
    return branched(seed) if RULES[rule].credit == "fork" else batch(seed=seed)


def rewards_of(trajectories: Sequence[Trajectory]) -> list[Reward]:
    """Half of each call's reward by a rule, and half by the agent."""
    return [
        Reward(attempt_id=t.rollout_id, value=one.reward / 2, name=name, source=source, call_id=one.call_id)
        for t in trajectories
        for one in t.transitions
        if one.reward is not None
        for name, source in GIVEN
    ]


def explained(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> dict[str, tuple[CallCredit, float]]:
    """Call id → its credit, and the advantage that training uses."""
    lessons, _ = lessons_of(trajectories, algorithm)
    by_rollout = {
        t.rollout_id: {x.transition.call_id: x for x in lessons if x.rollout_id == t.rollout_id} for t in trajectories
    }
    policy = PolicyStep(
        algorithm=algorithm,
        own=frozenset(lesson.transition.call_id for lesson in lessons),
        trajectories={t.rollout_id: t for t in trajectories},
        accounts=accounts_of(trajectories, algorithm),
        taught=None,
    )
    step = StepTaught(lessons=by_rollout, policies={"policy": policy})
    rewards = rewards_of(trajectories)
    air = [reward for reward in rewards if reward.source == "air"]
    recorded = [reward for reward in rewards if reward.source != "air"]
    return {
        call_id: (credit, float(by_rollout[t.rollout_id][call_id].advantages[0]))
        for t in trajectories
        for call_id, credit in credits_of(
            step, t.rollout_id, lessons=by_rollout[t.rollout_id], recorded=recorded, air=air
        ).items()
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_value_baseline_and_scale_reproduce_the_advantage(rule: str, seed: int) -> None:
    trajectories = batch_for(rule, seed)
    found = explained(trajectories, RULES[rule])
    assert len(found) == sum(call.replays is None for t in trajectories for call in t.transitions)
    for credit, advantage in found.values():
        assert credit.baseline is not None and credit.scale is not None
        assert (credit.value - credit.baseline) / credit.scale == pytest.approx(advantage, abs=1e-6)
        assert sum(term.value for term in credit.terms) == pytest.approx(credit.value, abs=1e-9)
        assert sum(term.value for term in credit.baselines) == pytest.approx(credit.baseline, abs=1e-9)


NUMBER = re.compile(r"[+-]?\s?(?:\d+\.?\d*(?:e[+-]?\d+)?)(?= \()")


@pytest.mark.parametrize("rule", RULES)
def test_the_arithmetic_of_the_sentence_is_right(rule: str) -> None:
    for credit, advantage in explained(batch_for(rule), RULES[rule]).values():
        words = credit.words.replace("−", "-")
        if credit.scale is None or "nothing" in words or "as all" in words:
            continue
        formula, _, rest = words.partition(" = ")
        difference = sum(float(number.replace(" ", "")) for number in NUMBER.findall(formula))
        told = float(re.findall(r"(?:advantage )?([+-]?\d[\d.e-]*\d|[+-]?\d)", rest)[0])
        assert difference == pytest.approx(told, abs=2e-3, rel=2e-3), words
        shown = float(re.findall(r"[+-]?\d[\d.]*(?:e-?\d+)?", rest.rstrip("."))[-1])
        assert shown == pytest.approx(advantage, rel=1e-3, abs=1e-6), words


def test_a_sentence_names_rewards_siblings_and_spread() -> None:
    algorithm = AlgorithmConfig(credit="air")
    good, bad = rollout("a", 1.0, call("a/0", reward=0.1)), rollout("b", 0.0, call("b/0"))
    lessons, _ = lessons_of([good, bad], algorithm)
    policy = PolicyStep(
        algorithm=algorithm,
        own=frozenset(("a/0", "b/0")),
        trajectories={"a": good, "b": bad},
        accounts=accounts_of([good, bad], algorithm),
        taught=None,
    )
    step = StepTaught(lessons={"a": {"a/0": lessons[0]}}, policies={"policy": policy})
    air = [Reward(attempt_id="a.1", value=0.1, name="tool_ok", source="air", call_id="a/0")]
    credit = credits_of(step, "a", lessons=step.lessons["a"], recorded=(), air=air)["a/0"]
    assert credit.words == (
        "1 (final) + 0.1 (tool_ok) − 0.55 (mean of the task's 2 rollouts) = +0.55; "
        "divided by 0.7778 (their spread in the group), that is an advantage of +0.7071."
    )
    assert credit.air[0].name == "tool_ok" and credit.scale == pytest.approx(0.55 * 2**0.5 + EPS)


def test_the_sentence_of_gigpo_compares_final_rewards_and_what_followed_apart() -> None:
    algorithm = AlgorithmConfig(credit="gigpo", credit_options={"discount": 0.5}, advantage="dr_grpo")
    trajectories = [rollout("a", 1.0, call("a/0"), call("a/1", prompt=[9])), rollout("b", 0.0, call("b/0"))]
    assert explained(trajectories, algorithm)["a/0"][0].words == (
        "1 (final) + 0.5 (what followed from here) − 0.5 (mean final reward of the task's 2 rollouts) "
        "− 0.25 (mean of what followed from this state) = advantage +0.75."
    )


def test_the_sentence_of_fork_names_the_siblings() -> None:
    trunk = rollout("a", 1.0, call("a/0"), call("a/1", prompt=[1]), call("a/2", prompt=[2]))
    other = rollout("b", 0.25, call("b/0"))
    group = [trunk, other]
    for name, reward in (("x", 0.0), ("y", 0.5)):
        calls = [call(f"{name}/{c}", prompt=[c] if c else [0, 1, 2]) for c in range(3)]
        calls[0] = replace(calls[0], replays="a/0", left_out="replayed")
        branch = Branch(attempt_id="a.1", call_id="a/1")
        group.append(replace(rollout(name, reward, *calls), branch=branch))
    algorithm = AlgorithmConfig(credit="fork", credit_options={"shrinkage": 0.0}, advantage="dr_grpo")
    words = {name: credit.words for name, (credit, _) in explained(group, algorithm).items()}
    siblings = "− 0.25 (mean of 2 siblings at {}) = advantage +0.75."
    assert words["a/0"] == (
        "0.5 (mean of what followed in 3 rollouts) − 0.25 (mean of the other rollout of the task) = advantage +0.25."
    )
    assert words["a/1"] == f"1 (final) {siblings.format('this call')}"
    assert words["a/2"] == f"1 (final) {siblings.format('call 2')}"
    assert words["x/1"] == "0 (final) − 0.75 (mean of 2 siblings at this call) = advantage −0.75."
    shrunk, _ = explained(group, replace_options(algorithm, shrinkage=1.0))["a/1"]
    assert "siblings at this call, shrunk towards the mean before it" in shrunk.words


def replace_options(algorithm: AlgorithmConfig, **options: float) -> AlgorithmConfig:
    return algorithm.model_copy(update={"credit_options": options})


def test_equal_rewards_and_lone_rollouts_have_nothing_to_compare() -> None:
    for credit, advantage in explained(batch(equal=True), AlgorithmConfig()).values():
        assert advantage == 0 == credit.value - (credit.baseline or 0) and "the same" in credit.words
    for credit, advantage in explained(batch(members=1), AlgorithmConfig(advantage="rloo")).values():
        assert advantage == 0 and "no other rollout" in credit.words


def test_every_rule_is_told_in_words() -> None:
    for algorithm in RULES.values():
        assert "says" not in words_of(algorithm) and "compares" not in words_of(algorithm)
    assert "`my:credit`" in words_of(AlgorithmConfig(credit="my:credit"))
