"""A forest has the gradient of Hugging Face's own forward of one call at a time, in every family."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.data.forest import Forest, Lesson, build_forest
from lightningrl.models.any_hf import AnyHF
from lightningrl.models.families import decoder_of
from lightningrl.models.varlen_attention import forest_attention
from lightningrl.trainer.conformance import lessons
from lightningrl.trainer.local import LocalTrainer
from tests.models.exactly import Exact
from tests.models.tiny_families import FLAT, ROWS, build


def one_call_at_a_time(hf: Any, given: list[Lesson]) -> dict[str, Tensor]:
    """The gradient of -Σ w A log π, by Hugging Face's own eager attention and experts."""
    hf.zero_grad()
    for lesson in given:
        call, P = lesson.transition, len(lesson.transition.prompt_ids)
        ids = torch.tensor([[*call.prompt_ids.tolist(), *call.completion_ids.tolist()]])
        logprobs = (hf(input_ids=ids, use_cache=False).logits[0, P - 1 : -1] / call.temperature).log_softmax(-1)
        sampled = logprobs.gather(1, ids[0, P:, None])[:, 0]
        weights = torch.from_numpy(lesson.weights * lesson.advantages)
        (-(weights * sampled).sum()).backward()
    return gradients(hf)


def gradients(hf: Any) -> dict[str, Tensor]:
    """By name, without those that are zero up to rounding."""
    found = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}
    return {name: g for name, g in found.items() if float(g.norm()) > 1e-12}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - g).norm() / g.norm()) for name, g in expected.items())


def plain(hf: Any) -> Any:
    """A copy that computes as Hugging Face writes it down."""
    hf = copy.deepcopy(hf)
    hf.set_attn_implementation("eager")
    if hf._can_set_experts_implementation():
        hf.set_experts_implementation("eager")
    return hf


@pytest.mark.parametrize("family", [*FLAT, *ROWS])
def test_every_family_has_the_gradient_of_one_call_at_a_time(family: str) -> None:
    given = lessons(5, group_size=2)
    forest = build_forest(given)
    assert forest.positions.max() > 8  # longer than all windows
    with Exact():
        hf = build(family)
        reference, model = plain(hf), decoder_of(hf)
        assert isinstance(model, AnyHF)
        assert (model.shape.by_rows is None) == (family in FLAT), model.shape.by_rows
        config = TrainerConfig(threads=1)
        trainer = LocalTrainer(model, config=config, loss=LossConfig(name="pg"), export=lambda model, path: None)
        trainer.forward_backward(forest)
        expected = one_call_at_a_time(reference, given)
    assert error(gradients(hf), expected) < 1e-10


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe", "gpt_oss", "falcon_h1"])
def test_checkpointing_changes_no_bit_of_the_gradient(family: str) -> None:
    model, forest = decoder_of(build(family)), build_forest(lessons(5, group_size=2))
    kept, kept_numbers = of_hidden_states(model, forest, checkpointing=False)
    again, again_numbers = of_hidden_states(model, forest, checkpointing=True)
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert again_numbers < 0.3 * kept_numbers


def of_hidden_states(model: Any, forest: Forest, *, checkpointing: bool) -> tuple[dict[str, Tensor], int]:
    """The gradient of a sum over hidden states, and how many numbers the forward pass keeps for it."""
    model.hf.zero_grad()
    kept = 0

    def count(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel()
        return x

    attend = forest_attention(forest.starts, forest.parents, forest.positions, model=model)
    token_ids, positions = torch.from_numpy(forest.token_ids), torch.from_numpy(forest.positions)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        loss = model.hidden(token_ids, positions, attend, checkpointing=checkpointing).square().sum()
    loss.backward()
    return gradients(model.hf), kept
