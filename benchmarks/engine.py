"""How fast does the embedded engine answer the load of one training step, compared with padded `model.generate`? Both sides in one run.

192 requests: 24 prompts of about 150 tokens, 8 completions each, of 1 to 48 tokens (many end early, as SQL does). The lengths
are given, not sampled, so that both sides produce the same tokens' worth of work: `generate` may stop a row at its length (a stopping criterion
per row, as an end token would), but decodes until the longest of its batch has ended. Counted are useful tokens per second.

    python benchmarks/engine.py [--rounds 3] [--json benchmarks/results/engine.json]
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.dense import DenseModel
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model
from lightningrl.types import Sampling

VOCAB, PROMPTS, GROUP, LONGEST = 1300, 24, 8, 48


class RowLengths(StoppingCriteria):
    """Ends each row of a batch at a length of its own."""

    def __init__(self, prompt_length: int, lengths: torch.Tensor) -> None:
        self.ends = prompt_length + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def load_of_one_step(seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts [192] (8 of a kind in a row) and how many tokens each is answered with."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(120, 180))] for _ in range(PROMPTS)]
    lengths = [min(LONGEST, 1 + int(rng.betavariate(2, 3) * (LONGEST + 6))) for _ in range(PROMPTS * GROUP)]
    return [p for p in prompts for _ in range(GROUP)], lengths


def padded_generate(model: DenseModel, prompts: list[list[int]], lengths: list[int], *, batch: int) -> int:
    """Left-padded batches in order of arrival. Returns the useful tokens."""
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        stop = StoppingCriteriaList([RowLengths(width, torch.tensor(lengths[start : start + batch]))])
        model.hf.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=LONGEST,
            stopping_criteria=stop,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return sum(lengths)


def embedded(model: DenseModel, prompts: list[list[int]], lengths: list[int], *, slots: int) -> int:
    """A fresh engine, so that no prompt is in its cache yet."""

    async def one(engine: EmbeddedEngine, index: int) -> int:
        sampling = Sampling(max_tokens=lengths[index], seed=index)
        return sum([len(d.token_ids) async for d in engine.generate(prompts[index], sampling=sampling, policy="policy")])

    async def everything() -> int:
        engine = EmbeddedEngine(model, slots=slots, max_length=256)
        try:
            return sum(await asyncio.gather(*(one(engine, index) for index in range(len(prompts)))))
        finally:
            await engine.close()

    return asyncio.run(everything())


def tokens_per_second(run: Callable[[int], int], *, rounds: int) -> float:
    """The median over rounds, each with prompts of its own, after one to warm up."""
    rates = []
    for seed in range(rounds + 1):
        started = time.perf_counter()
        tokens = run(seed)
        rates.append(tokens / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # helps both sides
    model = build_model(VOCAB)
    rates: dict[str, float] = {}
    for batch in (64, 192):
        rates[f"generate, batch {batch}"] = tokens_per_second(
            lambda seed, batch=batch: padded_generate(model, *load_of_one_step(seed), batch=batch), rounds=arguments.rounds
        )
    for slots in (64, 192):
        rates[f"embedded, {slots} slots"] = tokens_per_second(
            lambda seed, slots=slots: embedded(model, *load_of_one_step(seed), slots=slots), rounds=arguments.rounds
        )
    best = max(rate for name, rate in rates.items() if name.startswith("generate"))
    for name, rate in rates.items():
        print(f"{name:24} {rate:8.0f} tokens/s   {rate / best:5.2f}× the best `generate`")
    if arguments.json is not None:
        result = {"tokens_per_second": rates, "ratio": rates["embedded, 64 slots"] / best, "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
