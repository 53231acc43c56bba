"""What a service has processed is counted in tokens, and in dollars if its prices are known."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lightningrl.cli.report import at_service
from lightningrl.hosted.cost import Spent

PRICES = {"prefill": 0.1, "sample": 0.4, "train": 2.0}


def test_each_token_is_in_the_metrics_of_one_step() -> None:
    spent = Spent()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(1000):
            pool.submit(spent.add, prefill=3, sample=2)
    first = spent.metrics(PRICES)
    spent.add(train=7)
    second = spent.metrics(PRICES)
    assert first == {
        "service/prefill": 3000,
        "service/sample": 2000,
        "service/train": 0,
        "service/usd": pytest.approx((3000 * 0.1 + 2000 * 0.4) / 1e6),
    }
    assert second["service/prefill"] == 0 and second["service/train"] == 7
    assert second["service/usd"] == pytest.approx(14e-6)


def test_there_are_no_dollars_without_all_prices() -> None:
    spent = Spent()
    spent.add(prefill=1)
    assert "service/usd" not in spent.metrics({"prefill": 0.1, "sample": 0.4})


def test_a_resumed_run_counts_what_it_spent_before() -> None:
    rows = [
        {"kind": "began", "step": 0},
        {"kind": "step", "step": 0, "service/prefill": 10.0, "service/usd": 0.25},
        {"kind": "exam", "step": 1, "mode": "sampled"},
        {"kind": "began", "step": 1},
        {"kind": "step", "step": 1, "service/prefill": 5.0, "service/usd": 0.5},
    ]
    assert at_service(rows, {"service/prefill": 1.0, "service/usd": 0.125}) == {"prefill": 16.0, "usd": 0.875}


def test_a_run_on_this_machine_has_no_costs_of_a_service() -> None:
    assert at_service([{"kind": "step", "step": 0, "cpu/engine_s": 1.0}], {}) == {}
