"""What a recipe takes at a service: tokens by kind, and dollars at its prices."""

from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import Config
from lightningrl.estimate import estimate_hosted
from lightningrl.estimate.workload import assumed
from lightningrl.recipe import make_config

PRICES = {"prefill": 1.0, "sample": 3.0, "train": 10.0}
WORK = assumed(calls=2, prompt_tokens=100, completion_tokens=50, source="a test")
"""The second call reads 100 + 50 + 100 tokens: 175 on average. The row of a rollout has 300."""


def recipe(prices: dict[str, float] = PRICES, **sections: Any) -> Config:
    tree = {
        "name": "r",
        "backend": "tinker",
        "agent": {"entry": "a:b", "reward": "a:c"},
        "tasks": {"source": "a:d", "heldout": 10},
        "model": {"path": "Qwen/Qwen3-8B", "lora_rank": 32},
        "service": {"prices": prices},
        "loop": {"steps": 3, "tasks_per_step": 4, "group_size": 2, "eval_every": 0},
        **sections,
    }
    tree["trainer"] = {"measured": 0.0, **sections.get("trainer", {})}
    return make_config(tree, [], folder=Path(), where="test")


def test_prompts_answers_and_rows_are_counted_for_steps_and_exams() -> None:
    found = estimate_hosted(recipe(loss={"name": "ppo_clip"}), work=WORK)
    assert found.step_tokens == {"prefill": 8 * 2 * 175, "sample": 8 * 2 * 50, "train": 8 * 300}
    assert found.exam_tokens == {"prefill": 40 * 2 * 175, "sample": 40 * 2 * 50, "train": 0}
    assert found.tokens == {"prefill": 64 * 350, "sample": 64 * 100, "train": 3 * 8 * 300}
    assert found.usd == pytest.approx((64 * 350 * 1 + 64 * 100 * 3 + 7200 * 10) / 1e6)
    assert found.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("sections", "times"),
    [
        ({"loss": {"name": "ppo_clip"}}, 1),
        ({"loss": {"name": "ppo_clip", "ratio": "call"}}, 2),
        ({"loss": {"name": "ppo_clip", "kl_coef": 0.1}}, 3),
        ({"loss": {"name": "ppo_clip", "proximal": True}}, 2),
        ({"loss": {"name": "ppo_clip"}, "trainer": {"measured": 0.25}}, 1.25),
    ],
)
def test_what_is_sent_again_is_counted_again(sections: dict[str, Any], times: float) -> None:
    assert estimate_hosted(recipe(**sections), work=WORK).step_tokens["train"] == pytest.approx(8 * 300 * times)


def test_policies_share_the_calls_of_a_batch() -> None:
    two = recipe(
        loss={"name": "ppo_clip"},
        policies={"writer": {}, "checker": {"loss": {"kl_coef": 0.1}}},
        routes=[{"caller": "checker", "policy": "checker"}, {"policy": "writer"}],
    )
    assert estimate_hosted(two, work=WORK).step_tokens["train"] == pytest.approx(8 * 300 * (1 + 3) / 2)


def test_there_is_no_cost_if_a_price_is_missing() -> None:
    found = estimate_hosted(recipe({"prefill": 1.0, "sample": 3.0}), work=WORK)
    assert found.usd is None and found.step_usd is None and found.tokens["train"] > 0
