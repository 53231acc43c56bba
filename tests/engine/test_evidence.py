"""The statistics of the proof: faults are named, and noise alone accuses no engine."""

import math

import numpy as np
import pytest

from lightningrl.engine.evidence import ALARM, SKEW, Answers, judge, tail, weigh
from lightningrl.engine.probe import is_certain
from lightningrl.engine.proof import repeated_by_chance

P, K = 64, 12


def answers(
    change: float, served: float, *, noise: float, seed: int, elsewhere: float = 0.0
) -> tuple[Answers, Answers]:
    """Before and after an update that changes logprobs by about `change` nats, of which the engine serves the share
    `served`. All three views have `noise` of their own; the engine also changes by `elsewhere`, in another direction.
    """
    rng = np.random.default_rng(seed)
    moved = change * rng.normal(size=(P, K))

    def view(part: float) -> np.ndarray:
        return part * moved + noise * rng.normal(size=(P, K))

    other = elsewhere * rng.normal(size=(P, K))
    before = Answers(engine=view(0), trainer=view(0), second=view(0))
    return before, Answers(engine=view(served) + other, trainer=view(1), second=view(1))


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.01])
@pytest.mark.parametrize(
    ("served", "elsewhere", "verdict"),
    [(1.0, 0.0, "new"), (0.0, 0.0, "old"), (0.5, 0.0, "part"), (0.0, 0.05, "other"), (2.0, 0.0, "other")],
)
def test_a_fault_is_named_as_soon_as_the_change_is_larger_than_the_noise(
    served: float, elsewhere: float, verdict: str, noise: float
) -> None:
    for seed in range(20):
        before, after = answers(0.05, served, noise=noise, seed=seed, elsewhere=elsewhere)
        assert judge(weigh(before, after)) == verdict


@pytest.mark.parametrize("change", [0.0, 1e-5, 1e-3, 0.02, 1.0])
def test_a_healthy_engine_is_never_accused(change: float) -> None:
    verdicts = {judge(weigh(*answers(change, 1.0, noise=0.02, seed=seed))) for seed in range(500)}
    assert verdicts <= {"new", "unclear"}


def test_a_change_below_the_noise_is_too_small_to_tell() -> None:
    """About 1 of 1,000 old weights passes for new ones."""
    verdicts = [judge(weigh(*answers(2e-4, 0.0, noise=0.02, seed=seed))) for seed in range(500)]
    assert verdicts.count("unclear") >= 495


def test_answers_that_stay_bit_for_bit_are_old_weights_at_any_noise() -> None:
    before, after = answers(2e-4, 0.0, noise=0.02, seed=0)
    stale = Answers(engine=before.engine, trainer=after.trainer, second=after.second)
    assert judge(weigh(before, stale)) == "old"


def test_one_of_two_servers_with_old_weights_is_seen() -> None:
    before, after = answers(2e-4, 1.0, noise=0.02, seed=0)
    engine = np.where(np.arange(P)[:, None] % 2 == 0, before.engine, after.engine)
    assert judge(weigh(before, Answers(engine=engine, trainer=after.trainer, second=after.second))) == "old"


def test_an_update_that_changes_nothing_accuses_nobody() -> None:
    before, _ = answers(0.0, 0.0, noise=0.02, seed=0)
    evidence = weigh(before, before)
    assert judge(evidence) == "unclear" and evidence.probes == 0 and math.isnan(evidence.slope)


def test_tokens_that_the_engine_no_longer_reports_are_left_out() -> None:
    before, after = answers(0.05, 1.0, noise=1e-3, seed=0)
    engine = np.where(np.random.default_rng(0).random((P, K)) < 0.2, np.nan, after.engine)
    assert judge(weigh(before, Answers(engine=engine, trainer=after.trainer, second=after.second))) == "new"


def test_probes_of_which_the_engine_reports_nothing_any_more_are_not_taken_for_old_answers() -> None:
    before, after = answers(5.0, 1.0, noise=1e-3, seed=0)
    engine = np.where(np.arange(P)[:, None] % 2 == 0, np.nan, after.engine)
    assert judge(weigh(before, Answers(engine=engine, trainer=after.trainer, second=after.second))) == "new"


def test_few_probes_accuse_nobody_by_votes() -> None:
    before, after = answers(0.05, 0.0, noise=0.02, seed=0)
    few = [Answers(engine=a.engine[:8], trainer=a.trainer[:8], second=a.second[:8]) for a in (before, after)]
    assert judge(weigh(*few)) == "unclear"


def test_chances_are_those_of_the_binomial_distribution() -> None:
    rng = np.random.default_rng(0)
    assert tail(40, 64, chance=0.5) == pytest.approx((rng.binomial(64, 0.5, 200_000) >= 40).mean(), rel=0.05)
    assert tail(56, 64, chance=SKEW) < ALARM < tail(55, 64, chance=SKEW)
    assert tail(0, 10, chance=0.5) == pytest.approx(1.0)


def test_a_certain_token_may_be_one_of_a_few_with_equal_logits() -> None:
    assert all(is_certain(logprob) for logprob in (0.0, -1e-6, -math.log(2), -math.log(4)))
    assert not any(is_certain(logprob) for logprob in (-0.01, -0.5, -7.5, 1.0, math.nan, -math.inf))


def test_noise_seldom_changes_many_answers_and_then_repeats_them_all() -> None:
    assert repeated_by_chance(16, 16) < ALARM < repeated_by_chance(8, 16)
