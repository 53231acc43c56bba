"""The experts of a mixture, one after the other, so that a token's result does not depend on the others in the pass.

transformers' own loop multiplies as many rows as an expert has tokens, and with fewer than 16 rows a CPU's products sum
in another order (measured by `engine.attention`). Its grouped product, the fastest on a GPU, does not take float64.

Legend: N tokens · k experts of a token · D hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

NAME = "lightningrl"
ROWS = 16
"""An expert's product has a multiple of this many rows on a CPU."""


def use_experts(hf: Any) -> None:
    """Let the mixtures of `hf`, if any, compute their experts by `_experts`."""
    if hf._can_set_experts_implementation():
        hf.set_experts_implementation(NAME)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Hidden states [N D], experts of each [N k] and their weights [N k] → [N D]."""
    if hidden_states.is_cuda and hidden_states.dtype != torch.float64:
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    N, k = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=module.num_experts).tolist()
    sorted_rows = hidden_states.index_select(0, order // k).split(counts)
    weights = [None if w is None else w.unbind(0) for w in _weights(module)]  # one gradient for all experts
    parts = [
        _expert(module, rows, *(None if w is None else w[number] for w in weights))
        for number, rows in enumerate(sorted_rows)
        if len(rows)
    ]
    out = torch.cat(parts).index_select(0, order.argsort()).view(N, k, -1)
    return (out * top_k_weights[:, :, None]).sum(1).to(hidden_states.dtype)


def _weights(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Matrix and bias of the first and of the second product, for all experts."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return getattr(module, first), biases[0], module.down_proj, biases[1]


def _expert(module: Any, rows: Tensor, first: Any, first_bias: Any, second: Any, second_bias: Any) -> Tensor:
    """One expert's result for its tokens."""
    if module.is_transposed:
        first, second = first.t(), second.t()
    inner = F.linear(F.pad(rows, (0, 0, 0, -len(rows) % ROWS)), first, first_bias)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = F.linear(inner, second, second_bias)
    normed = getattr(module, "has_post_expert_norm", False)  # transformers 5.19 knows no such norm
    return (module.post_expert_norm(out) if normed else out)[: len(rows)]


ExpertsInterface.register(NAME, _experts)
