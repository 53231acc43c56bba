import numpy as np

from lightningrl.data.intervals import bootstrap_mean


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        low, high = bootstrap_mean(rng.binomial(1, 0.3, size=120).astype(float))
        held += low <= 0.3 <= high
    assert 0.90 <= held / 200 <= 0.99  # 0.95 ± 3 standard deviations of a binomial share, 0.015


def test_equal_values_leave_no_doubt() -> None:
    assert bootstrap_mean(np.full(9, 0.5)) == (0.5, 0.5)
