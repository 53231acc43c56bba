"""The model card is readable by the Hugging Face Hub, has the results of the run, and has nothing private."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from lightningrl.cli.card import write_cards
from lightningrl.cli.report import Result
from lightningrl.config import Config
from lightningrl.data.intervals import Difference
from lightningrl.recipe import load_config

RESULT = Result(
    heldout_before=0.251,
    heldout_after=0.748,
    heldout_greedy_before=0.3,
    heldout_greedy_after=0.8,
    learnt="yes",
    heldout_change=Difference(mean=0.497, low=0.402, high=0.591, p=0.0001, tasks=200),
    reason="",
    heldout_tasks=200,
    heldout_failed=0,
    seconds=100.0,
    cpu_s={},
    service={},
    steps=60,
    rollouts=11_520,
    run_dir="runs/x",
)
RECIPE = """
name = "City trips"
[agent]
entry = "agent:run"
reward = "agent:reward"
env = { SECRET = "hunter2" }
[tasks]
source = "agent:tasks"
[model]
path = "Qwen/Qwen3-0.6B"
[engine]
name = "vllm"
urls = ["http://10.0.0.7:8000"]
"""


def card(folder: Path, *overrides: str, name: str = "") -> ModelCard:
    (folder / "recipe.toml").write_text(RECIPE)
    config: Config = load_config(folder / "recipe.toml", list(overrides))
    for own in ("out", *(f"out/{policy}" for policy in config.policies)):
        (folder / own).mkdir(exist_ok=True)
    write_cards(folder / "out", config, RESULT)
    return ModelCard.load(folder / "out" / name / "README.md")


def test_the_card_has_front_matter_and_the_results_of_the_run(tmp_path: Path) -> None:
    found = card(tmp_path, "trainer.learning_rate=3e-5")
    data = found.data.to_dict()
    assert data["base_model"] == "Qwen/Qwen3-0.6B" and data["base_model_relation"] == "finetune"
    assert data["library_name"] == "transformers" and {"lightningrl", "reinforcement-learning", "agent"} <= set(
        data["tags"]
    )
    assert "| sampled, temperature 1 | 0.251 | 0.748 | +0.497 [+0.402, +0.591] |" in found.text
    assert (
        "200 held-out tasks" in found.text
        and "60 steps, 11,520 rollouts" in found.text
        and "learning_rate = 3e-05" in found.text
    )
    for command in (
        "vllm serve . --served-model-name city-trips",
        "ollama create city-trips",
        "hf upload YOUR-NAME/city-trips . .",
    ):
        assert command in found.text


def test_the_card_of_an_adapter_names_its_base(tmp_path: Path) -> None:
    found = card(tmp_path, "model.lora_rank=12")
    data = found.data.to_dict()
    assert data["library_name"] == "peft" and data["base_model_relation"] == "adapter" and "lora" in data["tags"]
    assert "vllm serve Qwen/Qwen3-0.6B --enable-lora --max-lora-rank 16 --lora-modules city-trips=." in found.text
    assert "FROM Qwen/Qwen3-0.6B\\nADAPTER .\\n" in found.text


@pytest.mark.parametrize("overrides", [[], ["model.lora_rank=8"]], ids=["full", "lora"])
def test_nothing_private_is_in_a_card(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "warm" / "model").mkdir(parents=True)
    found = card(tmp_path, "model.path=warm/model", *overrides)
    assert "base_model" not in found.data.to_dict()
    for private in ("hunter2", "10.0.0.7", "warm", str(tmp_path)):
        assert private not in found.content, private


def test_each_of_several_policies_has_a_card_with_its_own_settings(tmp_path: Path) -> None:
    overrides = [
        "policies.solver.trainer.learning_rate=1e-6",
        "policies.critic.trainer.learning_rate=2e-6",
        "routes=[{policy='solver'}]",
    ]
    for policy, rate in (("solver", "1e-06"), ("critic", "2e-06")):
        found = card(tmp_path, *overrides, name=policy)
        assert f"# City trips: {policy}" in found.text and f"learning_rate = {rate}" in found.text
        assert f"hf upload YOUR-NAME/city-trips-{policy} . ." in found.text
