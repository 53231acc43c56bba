"""Confidence intervals and significance tests of means, checked against simulations and known values."""

import tracemalloc

import numpy as np
import pytest

from lightningrl.data.intervals import RESAMPLES, bootstrap_mean, clustered_mean, paired_difference


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        low, high = bootstrap_mean(rng.binomial(1, 0.3, size=120).astype(float))
        held += low <= 0.3 <= high
    assert 0.90 <= held / 200 <= 0.99  # 0.95 ± 3 standard deviations of a binomial share, 0.015


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap_mean(np.full(9, 0.5)) == (0.5, 0.5)


@pytest.mark.parametrize("n", [1, 7, 130, 999])
def test_drawing_in_parts_changes_no_number(n: int) -> None:
    values = np.random.default_rng(5).normal(size=n)
    drawn = np.random.default_rng(3).integers(0, n, size=(RESAMPLES, n))
    tail = (1 - 0.95) / 2
    assert bootstrap_mean(values, seed=3) == tuple(np.quantile(values[drawn].mean(axis=1), [tail, 1 - tail]))


def test_a_large_evaluation_needs_little_memory_and_an_empty_one_has_no_interval() -> None:
    tracemalloc.start()
    bootstrap_mean(np.random.default_rng(5).random(2000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20  # bytes; one array of all draws has 160 MB
    assert np.isnan(bootstrap_mean(np.array([]))).all()


def test_a_difference_is_taken_task_by_task() -> None:
    found = paired_difference(np.array([1.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0]))
    assert (found.mean, found.p, found.tasks) == (pytest.approx(1 / 3), 1.0, 3)
    harder = np.linspace(0, 1, 40)
    found = paired_difference(harder + 0.01, harder)
    assert found.low == pytest.approx(found.high) == pytest.approx(0.01) and found.p < 1e-3, (
        "far smaller than what tells tasks apart"
    )
    assert paired_difference(harder, harder).p == 1.0


def test_a_chance_difference_is_rarely_significant() -> None:
    rng = np.random.default_rng(0)
    p = [paired_difference(rng.random(30), rng.random(30), seed=seed).p for seed in range(200)]
    assert 0.004 < np.mean(np.array(p) < 0.05) < 0.097  # 0.05 ± 3 standard deviations of a binomial share, 0.015


def test_tasks_that_either_has_failed_do_not_count() -> None:
    found = paired_difference(np.array([1.0, np.nan, 1.0]), np.array([0.0, 0.0, np.nan]))
    assert (found.mean, found.tasks) == (1.0, 1)
    assert paired_difference(np.array([np.nan]), np.array([0.0])).tasks == 0


def test_a_clustered_interval_covers_the_mean_as_often_as_it_says() -> None:
    """20 tasks with 8 rollouts each, which depend on their task: 95 of 100 intervals contain the true mean."""
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(20, dtype=np.int32), 8)
    covered = 0
    for _ in range(1000):
        values = rng.normal(size=20)[clusters] + 0.3 * rng.normal(size=160)
        interval = clustered_mean(values, clusters)
        assert interval is not None
        covered += interval[0] < 0 < interval[1]
    assert 930 <= covered <= 970


def test_one_cluster_has_no_interval() -> None:
    assert clustered_mean(np.array([0.0, 1.0]), np.zeros(2, np.int32)) is None
    assert clustered_mean(np.array([]), np.array([], np.int32)) is None
    interval = clustered_mean(np.array([1.0, 1, 0, 0]), np.array([0, 0, 1, 1], np.int32))
    assert interval == pytest.approx((-5.853, 6.853))
