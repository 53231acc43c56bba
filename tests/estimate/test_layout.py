"""Where the vLLM of a run goes, and what it may take: by settings, GPUs and memory."""

from pathlib import Path
from typing import Any

import pytest

from lightningrl.config import Config
from lightningrl.engines import model_paths
from lightningrl.errors import UserError
from lightningrl.estimate.cards import GIB
from lightningrl.estimate.layout import Layout, host_bytes, layout, place, resting_bytes, visible_to, vllm_parts
from lightningrl.models.footprint import cache_bytes
from lightningrl.models.sizes import Sizes, sizes_of_all
from lightningrl.recipe import make_config

MODEL = "Qwen/Qwen3-1.7B"


def recipe(device: str = "cuda", **sections: Any) -> Config:
    tree = {
        "name": "r",
        "agent": {"entry": "a:b", "reward": "a:c", "concurrency": 128},
        "tasks": {"source": "a:d"},
        "model": {"path": MODEL, "dtype": "bfloat16", "lora_rank": 16, **sections.pop("model", {})},
        "engine": {"name": "vllm", "max_length": 4096, **sections.pop("engine", {})},
        "trainer": {"device": device},
        **sections,
    }
    return make_config(tree, [], folder=Path(), where="test")


def sizes_for(config: Config) -> dict[str, Sizes]:
    return sizes_of_all(model_paths(config).values(), root=config.root)


def made(config: Config, *gpus: float, machine: float = 64, visible: str | None = None) -> Layout:
    return layout(
        config,
        sizes_for(config),
        gpus=[int(gib * GIB) for gib in gpus],
        machine_bytes=int(machine * GIB),
        visible=visible,
    )


def tokens(found: Layout, *, itemsize: int = 2) -> float:
    """Tokens that the cache of a server holds."""
    return found.cache_bytes / cache_bytes(sizes_for(recipe())[MODEL].shape, tokens=1, itemsize=itemsize)


@pytest.mark.parametrize(
    ("device", "engine", "count", "gpus", "sleeps"),
    [
        ("cuda", {}, 1, (0,), True),
        ("auto", {}, 1, (0,), True),
        ("cuda", {}, 3, (1, 2), False),
        ("cuda:1", {}, 3, (0, 2), False),
        ("cpu", {}, 2, (0, 1), False),
        ("cuda", {"gpus": [0]}, 2, (0,), True),
        ("cuda", {"gpus": [0, 1]}, 2, (0, 1), True),
        ("cuda:1", {"gpus": [0]}, 2, (0,), False),
        ("cuda", {"sleep": "off"}, 1, (0,), False),
        ("cuda", {"sleep": "on"}, 1, (0,), True),
        ("auto", {}, 0, (), False),
        ("cpu", {}, 0, (), False),
    ],
)
def test_vllm_gets_the_gpus_that_the_trainer_leaves_or_else_shares_its_own(
    device: str, engine: dict[str, Any], count: int, gpus: tuple[int, ...], sleeps: bool
) -> None:
    found = place(recipe(device, engine=engine), count=count)
    assert (found.gpus, found.sleeps) == (gpus, sleeps)


@pytest.mark.parametrize("engine", [{}, {"sleep": "on"}])
def test_without_a_trainer_vllm_has_all_gpus_and_never_sleeps(engine: dict[str, Any]) -> None:
    for count in (1, 2):
        found = place(recipe(engine=engine), count=count, training=False)
        assert (found.gpus, found.shared, found.sleeps) == (tuple(range(count)), False, False)


def test_policies_on_two_gpus_leave_vllm_the_third() -> None:
    policies = {"a": {"trainer": {"device": "cuda:0"}}, "b": {"trainer": {"device": "cuda:2"}}}
    config = recipe(policies=policies, routes=[{"policy": "a"}])
    assert place(config, count=3).gpus == (1,)
    assert place(config, count=3).sleeps is False


@pytest.mark.parametrize(
    ("engine", "count", "message", "hint"),
    [
        ({"gpus": [2]}, 2, "`engine.gpus` names GPU `2`", "this machine has GPUs 0 to 1"),
        ({"gpus": [-1]}, 2, "`engine.gpus` names GPU `-1`", "GPUs 0 to 1"),
        ({"gpus": [0]}, 0, "`engine.gpus` names GPU `0`", "none that torch can use"),
        ({"gpus": [1, 1]}, 2, "`engine.gpus` is `[1, 1]`", "name it once"),
        ({"sleep": "on"}, 2, "`engine.sleep` is `on`, but trainer and vLLM share no GPU", "at `auto`"),
    ],
)
def test_a_layout_that_is_impossible_is_refused(engine: dict[str, Any], count: int, message: str, hint: str) -> None:
    with pytest.raises(UserError) as refused:
        place(recipe(engine=engine), count=count)
    assert refused.value.message.startswith(message) and hint in (refused.value.hint or "")


