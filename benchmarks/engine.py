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
from typing import Any

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

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> Any:
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


def measure(sides: dict[str, Callable[[int], int]], *, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each side in each round. Rounds have prompts of their own; the sides take turns, so that a busy machine
    slows all of them. The first round warms up and does not count."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(rounds + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            tokens = run(seed)
            rates[name].append(tokens / (time.perf_counter() - started))
    return {name: values[1:] for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # helps both sides
    model = build_model(VOCAB)
    sides: dict[str, Callable[[int], int]] = {}
    for batch in (64, 192):
        sides[f"generate, batch {batch}"] = lambda seed, batch=batch: padded_generate(model, *load_of_one_step(seed), batch=batch)
    for slots in (64, 192):
        sides[f"embedded, {slots} slots"] = lambda seed, slots=slots: embedded(model, *load_of_one_step(seed), slots=slots)
    rates = measure(sides, rounds=arguments.rounds)
    best = [max(pair) for pair in zip(*(rates[name] for name in sides if name.startswith("generate")), strict=True)]
    ratios = {name: statistics.median(r / b for r, b in zip(values, best, strict=True)) for name, values in rates.items()}
    print(f"{'one core, medians':24} {'tokens/s':>10} {'× best generate':>16}")
    for name, values in rates.items():
        print(f"{name:24} {statistics.median(values):10.0f} {ratios[name]:16.2f}")
    if arguments.json is not None:
        result = {"tokens_per_second": rates, "ratios": ratios, "torch": torch.__version__, "machine": platform.machine()}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
