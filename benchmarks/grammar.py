"""CPU cost of sampling under a grammar and of `top_logprobs`, and whether other requests pay for it.

64 requests at once, each of 48 tokens, on the tiny model. Under a grammar they write tool calls against a schema of six
properties, cut at 48 tokens. `mixed` has 32 requests of either kind. Its expected cost is the mean of both, so its
ratio shows whether the free requests pay for the others. All sides run in turn.

    python benchmarks/grammar.py [--rounds 5] [--json benchmarks/results/grammar.json]
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightningrl.chat import ChatTemplate
from lightningrl.chat.grammar import grammar_of
from lightningrl.config import EngineConfig
from lightningrl.engine.base import EngineSetup
from lightningrl.engine.embedded import EmbeddedEngine, embedded
from lightningrl.models.memory import keep_freed_memory
from lightningrl.models.tiny import write_model_folder
from lightningrl.types import Sampling

REQUESTS, TOKENS = 64, 48
WORDS = Path(__file__).parent.parent / "README.md"
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"enum": ["Oslo", "Paris", "Rome", "Bern"]},
                "street": {"type": "string"},
                "nights": {"type": "integer", "minimum": 1, "maximum": 30},
                "guests": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
                },
                "breakfast": {"type": "boolean"},
                "note": {"type": "string", "maxLength": 200},
            },
            "required": ["town", "street", "nights", "guests", "breakfast", "note"],
            "additionalProperties": False,
        },
    },
}


def serve(folder: Path) -> tuple[EmbeddedEngine, str]:
    write_model_folder(folder, texts=WORDS.read_text(encoding="utf-8").splitlines(), vocab_size=1300)
    template = ChatTemplate.load(folder)
    setup = EngineSetup(
        policy="policy",
        config=EngineConfig(slots=REQUESTS, max_length=256),
        folder=folder,
        dtype="float32",
        decode=template.decode,
        turn_end_id=template.turn_end_id,
    )
    asked: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": "required",
        "tool_name": None,
        "parallel_tool_calls": True,
        "json_schema": None,
    }
    grammar = grammar_of(template, **asked)
    assert grammar is not None
    return embedded(setup), grammar


def answer(engine: EmbeddedEngine, samplings: list[Sampling], *, seed: int) -> int:
    """Send all requests at once. Returns the number of sampled tokens."""

    async def one(index: int, sampling: Sampling) -> int:
        prompt = [3 + (seed * 7919 + index * 31 + i * i) % 900 for i in range(32)]
        return sum(
            [
                len(d.token_ids)
                async for d in engine.generate(
                    prompt, sampling=replace(sampling, seed=seed * 1000 + index), policy="policy"
                )
            ]
        )

    async def everything() -> int:
        return sum(await asyncio.gather(*(one(index, sampling) for index, sampling in enumerate(samplings))))

    return asyncio.run(everything())


def measure(sides: dict[str, Callable[[int], int]], *, rounds: int) -> dict[str, list[float]]:
    """CPU seconds per thousand tokens of each side in each round. Sides take turns. A first round is a warm-up."""
    costs: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(rounds + 1):
        for name, run in sides.items():
            started = time.process_time()
            tokens = run(seed)
            costs[name].append((time.process_time() - started) / tokens * 1000)
    return {name: values[1:] for name, values in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        engine, grammar = serve(Path(folder) / "model")
        free = Sampling(max_tokens=TOKENS)
        guided, told = replace(free, grammar=grammar), replace(free, top_logprobs=5)
        kinds = {
            "free": [free] * REQUESTS,
            "grammar": [guided] * REQUESTS,
            "mixed": [free, guided] * (REQUESTS // 2),
            "top_logprobs=5": [told] * REQUESTS,
        }
        sides = {name: lambda seed, some=some: answer(engine, some, seed=seed) for name, some in kinds.items()}
        costs = measure(sides, rounds=arguments.rounds)
        asyncio.run(engine.close())
    result = {
        name: {
            "tokens_per_cpu_s": 1000 / statistics.median(values),
            "times_free": statistics.median(f / v for f, v in zip(costs["free"], values, strict=True)),
        }
        for name, values in costs.items()
    }
    print(f"{'one core, medians':20} {'tokens/CPU s':>14} {'× free':>8}")
    for name, figures in result.items():
        print(f"{name:20} {figures['tokens_per_cpu_s']:14.0f} {figures['times_free']:8.2f}")
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
