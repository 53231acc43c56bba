"""Does a narrow dtype learn as well as float32? LoRA on the SQL recipe over bases of each dtype, paired by seed.

    python benchmarks/precision.py --search              the learning rate, with seeds that are not used again
    python benchmarks/precision.py                       five seeds for each dtype
    python benchmarks/precision.py --gap                 |Δ logprob| between engine and trainer, per dtype

Adapters and AdamW are float32 in every arm; the base, and so every product, has the arm's dtype. The learning rate is
the best of the search in float32. Each run's folder is kept; an existing one is not run again. Results go to
results/precision.json.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from arms import area, interval, runs_of, table, train

from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.models.load import DTypeName, load_model
from lightningrl.store import open_records
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Doubles, Ints, Sampling

HERE = Path(__file__).resolve().parent
SQL = HERE.parent / "recipes" / "sql_langgraph"
RECIPE, MODEL = SQL / "recipe.toml", SQL / "warmstart"
RESULTS = HERE / "results" / "precision.json"

DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")
SETTINGS = (
    "model.lora_rank=16",
    "loop.steps=20",
    "loop.tasks_per_step=16",
    "loop.eval_every=5",
    "loop.eval_tasks=100",
    "tasks.heldout=200",
)
RATES, SEARCH_SEEDS = (1e-3, 3e-3, 1e-2), (100, 101)
PROMPTS = 400
"""Number of prompts for the gap."""


def run(name: str, overrides: Sequence[str], seed: int, runs: Path) -> dict[str, Any]:
    figures = {"seed": seed, **train(RECIPE, [*SETTINGS, *overrides, f"seed={seed}"], runs / f"{name}-seed{seed}")}
    print(f"{name}, seed {seed}: {figures['heldout_before']:.3f} → {figures['heldout_after']:.3f}", flush=True)
    return figures


def search(runs: Path) -> dict[str, Any]:
    """Mean reward over training for each learning rate, in float32."""

    def one(rate: str, seed: int) -> dict[str, Any]:
        return run(f"rate-{rate}", [f"trainer.learning_rate={rate}"], seed, runs)

    found = runs_of([f"{rate:g}" for rate in RATES], SEARCH_SEEDS, one, jobs=1)
    scores = {rate: mean(area(each) for each in made) for rate, made in found.items()}
    ends = {rate: mean(each["heldout_after"] for each in made) for rate, made in found.items()}
    best = max(scores, key=scores.__getitem__)
    return {"seeds": SEARCH_SEEDS, "over_training": scores, "at_the_end": ends, "best": best}


def measure(dtypes: Sequence[str], seeds: Sequence[int], runs: Path, *, rate: str) -> dict[str, list[dict[str, Any]]]:
    def one(dtype: str, seed: int) -> dict[str, Any]:
        return run(dtype, [f"model.dtype={dtype}", f"trainer.learning_rate={rate}"], seed, runs)

    return runs_of(dtypes, seeds, one, jobs=1)


def differences(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Each dtype against float32, run by run with equal seeds: mean difference and half of its 95 % t-interval.

    `gain`: the same for the reward at the end against the reward before training, the control.
    """
    found: dict[str, Any] = {}
    wide = {each["seed"]: each for each in arms["float32"]}
    for dtype, made in arms.items():
        found[dtype] = {"gain": interval([each["heldout_after"] - each["heldout_before"] for each in made])}
        if dtype != "float32":
            pairs = [(each, wide[each["seed"]]) for each in made]
            for key in ("heldout_after", "heldout_greedy_after"):
                found[dtype][key] = interval([a[key] - b[key] for a, b in pairs])
            found[dtype]["over_training"] = interval([area(a) - area(b) for a, b in pairs])
    return found


async def gap(dtype: DTypeName, prompts: Sequence[Ints]) -> dict[str, float]:
    """|Δ logprob| in nats between engine and trainer with equal weights, over tokens that the engine samples."""
    model = load_model(str(MODEL), dtype=dtype)
    config, loss = TrainerConfig(threads=1, device="cpu"), LossConfig()
    trainer = LocalTrainer(model, config=config, loss=loss, export=lambda model, folder: None)
    engine = EmbeddedEngine(model, slots=64, max_length=384, shared=True)

    async def one(index: int, prompt: Ints) -> Doubles:
        sampling = Sampling(max_tokens=64, temperature=1.0, seed=index)
        deltas = [delta async for delta in engine.generate(prompt.tolist(), sampling=sampling, policy="policy")]
        token_ids = np.array([token for delta in deltas for token in delta.token_ids], np.int32)
        served = np.array([logprob for delta in deltas for logprob in delta.logprobs])
        return np.abs(trainer.logprobs(prompt, token_ids) - served)

    found = np.concatenate([await one(index, prompt) for index, prompt in enumerate(prompts)])
    await engine.close()
    percentile = {f"p{q:g}": float(np.percentile(found, q)) for q in (50, 99, 99.9)}
    return {"tokens": len(found), "mean": float(found.mean()), **percentile, "max": float(found.max())}


async def prompts_of(run: Path) -> list[Ints]:
    """Prompts of the first calls of a run."""
    records = await open_records(f"sqlite://{run.resolve() / 'store.sqlite'}")
    try:
        ids = [rollout.id for rollout in await records.rollouts()][:PROMPTS]
        calls = await records.calls([attempt.id for attempt in await records.attempts(ids)])
        return [call.prompt_ids for call in calls][:PROMPTS]
    finally:
        await records.close()


async def gaps(dtypes: Sequence[DTypeName], run: Path) -> dict[str, dict[str, float]]:
    prompts = await prompts_of(run)
    return {dtype: await gap(dtype, prompts) for dtype in dtypes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search the learning rate")
    parser.add_argument("--gap", action="store_true", help="compare engine and trainer")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=Path("runs/precision"))
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if arguments.search:
        results["search"] = search(arguments.runs)
    elif arguments.gap:
        results["gap"] = asyncio.run(gaps(arguments.dtypes, arguments.runs / "float32-seed0"))
        print(json.dumps(results["gap"], indent=1))
    else:
        rate = results["search"]["best"]
        made = measure(arguments.dtypes, arguments.seeds, arguments.runs, rate=rate)
        results["arms"] = results.get("arms", {}) | made
        results["differences"] = differences(results["arms"])
        print(table(results["arms"]))
    results |= {"settings": SETTINGS, "date": time.strftime("%Y-%m-%d")}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(RESULTS)


if __name__ == "__main__":
    main()
