"""`lightningrl train --estimate`, and the refusal of a recipe that cannot fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import UserError
from lightningrl.estimate import check_memory
from lightningrl.estimate.answering import check_held
from lightningrl.estimate.cards import GIB, Card
from lightningrl.estimate.parts import engine_parts
from lightningrl.models.sizes import sizes_of_all
from lightningrl.recipe import load_config
from tests.command import run_command
from tests.conftest import SmallRecipe

ROOT = Path(__file__).parents[2]
GPU_RECIPES = sorted(ROOT.glob("recipes/*/gpu.toml"))


def estimated(recipe: SmallRecipe, *arguments: str) -> dict[str, Any]:
    done = recipe.cli("train", str(recipe.path), "--estimate", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_are_counted_in_trial_rollouts_and_then_in_an_earlier_run(small_recipe: SmallRecipe) -> None:
    tried = estimated(small_recipe, "--per-hour", "2")
    assert tried["work"]["source"] == "8 trial rollouts" and tried["work"]["is_measured"]
    assert tried["work"]["calls"] == 2
    assert tried["fits"] and tried["price"] == 2 * tried["hours"]
    assert not (small_recipe.folder / "runs").exists()
    small_recipe.train("--run-dir", "runs/small-1")
    again = estimated(small_recipe)
    assert again["work"]["source"] == "16 rollouts of runs/small-1"
    assert again["work"]["prompt_tokens"] == pytest.approx(tried["work"]["prompt_tokens"], rel=0.3)
    assert again["work"]["agent_s"] > 0


def test_the_screen_says_what_fits_and_what_is_assumed(small_recipe: SmallRecipe) -> None:
    options = ("--gpu", "l4", "--per-hour", "0.7", "--calls", "3", "--prompt-tokens", "800")
    done = small_recipe.cli("train", str(small_recipe.path), "--estimate", *options, "model.path=Qwen/Qwen3-0.6B")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for expected in (
        "small on L4 24 GB ✓ fits",
        "Qwen/Qwen3-0.6B · 596 M parameters, all learn",
        "Memory: trainer and engine",
        "of 22.00 GiB",
        "A step of 8 rollouts",
        "3 calls × 1,200 tokens read + 300 sampled",
        "The run 2 steps:",
        "at 0.70 an hour",
        "An estimate, not measured on this card. Tokens: your options.",
    ):
        assert expected in said, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "4090"), "`--gpu` needs `--estimate`"),
        (("--per-hour", "2"), "`--per-hour` needs `--estimate`"),
        (("--calls", "3"), "`--calls` needs `--estimate`"),
        (("--prompt-tokens", "0"), "`--prompt-tokens` needs `--estimate`"),
        (("--completion-tokens", "9", "--dry-run"), "`--completion-tokens` needs `--estimate`"),
        (("--estimate", "--dry-run"), "`--dry-run` does not go with `--estimate`"),
        (("--estimate", "--resume"), "`--resume` does not go with `--estimate`"),
        (("--estimate", "--run-dir", "nowhere", "--calls", "3"), "`nowhere` holds no records of a run"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    small_recipe: SmallRecipe, arguments: tuple[str, ...], message: str
) -> None:
    done = small_recipe.cli("train", str(small_recipe.path), *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "hint:" in done.stderr
    assert not (small_recipe.folder / "runs").exists()


def test_a_card_elsewhere_is_estimated_without_a_word_about_this_machine(small_recipe: SmallRecipe) -> None:
    found = estimated(small_recipe, "--gpu", "4090", "model.path=Qwen/Qwen3-0.6B", "trainer.device=cuda")
    assert found["work"]["source"] == "assumed, as this machine has no engine for a trial"
    here = estimated(small_recipe, "model.path=Qwen/Qwen3-0.6B", "engine.slots=2")
    assert here["work"]["source"] == "assumed, as the weights of `Qwen/Qwen3-0.6B` are not on this machine"


def test_an_unknown_gpu_is_refused(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli("train", str(small_recipe.path), "--estimate", "--gpu", "a200")
    assert done.returncode == 2
    assert "no data of a GPU `a200`" in done.stderr and "did you mean `a100`?" in done.stderr


def test_a_model_that_cannot_fit_is_refused_before_it_is_downloaded(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli("train", str(small_recipe.path), "model.path=Qwen/Qwen3-14B", "--run-dir", "run")
    assert done.returncode == 2
    complaint = " ".join(done.stderr.partition("error: ")[2].split())
    assert complaint.startswith("`small` needs at least") and "hint:" in complaint
    assert "loading the model" not in done.stderr + done.stdout
    assert not (small_recipe.folder / "run").exists()


def test_an_evaluation_needs_no_memory_for_training(small_recipe: SmallRecipe) -> None:
    config = load_config(small_recipe.path, ["model.path=Qwen/Qwen3-0.6B"])
    sizes = sizes_of_all(["Qwen/Qwen3-0.6B"], root=Path())
    least = 4 * sizes["Qwen/Qwen3-0.6B"].parameters + sum(part.bytes for part in engine_parts(config, sizes))
    enough, scarce = (Card(name="x", memory_bytes=n, bandwidth=0, peaks={}, is_gpu=False) for n in (least + GIB, least))
    check_held(config, sizes, enough)
    with pytest.raises(UserError, match="needs at least"):
        check_memory(config, sizes, enough)
    with pytest.raises(UserError, match="to answer, and"):
        check_held(config, sizes, scarce)


def test_a_model_that_cannot_be_evaluated_is_refused_before_it_is_downloaded(small_recipe: SmallRecipe) -> None:
    done = small_recipe.cli("eval", str(small_recipe.path), "model.path=Qwen/Qwen3-14B", "engine.slots=1024")
    assert done.returncode == 2 and "hint:" in done.stderr
    assert "error: `small` needs at least" in done.stderr and "to answer" in done.stderr
    assert "loading the model" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.parent.name)
def test_a_gpu_recipe_says_at_once_that_it_needs_a_gpu(path: Path, command: str, tmp_path: Path) -> None:
    from lightningrl.models.devices import devices

    if devices():
        pytest.skip("this machine has a GPU")
    folder = ("--run-dir", "run") if command == "train" else ()
    done = run_command(command, str(path), *folder, cwd=tmp_path, timeout_s=60)
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "run").exists()
    first, *hints = done.stderr.strip().splitlines()
    assert first.startswith("error: `trainer.device` is `cuda`, but") and hints[0].startswith("hint:")


def test_an_estimate_for_a_service_has_tokens_and_dollars_and_no_memory(small_recipe: SmallRecipe) -> None:
    service = ("backend=tinker", "model.path=Qwen/Qwen3-8B", "model.lora_rank=32")
    prices = ("service.prices={prefill=1, sample=3, train=10}",)
    found = estimated(small_recipe, *service, *prices)
    assert found["work"]["source"] == "assumed, as a trial would cost money"
    costs = {"prefill": 1, "sample": 3, "train": 10}
    assert found["usd"] == pytest.approx(sum(found["tokens"][kind] * price for kind, price in costs.items()) / 1e6)
    assert "memory" not in found and found["usd"] > 0
    said = small_recipe.cli("train", str(small_recipe.path), "--estimate", "--calls", "2", *service)
    assert "set `service.prices`" in said.stdout and "Tokens: your options" in said.stdout
    assert "Memory" not in said.stdout


def test_a_service_is_not_estimated_by_the_hour(small_recipe: SmallRecipe) -> None:
    options = ("--estimate", "--per-hour", "2", "backend=tinker", "model.lora_rank=8")
    done = small_recipe.cli("train", str(small_recipe.path), *options)
    assert done.returncode == 2 and "a service bills tokens" in done.stderr and "hint:" in done.stderr
