"""CPU time of an adapter: one pass of 16 tokens through a small model without one, with one, and with peft's layers
called as modules.

CPU time of the thread, in turns. Ratios are medians over the rounds, with quartiles.
"""

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lightningrl.models.base import PLAIN, Decoder, Style
from lightningrl.models.dense import DenseModel
from lightningrl.models.lora import with_adapter
from lightningrl.models.tiny import build_model

TOKENS, PASSES, ROUNDS = 16, 20, 60


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor, _style: Style = PLAIN) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def seconds(model: Decoder) -> float:
    ids = torch.arange(TOKENS)
    started = time.thread_time()
    for _ in range(PASSES):
        model.hidden(ids, ids, causal)
    return (time.thread_time() - started) / PASSES


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    plain = build_model(1300)
    adapted = with_adapter(plain, rank=8)
    models = {"plain": plain, "adapter": adapted, "adapter, called as modules": DenseModel(adapted.hf)}
    rounds = [{name: seconds(model) for name, model in models.items()} for _ in range(ROUNDS)]
    for name in models:
        times = np.array([r[name] for r in rounds])
        low, middle, high = np.quantile(times / [r["plain"] for r in rounds], [0.25, 0.5, 0.75])
        print(f"{name:28} {np.median(times) * 1e6:7.0f} µs  {middle:.2f}× ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
