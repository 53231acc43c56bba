"""An unhealthy run raises each warning once, with a figure and a hint; a healthy one raises none."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from lightningrl.config import AlgorithmConfig, LearnerConfig, ModelConfig
from lightningrl.health import QUIET, RECENT, Health, Row, notes_of, trend, warnings_of

HEALTHY = {
    "reward/mean": 0.4,
    "reward/final": 0.4,
    "rollouts/succeeded": 190.0,
    "rollouts/excluded": 2.0,
    "groups/count": 24.0,
    "groups/silent": 6.0,
    "calls/bridged": 200.0,
    "calls/rendered": 190.0,
    "calls/forked": 5.0,
    "calls/truncated": 4.0,
    "tasks/count": 24.0,
    "tasks/heldout": 0.0,
    "tokens/selected": 9000.0,
    "tokens/left_out_stale": 100.0,
    "tokens/left_out_agent": 20000.0,
    "policy/entropy": 0.5,
    "policy/kl_engine": 0.002,
    "policy/logprob_gap": 2e-6,
    "loss/ratio_mean": 1.001,
    "loss/ratio_max": 9.0,
    "loss/clip_fraction": 0.02,
    "loss/importance_capped": 0.001,
    "critic/explained_variance": 0.6,
    "optim/skipped": 0.0,
}


def learner(audit: str = "", *, credit: str = "uniform") -> LearnerConfig:
    return LearnerConfig(model=ModelConfig(path="model"), algorithm=AlgorithmConfig(audit=audit, credit=credit))


def raised(rows: Sequence[Row], *, audit: str = "", credit: str = "uniform") -> list[tuple[int, str]]:
    """(step, warning)"""
    health = Health({"policy": learner(audit, credit=credit)})
    return [(step, text) for step, row in enumerate(rows) for text in health.stepped(row)]


def test_a_healthy_run_has_no_warnings() -> None:
    assert raised([HEALTHY] * 60) == []
    assert warnings_of([HEALTHY] * 60, {"policy": learner()}) == []


@pytest.mark.parametrize(
    ("change", "figure", "hint"),
    [
        ({"groups/silent": 20.0}, "`83%` of the groups", "dynamic_sampling"),
        (
            {"tasks/heldout": 6.0},
            "`25%` of the training tasks are also held-out tasks",
            "use different inputs per split",
        ),
        ({"rollouts/excluded": 48.0, "rollouts/succeeded": 144.0}, "`25%` of the rollouts failed", "agents.log"),
        (
            {"forks/branches": 40.0, "forks/void": 20.0, "rollouts/excluded": 22.0},
            "`50%` of the branches are void",
            "loop.fork_share",
        ),
        ({"calls/truncated": 79.0}, "`20%` of the calls reached their token limit", "engine.max_length"),
        ({"calls/forked": 195.0}, "`33%` of the calls do not continue", "docs/token-exact.md"),
        ({"calls/partly": 195.0}, "`34%` of the calls do not continue", "docs/token-exact.md"),
        ({"tokens/left_out_stale": 3000.0}, "`25%` of the sampled tokens were left out as `stale`", "loss.importance"),
        ({"tokens/left_out_grammar": 9100.0}, "`50%` of the sampled tokens were left out as `grammar`", "tool_choice"),
        ({"loss/ratio_mean": 1.4}, "the mean ratio is `1.4`", "trainer.learning_rate"),
        ({"loss/ratio_max": 2e4}, "up to `2e+04` times likelier", "trainer.minibatches"),
        ({"loss/clip_fraction": 0.45}, "`45%` of the tokens are clipped", "loss.clip_high"),
        ({"loss/importance_capped": 0.3}, "`30%` of the tokens exceed", "loop.max_off_policy_steps"),
        ({"policy/kl_engine": 0.5}, "`0.5` nats a token away", "loss.importance"),
        ({"policy/logprob_gap": 0.02}, "disagree by `0.02` nats", "docs/engines.md"),
        ({"optim/skipped": 0.25}, "`25%` of the updates", "`skipped/`"),
        ({"policy/entropy": 0.01}, "entropy has fallen from `0.5` to `0.01`", "loss.entropy_coef"),
        ({"critic/explained_variance": -0.1}, "the critic explains `-10%`", "loss.value_coef"),
    ],
)
def test_each_warning_is_raised_once_with_a_figure_and_a_hint(change: dict[str, float], figure: str, hint: str) -> None:
    rows = [HEALTHY] * 30 + [HEALTHY | change] * 30
    ((step, _),) = raised(rows)
    assert 30 <= step < 30 + RECENT
    (warning,) = warnings_of(rows, {"policy": learner()})
    assert figure in warning.text and hint in warning.text.partition("; hint: ")[2]


def test_groups_that_are_all_silent_are_reported_at_once() -> None:
    ((step, warning),) = raised([HEALTHY | {"groups/silent": 24.0, "reward/mean": 0.0}] * 2)
    assert step == 0 and "in `100%` of the groups" in warning
    assert raised([HEALTHY | {"groups/silent": 23.0}] * (RECENT - 1)) == [], "of few steps most groups say nothing yet"


def test_void_branches_are_reported_at_once_and_are_no_failures() -> None:
    ((step, warning),) = raised([HEALTHY | {"forks/branches": 40.0, "forks/void": 40.0, "rollouts/excluded": 42.0}])
    assert step == 0 and "`100%` of the branches are void" in warning
    some = HEALTHY | {"forks/branches": 90.0, "forks/void": 30.0, "rollouts/excluded": 32.0}
    assert raised([some] * RECENT) == [], "a third of them is not more than a third"


def test_graded_logs_of_a_program_are_reported_at_once() -> None:
    (warning,) = warnings_of([HEALTHY | {"reward/mean": 0.0, "answers/logs": 1.0}], {"policy": learner()})
    assert "`LIGHTNINGRL_OUTPUT`" in warning.text
    for harmless in ({"reward/mean": 0.01, "answers/logs": 0.9}, {"reward/mean": 0.0, "answers/logs": 0.0}):
        assert not warnings_of([HEALTHY | harmless], {"policy": learner()})


def test_nearly_solved_tasks_are_a_note_and_not_a_warning() -> None:
    rows = [HEALTHY | {"groups/silent": 20.0, "reward/mean": 0.93}] * RECENT
    assert raised(rows) == [] and warnings_of(rows, {"policy": learner()}) == []
    (note,) = notes_of(rows, {"policy": learner()})
    assert note.text.startswith("nearly solved: mean reward on training tasks is `0.93`")
    assert notes_of([HEALTHY] * RECENT, {"policy": learner()}) == []
    assert notes_of([HEALTHY | {"reward/mean": 3.0}] * RECENT, {"policy": learner()}) == [], (
        "a reward that does not end at 1"
    )


@pytest.mark.parametrize("name", ["loss/clip_fraction", "loss/ratio_max", "groups/silent", "policy/kl_engine"])
def test_one_noisy_step_raises_no_warning(name: str) -> None:
    noisy = HEALTHY | {name: {"groups/silent": 24.0, "loss/ratio_max": 300.0}.get(name, 0.4)}
    assert raised([HEALTHY] * 20 + [noisy] + [HEALTHY] * 20) == []


def test_a_warning_is_raised_again_only_after_it_was_gone_for_a_while() -> None:
    skipped = HEALTHY | {"optim/skipped": 1.0}
    flapping = raised([HEALTHY, skipped, HEALTHY, skipped, *[HEALTHY] * QUIET, skipped])
    assert [step for step, _ in flapping] == [1, 4 + QUIET]


def test_each_policy_is_checked_and_named() -> None:
    shared = {name: value for name, value in HEALTHY.items() if name.startswith(("reward/", "calls/"))}
    own = {name: value for name, value in HEALTHY.items() if name not in shared}
    row = shared | {f"{policy}/{name}": value for policy in ("solver", "critic") for name, value in own.items()}
    row |= {
        "critic/loss/clip_fraction": 0.5,
        "calls/truncated": 100.0,
        "solver/rollouts/excluded": 90.0,
        "critic/rollouts/excluded": 90.0,
    }
    said = warnings_of([row] * RECENT, {"solver": learner(), "critic": learner()})
    assert sorted(advice.text.partition(" of the ")[0] for advice in said) == ["`25%`", "`32%`", "`critic`: `50%`"]


def drifting(
    *, steps: int, final: Callable[[float], float], audit: Callable[[float], float], noise: float, seed: int
) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        HEALTHY
        | {
            "reward/final": final(t / steps) + noise * rng.normal(),
            "reward/exact": audit(t / steps) + noise * rng.normal(),
        }
        for t in range(steps)
    ]


def test_a_reward_that_rises_while_the_audit_falls_is_suspicious() -> None:
    rows = drifting(steps=60, final=lambda t: 0.3 + 0.5 * t, audit=lambda t: 0.6 - 0.3 * t, noise=0.05, seed=0)
    ((step, warning),) = raised(rows, audit="exact")
    assert 12 <= step < 50
    assert "possible reward hacking" in warning and "`reward/final` rose" in warning and "`reward/exact`" in warning


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("final", "audit"),
    [
        (lambda t: 0.4, lambda t: 0.4),
        (lambda t: 0.3 + 0.5 * t, lambda t: 0.3 + 0.5 * t),
        (lambda t: 0.3 + 0.5 * t, lambda t: 0.4),
        (lambda t: 0.8 - 0.5 * t, lambda t: 0.8 - 0.5 * t),
        (lambda t: 0.4, lambda t: 0.4 - 0.3 * (t == 0.5)),
    ],
    ids=["noise", "both rise", "the audit stays", "both fall", "one bad step"],
)
def test_other_trends_are_not_suspicious(
    final: Callable[[float], float], audit: Callable[[float], float], seed: int
) -> None:
    assert raised(drifting(steps=200, final=final, audit=audit, noise=0.1, seed=seed), audit="exact") == []


def test_an_audit_reward_that_is_never_given_is_named() -> None:
    ((step, warning),) = raised([HEALTHY] * 10, audit="exact")
    assert step == 0 and "`exact`" in warning and "rewards given: `final`" in warning


def test_air_rules_that_credit_ignores_are_named() -> None:
    rows = [HEALTHY | {"reward/air.tool_ok": 0.2}] * 10
    ((step, warning),) = raised(rows)
    assert step == 0 and "`air.tool_ok`" in warning and 'algorithm.credit = "air"' in warning
    assert raised(rows, credit="air") == []


def test_the_trend_is_a_z_score() -> None:
    """Noise has mean 0 and deviation 1. Ten rising steps are 45 pairs, minus the continuity correction."""
    rng = np.random.default_rng(0)
    z = [trend(rng.normal(size=20)) for _ in range(2000)]
    assert abs(np.mean(z)) < 0.1 and abs(np.std(z) - 1) < 0.1
    assert trend(np.arange(10.0)) == pytest.approx(44 / np.sqrt(125))
    assert trend(-np.arange(10.0)) == -trend(np.arange(10.0))
    assert trend(np.ones(10)) == trend(np.ones(1)) == 0
