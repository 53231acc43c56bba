"""The screen of an estimate."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightningrl.cli.bill import duration, show
from lightningrl.engines import model_paths
from lightningrl.estimate import estimate
from lightningrl.estimate.cards import CARDS
from lightningrl.estimate.workload import assumed
from lightningrl.models.sizes import sizes_of_all
from lightningrl.recipe import make_config

ROOT = Path(__file__).parents[2]


def screen(gpu: str, **sections: Any) -> str:
    tree = {
        "name": "r",
        "agent": {"entry": "a:b", "reward": "a:c"},
        "tasks": {"source": "a:d"},
        "model": {"path": "Qwen/Qwen3-1.7B", "dtype": "bfloat16", "lora_rank": 16},
        "engine": {"slots": 8, "max_length": 2048},
        **sections,
    }
    config = make_config(tree, [], folder=ROOT, where="test")
    sizes = sizes_of_all(model_paths(config).values(), root=ROOT)
    written = StringIO()
    work = assumed(source="a test")
    show(
        estimate(config, sizes, CARDS[gpu], work=work, per_hour=2.0),
        Console(file=written, width=200),
    )
    return written.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0022, "< 0.1 s"), (4.2, "4.2 s"), (150, "2.5 min"), (12240, "3.4 hours"), (6e6, "69 days")],
)
def test_a_duration_has_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_times_without_the_agents_own_are_lower_bounds() -> None:
    said = screen("h100")
    assert "total, at least" in said and ": at least" in said and "costs at least" in said


def test_only_what_fits_has_hours_and_a_price() -> None:
    assert "The run" in screen("h100")
    large = screen("l4", model={"path": "Qwen/Qwen3-14B", "dtype": "bfloat16"})
    assert "✗ does not fit" in large and "The run" not in large


def test_vllm_on_a_card_that_it_does_not_support_cannot_run() -> None:
    said = screen("t4", engine={"name": "vllm", "urls": ["http://127.0.0.1:8000"], "max_length": 2048})
    assert "✗ cannot run" in said and "The run" not in said


def test_learning_numbers_are_those_of_all_policies() -> None:
    assert " learn in 3 policies" in screen("h100", policies={"a": {}, "b": {}, "c": {}}, routes=[{"policy": "a"}])
    assert "policies" not in screen("h100").partition("Memory")[0]
