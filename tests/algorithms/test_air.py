"""AIR: rules, caps, and the proof that potential-based rewards keep the best policy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lightningrl.algorithms.air import air_rewards, shaped
from lightningrl.algorithms.credit import returns_to_go
from lightningrl.causal import consequences, distances
from lightningrl.config import AirConfig
from lightningrl.errors import GraderError, UserError
from lightningrl.types import Doubles, Span, Trajectory, Transition

OK = Span(
    id="s",
    attempt_id="a",
    call_id="c1",
    kind="tool",
    name="search",
    input='{"q": 1}',
    output="[1]",
    started_at=1.0,
    ended_at=2.0,
)
FAILED = replace(OK, status="error", error="no such table", call_id="c2")
RAISED = replace(FAILED, attributes={"exception.type": "ValueError"})
MALFORMED = replace(FAILED, attributes={"lightningrl.malformed": True})
EMPTY = replace(OK, output=" [] ")
LLM = Span(
    id="l",
    attempt_id="a",
    call_id="c1",
    kind="llm",
    name="m",
    ended_at=5.0,
    attributes={"gen_ai.usage.output_tokens": 30},
)
FOUND_NONE = replace(OK, kind="retrieval", output="text", attributes={"lightningrl.documents": 0})
GUARD = Span(
    id="g", attempt_id="a", call_id="c1", kind="guardrail", name="toxic", attributes={"lightningrl.triggered": True}
)
EVERY = {
    "ok": OK,
    "failed": FAILED,
    "raised": RAISED,
    "malformed": MALFORMED,
    "empty": EMPTY,
    "llm": LLM,
    "found_none": FOUND_NONE,
    "guard": GUARD,
    "calm": replace(GUARD, attributes={}),
}


@pytest.mark.parametrize(
    ("rule", "holds"),
    [
        (AirConfig(rule="tool_ok"), "ok empty"),
        (AirConfig(rule="tool_failed"), "failed raised malformed"),
        (AirConfig(rule="tool_raised"), "raised"),
        (AirConfig(rule="malformed_arguments"), "malformed"),
        (AirConfig(rule="slow", over=0.5), "ok failed raised malformed empty llm found_none"),
        (AirConfig(rule="slow", over=2.0), "llm"),
        (AirConfig(rule="slow", over=0.5, tool="other"), ""),
        (AirConfig(rule="costly", over=29), "llm"),
        (AirConfig(rule="costly", over=30), ""),
        (AirConfig(rule="empty_retrieval"), "found_none"),
        (AirConfig(rule="empty_retrieval", tool="sea*"), "empty found_none"),
        (AirConfig(rule="guardrail"), "guard"),
    ],
    ids=lambda value: f"{value.rule}-{value.over:g}-{value.tool}" if isinstance(value, AirConfig) else None,
)
def test_a_rule_rewards_the_spans_it_is_about(rule: AirConfig, holds: str) -> None:
    assert [name for name, span in EVERY.items() if air_rewards([span], [rule], root=None)] == holds.split()


def test_a_reward_is_for_the_call_that_caused_the_span_and_named_after_its_rule() -> None:
    rules = [AirConfig(rule="tool_failed", value=-0.5), AirConfig(rule="tool_ok", value=0.25)]
    made = air_rewards([OK, FAILED, replace(OK, attempt_id="b", call_id=None)], rules, root=None)
    found = [(r.attempt_id, r.call_id, r.name, r.value, r.source) for r in made]
    assert found == [
        ("a", "c2", "tool_failed", -0.5, "air"),
        ("a", "c1", "tool_ok", 0.25, "air"),
        ("b", None, "tool_ok", 0.25, "air"),
    ]


def test_a_call_repeats_another_if_it_means_the_same_in_the_same_attempt() -> None:
    again = replace(OK, input='{ "q":1 }', call_id="c2", started_at=3.0)
    other, elsewhere = replace(OK, input='{"q": 2}', started_at=4.0), replace(OK, attempt_id="b")
    made = air_rewards([again, OK, other, elsewhere], [AirConfig(rule="repeated_call", value=-1.0)], root=None)
    assert [(r.attempt_id, r.call_id) for r in made] == [("a", "c2")]


def test_it_does_not_pay_to_go_on_beyond_the_cap() -> None:
    spans = [replace(OK, call_id=f"c{n}", started_at=float(n)) for n in range(100)] + [replace(OK, attempt_id="b")]
    made = air_rewards(
        spans,
        [AirConfig(rule="tool_ok", value=0.2, cap=0.5), AirConfig(rule="slow", value=-0.3, over=0, cap=0.3)],
        root=None,
    )
    by_rule: dict[tuple[str, str], list[float]] = {}
    for reward in made:
        by_rule.setdefault((reward.attempt_id, reward.name), []).append(reward.value)
    assert by_rule["a", "tool_ok"] == pytest.approx([0.2, 0.2, 0.1]) and by_rule["b", "tool_ok"] == [0.2]
    assert sum(by_rule["a", "slow"]) == pytest.approx(-0.3) and len(by_rule["a", "slow"]) < 100


def test_a_recipe_has_rules_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_air_rules.py").write_text(
        "def rows(span):\n    return None if span.kind != 'tool' else span.output.count('1')\n"
        "def nan(span):\n    return float('nan')\n"
        "def huge(span):\n    return 10**400\n"
        "def raises(span):\n    return span.output['rows']\n"
        "def text(span):\n    return 'good'\n"
    )
    [reward] = air_rewards([OK, LLM], [AirConfig(rule="my_air_rules:rows", value=0.5)], root=tmp_path)
    assert (reward.value, reward.name, reward.call_id) == (0.5, "my_air_rules:rows", "c1")
    for broken in ("nan", "huge", "raises", "text"):
        with pytest.raises(GraderError, match=f"my_air_rules:{broken}.*span `search`"):
            air_rewards([OK], [AirConfig(rule=f"my_air_rules:{broken}")], root=tmp_path)


def test_a_reward_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "large_air_rules.py").write_text("def large(span):\n    return 1e300\n")
    with pytest.raises(GraderError, match=r"`large_air_rules:large`.*is not finite"):
        air_rewards([OK], [AirConfig(rule="large_air_rules:large", value=1e300)], root=tmp_path)


def test_an_unknown_rule_lists_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"unknown air `tool_okay`(.|\n)*`tool_ok`"):
        air_rewards([], [AirConfig(rule="tool_okay")], root=None)


def trajectory(*calls: tuple[str, float, float, float], reward: float = 0.0) -> Trajectory:
    """A trajectory from (id, reward, started_at, ended_at)."""
    nothing = np.array([], np.int32)
    made = tuple(
        Transition(
            call_id=name,
            parent_call_id=None,
            agent="",
            policy_version=0,
            prompt_ids=nothing,
            completion_ids=nothing,
            logprobs=nothing.astype(np.float32),
            reward=value or None,
            started_at=began,
            ended_at=ended,
        )
        for name, value, began, ended in calls
    )
    return Trajectory(rollout_id="r", group_id="g", task_id="t", transitions=made, reward=reward)


def chain(*rewards: float, reward: float = 0.0) -> tuple[Trajectory, dict[str, float]]:
    """A chain of calls without rewards, and the AIR rewards of each."""
    calls = [(f"c{t}", 0.0, float(2 * t), float(2 * t + 1)) for t in range(len(rewards))]
    return trajectory(*calls, reward=reward), {f"c{t}": r for t, r in enumerate(rewards)}


def given(made: Trajectory) -> Doubles:
    return np.array([call.reward or 0.0 for call in made.transitions])


def test_on_a_chain_shaping_is_the_difference_of_potentials() -> None:
    made, air = chain(1.0, 0.0, -2.0, 5.0)
    assert given(shaped(made, air)).tolist() == pytest.approx([1.0, 0.0, -2.0, 1.0])
    phi = np.array([0.0, 1.0, 1.0, -1.0, 0.0])  # before each call; 0 at the end
    assert given(shaped(made, air, discount=0.5)) == pytest.approx(0.5 * phi[1:] - phi[:-1])


@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_shaping_adds_up_to_nothing_and_moves_a_call_by_what_was_fixed_before_it(discount: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 9))
        began = np.sort(rng.uniform(0, 5, count))
        calls = [(f"c{i}", float(rng.normal()), float(b), float(b + rng.exponential())) for i, b in enumerate(began)]
        before = trajectory(*calls, reward=1.0)
        air = {f"c{i}": float(rng.normal()) for i in range(count)}
        after = shaped(before, air, discount=discount)
        D = distances(consequences(before.transitions))
        moved = returns_to_go(after, discount=discount) - returns_to_go(before, discount=discount)
        phi = [sum(air[f"c{d}"] for d in range(count) if D[d, c] > 0) for c in range(count)]
        assert moved == pytest.approx(-np.array(phi), abs=1e-12)
        F = given(after) - given(before)
        ordered = chain(*[air[f"c{i}"] for i in range(count)])
        G = discount ** np.arange(count)
        assert G @ given(shaped(*ordered, discount=discount)) == pytest.approx(0.0, abs=1e-12)
        assert after.reward == 1.0 and len(F) == count


History = tuple[str, ...]
Policy = Mapping[History, str]
STATES: tuple[History, ...] = ((), ("ok",), ("failed",))
"""States with a choice: use a tool (works half of the time), or answer. After two tools, only answering is left."""
FINAL = {0: 0.9, 1: 1.0, 2: 0.7}
"""One look is worth it, a second only costs."""
TOOL = {"ok": 1.0, "failed": -0.2}
"""What AIR says of it: that tools are good by themselves."""


def attempts(policy: Policy) -> Iterator[tuple[float, Trajectory, dict[str, float]]]:
    """All possible attempts with their probabilities."""
    todo: list[tuple[float, History]] = [(1.0, ())]
    while todo:
        chance, history = todo.pop()
        if policy.get(history, "answer") == "tool":
            todo += [(chance / 2, (*history, outcome)) for outcome in TOOL]
        else:
            yield chance, *chain(*[TOOL[outcome] for outcome in history], 0.0, reward=FINAL[len(history)])


def worth(policy: Policy, make: Callable[[Trajectory, Mapping[str, float]], Trajectory], discount: float) -> float:
    return sum(chance * returns_to_go(make(made, air), discount=discount)[0] for chance, made, air in attempts(policy))


@pytest.mark.parametrize("discount", [1.0, 0.95])
def test_with_a_potential_the_best_policy_stays_the_best_where_plain_rewards_would_have_it_farm(
    discount: float,
) -> None:
    policies = [dict(zip(STATES, choice, strict=True)) for choice in product(("tool", "answer"), repeat=len(STATES))]

    def additive(made: Trajectory, air: Mapping[str, float]) -> Trajectory:
        return replace(made, transitions=tuple(replace(call, reward=air[call.call_id]) for call in made.transitions))

    true = np.array([worth(policy, lambda made, _: made, discount) for policy in policies])
    farmed = np.array([worth(policy, additive, discount) for policy in policies])
    kept = np.array(
        [worth(policy, lambda made, air: shaped(made, air, discount=discount), discount) for policy in policies]
    )
    assert kept == pytest.approx(true, abs=1e-12)
    assert np.argmax(kept) == np.argmax(true) and policies[int(np.argmax(true))][("ok",)] == "answer"
    assert policies[int(np.argmax(farmed))] == dict.fromkeys(STATES, "tool")