def test_a_server_sees_its_own_gpu_by_the_name_that_this_process_sees_it_by() -> None:
    assert visible_to((0, 2), ours=None) == ("0", "2")
    assert visible_to((0, 1), ours="5, 3") == ("5", "3")
    assert visible_to((1,), ours="GPU-aa,GPU-bb") == ("GPU-bb",)
    assert visible_to((), ours="") == (None,)
    assert made(recipe("cuda:1"), 80, 80, visible="7,4").visible == ("7",)


def test_the_cache_holds_all_running_requests_where_there_is_room() -> None:
    few = recipe(loop={"tasks_per_step": 2, "group_size": 4})
    found = made(few, 80, 80)
    assert 8 * 4096 <= tokens(found) <= 8 * 4096 * 1.1
    assert tokens(made(few, 80, 80, 80)) == tokens(found) / 2  # two servers share the requests


def test_the_cache_fits_beside_what_the_trainer_keeps() -> None:
    config = recipe()
    sizes = sizes_for(config)
    weights = 2 * sizes[MODEL].parameters
    shared, own = made(config, 22), made(config, 22, 22)
    assert shared.sleeps == (True,) and own.sleeps == (False,)
    assert own.cache_bytes - shared.cache_bytes == pytest.approx(resting_bytes(config, sizes, kind="cuda"), abs=2)
    assert shared.cache_bytes + weights + resting_bytes(config, sizes, kind="cuda") < 0.9 * 22 * GIB
    awake = made(recipe(engine={"sleep": "off"}), 22)
    assert awake.cache_bytes == pytest.approx(shared.cache_bytes / 2, abs=2)  # the trainer has the other half
    assert own.utilization * 22 * GIB == pytest.approx(own.cache_bytes + weights, rel=0.05)


def test_only_a_server_on_the_trainers_gpu_sleeps() -> None:
    assert made(recipe(engine={"gpus": [0, 1]}), 80, 80).sleeps == (True, False)


def test_each_policy_has_a_slot_of_the_largest_rank_that_vllm_takes() -> None:
    def adapters(rank: int) -> int:
        config = recipe(model={"path": MODEL, "lora_rank": rank})
        found = place(config, count=1)
        parts = vllm_parts(config, sizes_for(config), found, memory_bytes=80 * GIB)
        return next(part.bytes for part in parts if part.name == "adapters")

    assert adapters(9) == adapters(16) == 2 * adapters(8)


def test_all_weights_that_learn_leave_a_smaller_cache_than_an_adapter() -> None:
    # masters and moments take 12 bytes a parameter, adapters a few in all
    full = recipe(model={"path": "Qwen/Qwen3-0.6B", "lora_rank": 0})
    adapter = recipe(model={"path": "Qwen/Qwen3-0.6B", "lora_rank": 16})
    assert made(full, 22).cache_bytes < made(adapter, 22).cache_bytes - 11 * 595_000_000


def test_a_cpu_gives_the_cache_a_share_of_its_memory() -> None:
    found = made(recipe("auto"), machine=23)
    assert found.gpus == () and found.visible == (None,) and found.sleeps == (False,)
    assert tokens(found) > 4096 and found.cache_bytes < 23 * GIB / 4


def test_the_cache_always_holds_one_request_in_whole_blocks() -> None:
    tight = made(recipe(engine={"max_length": 5000}), 4)
    assert tokens(tight) == 5120 + 256


def test_a_cache_of_a_given_size_is_taken_unless_no_request_fits() -> None:
    assert made(recipe(engine={"cache_gib": 1.5}), 22).cache_bytes == 1.5 * GIB
    with pytest.raises(UserError, match=r"too small for a request of 4,096 tokens\nhint: .* at least `0.47`"):
        made(recipe(engine={"cache_gib": 0.4}), 22)


def test_weights_of_a_sleeping_vllm_are_in_the_machines_memory() -> None:
    config, full = recipe(), recipe(model={"lora_rank": 0})
    sizes = sizes_for(config)
    weights = 2 * sizes[MODEL].parameters
    assert host_bytes(config, sizes, place(config, count=1)) == weights
    assert host_bytes(config, sizes, place(config, count=2)) == 0
    assert host_bytes(full, sizes, place(full, count=1)) == 2 * weights  # with those that are handed over
