"""Estimates of recipes: every gpu.toml on every card, and what follows from the settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import Config
from lightningrl.engines import model_paths
from lightningrl.errors import UserError
from lightningrl.estimate import Estimate, check_memory, estimate
from lightningrl.estimate.cards import CARDS, GIB, Card, card_like
from lightningrl.estimate.fit import changed, least_bytes
from lightningrl.estimate.parts import engine_parts, held_parts, total
from lightningrl.estimate.time import train_flops
from lightningrl.estimate.workload import assumed
from lightningrl.models.sizes import Sizes, sizes_of, sizes_of_all
from lightningrl.recipe import load_config, make_config

ROOT = Path(__file__).parents[2]
GPU_RECIPES = sorted(ROOT.glob("recipes/*/gpu.toml"))
WORK = assumed(source="a test")


def recipe(path: str = "Qwen/Qwen3-1.7B", **sections: Any) -> Config:
    tree = {
        "name": "r",
        "agent": {"entry": "a:b", "reward": "a:c"},
        "tasks": {"source": "a:d"},
        "model": {"path": path, "dtype": "bfloat16", "lora_rank": 16, **sections.pop("model", {})},
        **sections,
    }
    return make_config(tree, [], folder=ROOT, where="test")


def sizes_for(config: Config) -> dict[str, Sizes]:
    return sizes_of_all(model_paths(config).values(), root=config.root)


def made(config: Config, card: Card, **options: Any) -> Estimate:
    return estimate(config, sizes_for(config), card, work=options.pop("work", WORK), **options)


def test_there_are_six_recipes_for_gpus() -> None:
    assert len(GPU_RECIPES) == 6


@pytest.mark.parametrize("gpu", CARDS)
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.parent.name)
def test_every_gpu_recipe_can_be_estimated_without_a_network(path: Path, gpu: str) -> None:
    found = made(load_config(path), CARDS[gpu], per_hour=2.0)
    assert found.unique_tokens < found.step_tokens
    if gpu == "t4":  # where vLLM has no bfloat16
        assert found.hours is None and found.price is None
        return
    assert found.fits, found.advice
    assert found.hours is not None and 0.1 < found.hours < 1000
    assert found.price == 2.0 * found.hours


def test_the_trainer_of_a_lora_recipe_holds_one_base_and_many_adapters() -> None:
    one, three = recipe(), recipe(policies={"a": {}, "b": {}, "c": {}}, routes=[{"policy": "a"}])
    size = sizes_of("Qwen/Qwen3-1.7B", root=ROOT)
    parts = {part.name: part.bytes for part in held_parts(three, sizes_for(three))}
    assert parts["weights"] == 2 * size.parameters
    assert parts["adapters"] == 3 * 4 * 16 * size.adapted
    assert parts["AdamW's moments"] == 2 * parts["adapters"]
    assert parts["gradients"] == parts["adapters"] // 3  # policies learn one after the other
    assert total(held_parts(one, sizes_for(one))) < total(held_parts(three, sizes_for(three)))


def test_the_embedded_engine_shares_weights_and_adds_its_cache() -> None:
    config = recipe(engine={"slots": 8, "max_length": 1024})
    (cache,) = engine_parts(config, sizes_for(config))
    assert cache.bytes == 2 * 8 * 1024 * 28 * 2 * 8 * 128 * 2


def test_a_long_batch_turns_checkpointing_on_and_a_short_one_leaves_it_off() -> None:
    config = recipe(engine={"slots": 4, "max_length": 1024})
    short = assumed(calls=1, prompt_tokens=50, completion_tokens=20, source="a test")
    assert not made(config, CARDS["4090"], work=short).memory.forests.checkpointing
    assert made(config, CARDS["4090"]).memory.forests.checkpointing
    assert not made(config, CARDS["h100"], work=short).memory.forests.checkpointing


def test_auto_fills_a_small_card_with_smaller_forests() -> None:
    config = recipe("Qwen/Qwen3-4B", engine={"slots": 4, "max_length": 1024})
    small, large = made(config, CARDS["t4"]), made(config, CARDS["h100"])
    assert small.memory.forests.tokens < large.memory.forests.tokens
    assert small.fits


def test_what_cannot_fit_is_refused_with_settings_that_fit() -> None:
    config = recipe(model={"dtype": "float32", "lora_rank": 0}, engine={"slots": 64, "max_length": 8192})
    sizes = sizes_for(config)
    with pytest.raises(UserError) as refused:
        check_memory(config, sizes, CARDS["l4"])
    message, hint = refused.value.message, refused.value.hint or ""
    assert "needs at least" in message and "`L4 24 GB` has 22.0 GiB" in message
    overrides = hint.partition("this would fit: `")[2].partition("`")[0].split()
    other = changed(config, dict(override.split("=") for override in overrides))
    check_memory(other, sizes, CARDS["l4"])
    for override in overrides:  # none of them is needless
        fewer = [one for one in overrides if one != override]
        assert least_bytes(changed(config, dict(one.split("=") for one in fewer)), sizes, CARDS["l4"]) > 22 * GIB


def test_a_model_that_no_setting_helps_is_refused_too() -> None:
    config = recipe("Qwen/Qwen3-14B", engine={"slots": 4, "max_length": 1024})
    with pytest.raises(UserError, match=r"(?s)needs at least.*hint: choose a smaller model"):
        check_memory(config, sizes_for(config), CARDS["l4"])


@pytest.mark.parametrize("path", [*ROOT.glob("recipes/*/recipe.toml")], ids=lambda path: path.parent.name)
def test_no_recipe_for_the_cpu_is_refused_on_a_small_machine(path: Path) -> None:
    config = load_config(path)
    laptop = Card(name="a laptop", memory_bytes=4 * GIB, bandwidth=1e10, peaks={"float32": 1e11}, is_gpu=False)
    check_memory(config, sizes_for(config), laptop)


def test_training_takes_six_flops_a_weight_and_token_and_four_with_an_adapter() -> None:
    size = replace(sizes_of("Qwen/Qwen3-0.6B", root=ROOT), computed=10**9)

    def flops(*, rank: int, checkpointing: bool) -> float:
        return train_flops(size, tokens=1, sampled=0, path=0, rank=rank, checkpointing=checkpointing, evaluations=0)

    assert flops(rank=0, checkpointing=False) == 6e9
    assert flops(rank=16, checkpointing=False) == 4e9
    assert flops(rank=16, checkpointing=True) == 6e9


def test_a_faster_card_takes_less_time_and_a_longer_answer_more() -> None:
    config = recipe(engine={"name": "vllm", "urls": ["http://10.0.0.1:8000"]})
    slow, fast = made(config, CARDS["l4"]), made(config, CARDS["h100"])
    assert slow.seconds.total and fast.seconds.total and slow.seconds.total > 3 * fast.seconds.total
    longer = made(config, CARDS["l4"], work=assumed(completion_tokens=900, source="a test"))
    assert longer.seconds.total and longer.seconds.total > 2 * slow.seconds.total


def test_tokens_that_a_group_shares_are_trained_once() -> None:
    config = recipe(engine={"name": "vllm", "urls": ["http://10.0.0.1:8000"]})
    apart = made(config, CARDS["h100"], work=replace(WORK, shared_tokens=0.0))
    found = made(config, CARDS["h100"])
    tasks, group = config.loop.tasks_per_step, config.loop.group_size
    assert apart.unique_tokens - found.unique_tokens == tasks * (group - 1) * WORK.shared_tokens
    assert apart.seconds.training > 1.2 * found.seconds.training


def test_vllm_on_the_same_card_is_told_how_much_it_may_take() -> None:
    here = made(recipe(engine={"name": "vllm", "urls": ["http://127.0.0.1:8000"]}), CARDS["4090"])
    assert here.memory.servers_here == 1 and here.needed_bytes <= CARDS["4090"].memory_bytes
    assert any("--gpu-memory-utilization 0." in hint for hint in here.advice)
    apart = made(recipe(engine={"name": "vllm", "urls": ["http://10.0.0.1:8000"]}), CARDS["4090"])
    assert not apart.memory.servers_here and apart.advice == ()
    assert "vLLM has a card of the same kind" in set(apart.assumptions) - set(here.assumptions)


def test_a_card_without_bfloat16_is_given_float16() -> None:
    found = made(recipe(engine={"slots": 4, "max_length": 1024}), CARDS["t4"])
    assert any("`model.dtype=float16`" in hint for hint in found.advice)


OWNED = {"name": "vllm", "max_length": 4096}


def test_trainer_and_vllm_take_turns_on_one_card_so_that_more_fits() -> None:
    config, given = recipe(engine=OWNED), recipe(engine={**OWNED, "urls": ["http://127.0.0.1:8000"]})
    found, awake = made(config, CARDS["4090"]), made(recipe(engine={**OWNED, "sleep": "off"}), CARDS["4090"])
    trains, serves = found.memory.phases
    assert found.needed_bytes == max(total(trains.parts), total(serves.parts)) <= CARDS["4090"].memory_bytes
    assert "vLLM, asleep" in {part.name for part in trains.parts} and "KV cache" not in {p.name for p in trains.parts}
    assert "activations" not in {part.name for part in serves.parts}
    assert found.memory.forests.tokens > made(given, CARDS["4090"]).memory.forests.tokens
    assert found.memory.host_bytes == 2 * found.parameters
    assert found.seconds.sleeping > 2.0 and awake.seconds.sleeping == 0.0
    assert awake.memory.forests.tokens < found.memory.forests.tokens
    larger = {"path": "Qwen/Qwen3-0.6B", "lora_rank": 0}
    shared, beside = (made(recipe(model=larger, engine=one), CARDS["l4"]) for one in (OWNED, {**OWNED, "sleep": "off"}))
    assert shared.fits and shared.memory.forests.tokens > beside.memory.forests.tokens


def test_a_vllm_on_cards_of_its_own_leaves_the_trainers_alone() -> None:
    config = recipe(engine={**OWNED, "gpus": [1, 2]})
    found = made(config, replace(CARDS["4090"], count=3))
    assert (found.memory.servers, found.memory.servers_here, found.memory.sleeps) == (2, 0, False)
    assert found.memory.host_bytes == 0 and "vLLM has 2 cards of the same kind" in found.assumptions
    one = made(recipe(engine={**OWNED, "gpus": [1]}), replace(CARDS["4090"], count=2))
    assert one.seconds.generation and found.seconds.generation and found.seconds.generation < one.seconds.generation
    with pytest.raises(UserError, match=r"`engine.gpus` names GPU `1`"):
        made(config, CARDS["4090"])


def test_a_second_card_is_proposed_where_one_cannot_hold_both_copies() -> None:
    config = recipe("Qwen/Qwen3-8B", engine=OWNED, trainer={"max_tokens": 32768})
    found = made(config, CARDS["4090"])
    assert not found.fits
    assert "with a second such card for vLLM, this would fit: `engine.gpus=[1] trainer.max_tokens=auto`" in found.advice
    other = changed(config, {"engine.gpus": [1], "trainer.max_tokens": "auto"})
    assert made(other, replace(CARDS["4090"], count=2)).fits


def test_a_recipe_whose_vllm_cannot_fit_is_refused_before_it_is_loaded() -> None:
    config = recipe("Qwen/Qwen3-8B", engine=OWNED)
    with pytest.raises(UserError, match="needs at least"):
        check_memory(config, sizes_for(config), CARDS["4090"])
    check_memory(config, sizes_for(config), CARDS["a100"])
    with pytest.raises(UserError, match=r"weights take 15.3 GiB of the machine's memory .* and it has 16.0 GiB"):
        check_memory(config, sizes_for(config), replace(CARDS["a100"], host_bytes=16 * GIB))
    apart = recipe("Qwen/Qwen3-8B", engine={**OWNED, "gpus": [1]})
    check_memory(apart, sizes_for(apart), replace(CARDS["a100"], count=2, host_bytes=16 * GIB))


def test_known_cards_are_found_by_the_names_that_torch_gives_them() -> None:
    for name, key in (("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla T4", "t4"), ("NVIDIA GeForce RTX 4090", "4090")):
        memory = CARDS[key].memory_bytes + 7
        found = card_like(name, memory_bytes=memory)
        assert found is not None and (found.peaks, found.memory_bytes) == (CARDS[key].peaks, memory)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA L40S", 45),
        ("NVIDIA A100-SXM4-40GB", 39),
        ("NVIDIA H100 PCIe", 79),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA GeForce RTX 4090 D", 24),
    ],
)
def test_other_cards_are_not_taken_for_known_ones(name: str, gib: int) -> None:
    assert card_like(name, memory_bytes=gib * GIB) is None


VLLM = {"name": "vllm", "max_length": 4096, "urls": ["http://127.0.0.1:8000"]}


def test_only_the_dtypes_of_the_recipe_need_a_measured_speed() -> None:
    config = recipe(model={"dtype": "float32", "lora_rank": 0}, trainer={"device": "cpu"})
    card = Card(name="a CPU", memory_bytes=16 * GIB, bandwidth=1e10, peaks={"float32": 1e11}, is_gpu=False)
    assert any("this would fit" in hint for hint in made(config, card).advice)


def test_what_a_refusal_proposes_also_fits_by_the_estimate() -> None:
    config = recipe(
        model={"dtype": "bfloat16", "lora_rank": 16},
        engine={"slots": 64, "max_length": 4096},
        trainer={"device": "cpu", "max_tokens": 32768},
    )
    card = Card(
        name="a CPU", memory_bytes=23 * GIB, bandwidth=1e10, peaks={"bfloat16": 1e11, "float16": 1e11}, is_gpu=False
    )
    with pytest.raises(UserError) as refused:
        check_memory(config, sizes_for(config), card)
    proposed = (refused.value.hint or "").partition("this would fit: `")[2].partition("`")[0].split()
    assert made(changed(config, dict(one.split("=") for one in proposed)), card).fits


def test_auto_leaves_vllm_on_the_same_card_its_cache() -> None:
    auto = made(recipe(engine=VLLM), CARDS["4090"])
    for tokens in (8192, 16384, 32768):
        fixed = made(recipe(engine=VLLM, trainer={"max_tokens": tokens}), CARDS["4090"])
        assert auto.seconds.total and fixed.seconds.total and auto.seconds.total <= fixed.seconds.total
    assert any(f"`trainer.max_tokens={auto.memory.forests.tokens}`" in hint for hint in auto.advice)


def test_the_commands_of_the_page_are_what_the_estimate_advises() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    path, larger = ROOT / "recipes" / "from_scratch" / "gpu.toml", "model.path=Qwen/Qwen3-1.7B"
    given = ["trainer.max_tokens=auto", 'engine.urls=["http://127.0.0.1:8000"]']
    alone = ["trainer.max_tokens=auto", "engine.name=embedded", "engine.slots=32", "engine.max_length=2048"]
    assert all(word in page for word in [larger, *given[1:], *alone])
    found, beside = (made(load_config(path, [larger, *more]), CARDS["4090"]) for more in ([], given))
    assert found.fits and found.memory.sleeps
    assert f"trainer.max_tokens={beside.memory.forests.tokens} " in page
    assert f"--gpu-memory-utilization {beside.memory.server_share:.2f}\n" in page
    embedded = made(load_config(path, [larger, *alone]), CARDS["4090"])
    assert found.seconds.total and embedded.seconds.total and embedded.seconds.total > found.seconds.total


def test_servers_on_this_machine_share_the_trainers_card() -> None:
    one, two, mixed, other = (
        made(recipe(engine={**VLLM, "urls": [f"http://{url}:8000" for url in urls]}), CARDS["h100"])
        for urls in (["localhost"], ["0.0.0.0", "127.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"])
    )
    assert [found.memory.servers_here for found in (one, two, mixed, other)] == [1, 2, 1, 0]
    assert two.memory.server_share <= one.memory.server_share / 2
    assert two.needed_bytes == total(two.memory.trainer) + 2 * total(two.memory.server) <= CARDS["h100"].memory_bytes
    assert one.seconds.generation and two.seconds.generation and mixed.seconds.generation
    assert two.seconds.generation >= 0.9 * one.seconds.generation  # the card is the same
    assert mixed.seconds.generation < 0.9 * one.seconds.generation  # half of the work is on another
    assert any("share the trainer's card" in told for told in two.assumptions)


def test_vllm_without_bfloat16_cannot_run() -> None:
    config = recipe("Qwen/Qwen3-0.6B", engine=VLLM)
    found = made(config, CARDS["t4"])
    assert not found.fits and found.cannot_run == "vLLM has no bfloat16 on `T4 16 GB`"
    assert "vLLM has no bfloat16 on `T4 16 GB`: set `model.dtype=float16`" in found.advice
    assert made(changed(config, {"model.dtype": "float16"}), CARDS["t4"]).fits


def test_keys_are_gathered_only_for_cudas_kernel() -> None:
    config = recipe("Qwen/Qwen3-0.6B", engine={"slots": 4, "max_length": 1024})
    for gpu, gathers in (("t4", False), ("l4", True)):
        assert any(part.name == "attention" for part in made(config, CARDS[gpu]).memory.trainer) == gathers
