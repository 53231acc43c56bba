"""What does an adapter cost? One pass of 16 tokens through a small model: plain, with an adapter, and with peft's layers called as modules."""

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from lightningrl.models.dense import DenseModel
from lightningrl.models.lora import with_adapter
from lightningrl.models.tiny import build_model

TOKENS, PASSES, ROUNDS = 16, 100, 9


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def seconds(model: DenseModel) -> float:
    ids = torch.arange(TOKENS)
    started = time.perf_counter()
    for _ in range(PASSES):
        model.hidden(ids, ids, causal)
    return (time.perf_counter() - started) / PASSES


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    plain = build_model(1300)
    adapted = with_adapter(plain, rank=8)
    models = {"plain": plain, "adapter": adapted, "adapter, called as modules": DenseModel(adapted.hf)}
    rounds = [{name: seconds(model) for name, model in models.items()} for _ in range(ROUNDS)]
    best = {name: min(times[name] for times in rounds) for name in models}
    for name, value in best.items():
        print(f"{name:28} {value * 1e6:7.0f} µs  {value / best['plain']:.2f}×")


if __name__ == "__main__":
    main()
