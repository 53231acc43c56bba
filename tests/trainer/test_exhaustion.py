"""Memory that runs out at any operation of a pass changes neither loss nor gradient, and trains no token twice."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightningrl.config import TrainerConfig
from lightningrl.data.forest import build_forest
from lightningrl.data.splitting import split
from lightningrl.errors import UserError
from lightningrl.trainer.base import Evaluation
from lightningrl.trainer.logprobs import CHUNK
from tests.trainer.test_forest_gradients import Scene, error, scene


class Exhausted(TorchDispatchMode):
    """Raises at the operations with these numbers. Those that change a tensor in place need no memory."""

    def __init__(self, at: set[int], *, message: str | None = None) -> None:
        super().__init__()
        self.at = at
        self.count = 0
        self.message = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.endswith("_"):
            self.count += 1
            if self.count in self.at:
                raise RuntimeError(self.message) if self.message else torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def learn(s: Scene, at: set[int], *, message: str | None = None) -> tuple[Evaluation, dict[str, torch.Tensor], int]:
    s.clear()
    with Exhausted(at, message=message) as mode:
        found = s.trainer.forward_backward(build_forest(s.given))
    return found, s.gradients(), mode.count


@pytest.mark.parametrize(("name", "checkpointing"), [("ppo_clip", "auto"), ("gspo", "on"), ("everything", "auto")])
def test_memory_that_runs_out_anywhere_changes_nothing_that_is_learnt(
    name: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHUNK, "cpu", 5 * 48)  # the LM head computes in chunks
    s = scene(name)
    s.trainer._config = TrainerConfig.model_validate({"threads": 1, "checkpointing": checkpointing})
    learn(s, set())  # the model makes its table of angles
    whole, expected, operations = learn(s, set())
    assert whole.metrics["tokens/out_of_memory"] == 0.0
    for first in range(5, operations, operations // 4):
        del s.trainer._budget
        found, gradients, _ = learn(s, {first, first + operations})
        assert found.metrics["tokens/out_of_memory"] >= len(build_forest(s.given).token_ids)
        assert error(gradients, expected) < 1e-12
        np.testing.assert_allclose(found.logprobs, whole.logprobs, rtol=1e-12)
        if whole.values is not None and found.values is not None:
            np.testing.assert_allclose(found.values, whole.values, rtol=1e-12)
        assert found.metrics.keys() == whole.metrics.keys()
        for metric in ("loss/value", "tokens/terms", "policy/entropy", "loss/clip_fraction"):
            assert found.metrics[metric] == pytest.approx(whole.metrics[metric], rel=1e-12, abs=1e-15)


def test_a_pass_is_first_done_again_with_checkpointing_and_then_split() -> None:
    s = scene()
    tokens = len(build_forest(s.given).token_ids)
    found, _, _ = learn(s, {50})
    assert found.metrics["tokens/out_of_memory"] == tokens == found.metrics["tokens/computed"]
    assert s.trainer._budget.kept == tokens - 1
    assert s.trainer.max_tokens == 65536
    found, _, _ = learn(s, {50})
    assert found.metrics["tokens/out_of_memory"] == tokens < found.metrics["tokens/computed"]
    assert s.trainer.max_tokens == tokens // 2


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_every_allocator_is_heard_and_other_errors_are_not(message: str) -> None:
    s = scene()
    found, _, _ = learn(s, {40}, message=message)
    assert found.metrics["tokens/out_of_memory"] > 0
    with pytest.raises(RuntimeError, match="shapes"):
        learn(s, {40}, message="shapes cannot be multiplied")


def test_evaluation_is_split_too() -> None:
    s = scene("critic")
    forest = build_forest(s.given, whole=True)
    whole = s.trainer.evaluate(forest)
    with Exhausted({20, 60}):
        found = s.trainer.evaluate(forest)
    assert found.metrics["tokens/out_of_memory"] > 0 and found.values is not None and whole.values is not None
    np.testing.assert_allclose(found.logprobs, whole.logprobs, rtol=1e-12)
    np.testing.assert_allclose(found.values, whole.values, rtol=1e-12)
    assert found.entropies is not None and whole.entropies is not None
    np.testing.assert_allclose(found.entropies, whole.entropies, rtol=1e-12)
    assert s.trainer.max_tokens <= len(forest.token_ids) // 2  # the next are smaller
    with pytest.raises(UserError) as raised, Exhausted(set(range(10**5))):
        s.trainer.evaluate(forest)
    assert "engine.max_length" in str(raised.value) and "checkpointing" not in str(raised.value)


@pytest.mark.parametrize(("name", "unit"), [("ppo_clip", "call"), ("everything", "rollout")])
def test_a_single_unit_that_does_not_fit_is_an_error_with_a_way_out(name: str, unit: str) -> None:
    s = scene(name)
    with pytest.raises(UserError, match=f"one {unit} of") as raised:
        learn(s, set(range(1, 10**6)))
    assert "trainer.checkpointing" in str(raised.value)
    assert not s.gradients()


def test_a_first_part_is_not_learnt_alone_if_a_later_one_does_not_fit() -> None:
    s = scene()
    s.trainer._config = TrainerConfig(threads=1, checkpointing="on")
    forest = build_forest(s.given)
    halves = split(forest, unit="call")
    assert halves is not None
    s.trainer.forward_backward(halves[0].forest)  # the model makes its table of angles
    s.clear()
    with Exhausted(set()) as mode:
        s.trainer.forward_backward(halves[0].forest)
    s.clear()
    before = {name: p.detach().clone() for name, p in s.trainer.model.hf.named_parameters()}
    with pytest.raises(UserError, match="memory ran out"), Exhausted({1, *range(mode.count + 2, 10**5)}):
        s.trainer.forward_backward(forest)
    assert s.gradients()  # the first half's
    assert s.trainer.optim_step(learning_rate=1e-2)["optim/skipped"] == 1.0
    assert all(torch.equal(p, before[name]) for name, p in s.trainer.model.hf.named_parameters())
    assert not s.gradients()
    s.trainer.forward_backward(halves[0].forest)
    assert s.trainer.optim_step(learning_rate=1e-2)["optim/skipped"] == 0.0
