"""Throughput of the embedded engine on the requests of one training step, against padded `model.generate`.

192 requests: 24 prompts of about 150 tokens, 8 completions each, of 1 to 48 tokens (many end early, as SQL does). The
lengths are given, not sampled, so that both sides do the same work. `generate` may stop a row at its length (a stopping
criterion per row, as an end token would), but decodes until the longest row of its batch has ended. The measure is
useful tokens per second. Both sides run in turn.

    python benchmarks/engine.py [--rounds 3] [--json benchmarks/results/engine.json]
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.base import Decoder
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import build_model
from lightningrl.types import Sampling

VOCAB, PROMPTS, GROUP, LONGEST = 1300, 24, 8, 48


class RowLengths(StoppingCriteria):
    """Ends each row of a batch at its own length."""

    def __init__(self, prompt_length: int, lengths: torch.Tensor) -> None:
        self.ends = prompt_length + lengths

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> Any:
        return input_ids.shape[1] >= self.ends


def load_of_one_step(seed: int) -> tuple[list[list[int]], list[int]]:
    """192 prompts (8 equal ones in a row), and the completion length of each, in tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(120, 180))] for _ in range(PROMPTS)]
    lengths = [min(LONGEST, 1 + int(rng.betavariate(2, 3) * (LONGEST + 6))) for _ in range(PROMPTS * GROUP)]
    return [p for p in prompts for _ in range(GROUP)], lengths


def padded_generate(model: Decoder, prompts: list[list[int]], lengths: list[int], *, batch: int) -> int:
    """Run left-padded batches in order of arrival. Returns the number of useful tokens."""
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


def embedded(engine: EmbeddedEngine, prompts: list[list[int]], lengths: list[int]) -> int:
    """Send all requests at once. Returns the number of tokens. No prompt recurs between rounds."""

    async def one(index: int) -> int:
        sampling = Sampling(max_tokens=lengths[index], seed=index)
        return sum(
            [len(d.token_ids) async for d in engine.generate(prompts[index], sampling=sampling, policy="policy")]
        )

    async def everything() -> int:
        return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))

    return asyncio.run(everything())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    wall: float
    """Useful tokens per second."""
    cpu: float
    """Useful tokens per second of this process's CPU time. Both sides use one core, so load does not matter."""


def measure(sides: dict[str, Callable[[int], int]], *, rounds: int) -> dict[str, list[Rate]]:
    """Each side's rate in each round. Every round has new prompts. The sides take turns, so that a busy machine slows
    all of them. The first round is a warm-up and is left out.
    """
    rates: dict[str, list[Rate]] = {name: [] for name in sides}
    for seed in range(rounds + 1):
        for name, run in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run(seed)
            rates[name].append(
                Rate(wall=tokens / (time.perf_counter() - wall), cpu=tokens / (time.process_time() - cpu))
            )
    return {name: values[1:] for name, values in rates.items()}


def summary(rates: dict[str, list[Rate]], clock: Callable[[Rate], float]) -> dict[str, dict[str, float]]:
    """Medians over rounds: tokens per second, and the ratio to the better `generate` of the same round."""
    best = [
        max(map(clock, some))
        for some in zip(*(rates[name] for name in rates if name.startswith("generate")), strict=True)
    ]
    return {
        name: {
            "tokens_per_s": statistics.median(map(clock, values)),
            "ratio": statistics.median(clock(rate) / b for rate, b in zip(values, best, strict=True)),
        }
        for name, values in rates.items()
    }


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
        sides[f"generate, batch {batch}"] = lambda seed, batch=batch: padded_generate(
            model, *load_of_one_step(seed), batch=batch
        )
    engines = {slots: EmbeddedEngine(model, slots=slots, max_length=256) for slots in (64, 192)}
    for slots, engine in engines.items():
        sides[f"embedded, {slots} slots"] = lambda seed, engine=engine: embedded(engine, *load_of_one_step(seed))
    rates = measure(sides, rounds=arguments.rounds)
    for engine in engines.values():
        asyncio.run(engine.close())
    result = {"wall": summary(rates, lambda r: r.wall), "cpu": summary(rates, lambda r: r.cpu)}
    print(f"{'one core, medians':20} {'tokens/s':>9} {'× generate':>11} {'tokens/CPU s':>14} {'× generate':>11}")
    for name in sides:
        wall, cpu = result["wall"][name], result["cpu"][name]
        columns = f"{wall['tokens_per_s']:9.0f} {wall['ratio']:11.2f} {cpu['tokens_per_s']:14.0f} {cpu['ratio']:11.2f}"
        print(f"{name:20} {columns}")
    if arguments.json is not None:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "load_average": os.getloadavg()[0],
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(json.dumps({**result, **about}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
