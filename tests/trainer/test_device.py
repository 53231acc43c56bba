"""Training on a simulated GPU: nothing is made on the host by accident, and the results are the CPU's."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.models import varlen_attention
from lightningrl.models.base import Decoder
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.trainer import logprobs
from lightningrl.trainer.conformance import RATE, lessons
from lightningrl.trainer.local import LocalTrainer
from tests.models.tiny_families import build
from tests.simulated import CPU, GPU, Simulation, has_gpu, simulated_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="this machine has a real GPU")
EVERYTHING = LossConfig(
    ratio="rollout", clip_dual=3.0, proximal=True, importance="call", kl_coef=0.1, entropy_coef=0.01
)
LOSSES = {
    "everything": EVERYTHING,
    "cispo": LossConfig(name="cispo", ratio="call", proximal=True, importance="rollout-mask"),
    "pg": LossConfig(name="pg", importance="token"),
}
Make = Callable[[torch.device], LocalTrainer]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_gpu() as simulation:
        yield simulation


def trainer_on(
    device: torch.device,
    folder: Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    rank: int = 0,
    loss: LossConfig = EVERYTHING,
    checkpointing: Literal["on", "off"] = "off",
) -> LocalTrainer:
    model = load_model(str(folder), dtype=dtype, device=device)
    return LocalTrainer(
        with_adapter(model, rank=rank) if rank else model,
        config=TrainerConfig(threads=1, checkpointing=checkpointing),
        loss=loss,
        export=partial(export_folder, tokenizer=load_tokenizer(str(folder))),
        critic=True,
    )


def learn(trainer: LocalTrainer, *, seeds: tuple[int, ...] = (0, 1)) -> np.ndarray:
    """Two updates; then log-probabilities and values."""
    for seed in seeds:
        trainer.forward_backward(build_forest(lessons(seed)))
        assert trainer.optim_step(learning_rate=RATE / 10)["optim/skipped"] == 0.0
    found = trainer.evaluate(build_forest(lessons(2)))
    assert found.values is not None
    return np.concatenate((found.logprobs, found.values))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_gpu_learns_what_the_cpu_learns(loss: str, rank: int, model_folder: Path, simulation: Simulation) -> None:
    expected = learn(trainer_on(CPU, model_folder, rank=rank, loss=LOSSES[loss]))
    trainer = trainer_on(GPU, model_folder, rank=rank, loss=LOSSES[loss])
    simulation.strict = True
    np.testing.assert_allclose(learn(trainer), expected, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_learns_in_half_precision(
    dtype: Literal["bfloat16", "float16"], rank: int, model_folder: Path, simulation: Simulation
) -> None:
    expected = learn(trainer_on(CPU, model_folder, dtype=dtype, rank=rank))
    trainer = trainer_on(GPU, model_folder, dtype=dtype, rank=rank)
    simulation.strict = True
    np.testing.assert_allclose(learn(trainer), expected, atol=0.2)


def test_a_gpu_learns_with_chunks_of_logits_and_layers_computed_again(
    model_folder: Path, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learn(trainer_on(CPU, model_folder))
    trainer = trainer_on(GPU, model_folder, checkpointing="on")
    monkeypatch.setitem(logprobs.CHUNK, "cuda", 5 * trainer.model.vocab_size)
    simulation.strict = True
    np.testing.assert_allclose(learn(trainer), expected, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_gpu_learns_with_the_flash_attention_kernel(
    rank: int, model_folder: Path, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = learn(trainer_on(CPU, model_folder, dtype="bfloat16", rank=rank))
    kernel_calls = count_calls(monkeypatch)
    trainer = trainer_on(GPU, model_folder, dtype="bfloat16", rank=rank)
    found = learn(trainer)
    assert kernel_calls() > 0
    np.testing.assert_allclose(found, expected, atol=0.2)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the simulated GPU have the kernel, emulated. Returns how many layers' attention it has computed."""
    importlib.import_module("tests.models.kernel")
    monkeypatch.setattr(varlen_attention, "has_flash", lambda device: device.type == "cuda")
    calls: list[object] = []
    original = varlen_attention._gathered

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(varlen_attention, "_gathered", counted)
    return lambda: len(calls)


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "falcon_h1"])
def test_a_gpu_learns_any_family(family: str, tmp_path: Path, simulation: Simulation) -> None:
    build(family, dtype=torch.float32).save_pretrained(tmp_path)
    (norm, expected), (same_norm, found) = (
        learn_once(load_model(str(tmp_path), device=device), simulation) for device in (CPU, GPU)
    )
    assert norm == pytest.approx(same_norm, rel=1e-4)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def learn_once(model: Decoder, simulation: Simulation) -> tuple[float, np.ndarray]:
    """The norm of a gradient, and the log-probabilities after the update."""
    trainer = LocalTrainer(
        model, config=TrainerConfig(threads=1), loss=LossConfig(name="pg"), export=lambda model, path: None
    )
    forest = build_forest(lessons(5, group_size=2))
    simulation.strict = model.device == GPU
    trainer.forward_backward(forest)
    norm = trainer.optim_step(learning_rate=1e-3)["optim/grad_norm"]
    return norm, trainer.evaluate(forest).logprobs


@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_returns_to_the_gpu(rank: int, model_folder: Path, tmp_path: Path, simulation: Simulation) -> None:
    straight, resumed = (trainer_on(GPU, model_folder, rank=rank) for _ in range(2))
    learn(straight, seeds=(0,))
    simulation.emptied = 0
    straight.save(tmp_path / "state")
    assert simulation.emptied == 1, "an engine may need the memory"
    resumed.load(tmp_path / "state")
    assert simulation.emptied == 2
    moments = [value for state in resumed._optimizer.state.values() for value in state.values()]
    assert {value.device for value in moments} == {GPU}
    simulation.strict = True
    np.testing.assert_array_equal(learn(resumed, seeds=(1,)), learn(straight, seeds=(1,)))


@pytest.mark.parametrize("rank", [0, 4])
def test_what_a_gpu_publishes_is_what_it_has_learnt(
    rank: int, model_folder: Path, tmp_path: Path, simulation: Simulation
) -> None:
    trainer = trainer_on(GPU, model_folder, rank=rank)
    learn(trainer)
    trainer.publish(tmp_path / "model")
    published = load_model(str(tmp_path / "model"))
    learnt = trainer.model.trainable()
    for name, tensor in published.trainable().items():
        torch.testing.assert_close(learnt[name].detach().cpu(), tensor.detach(), rtol=0, atol=0)


def test_the_simulation_refuses_what_a_gpu_refuses(simulation: Simulation) -> None:
    here, there = torch.ones(3), torch.ones(3, device=GPU)
    assert there.device == GPU and (there * torch.tensor(2.0)).device == GPU, "numbers may come from the host"
    with pytest.raises(AssertionError, match="mixes tensors"):
        there.add(here)
    simulation.strict = True
    with pytest.raises(AssertionError, match="on the default device"):
        torch.zeros(3)
    assert float(there.sum()) == 3.0 and simulation.waits == {"item": 1}
