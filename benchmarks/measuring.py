"""How much time of an update does it take to record what it did to some tokens (`trainer.measured`)?

    python benchmarks/measuring.py

For some recipes: one step's rollouts, from which the policies learn twenty times, at almost no learning rate. Printed
and written to results/measuring.json: seconds of an update, seconds of its measuring, their ratio, and the bytes of
what is recorded.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.conformance import SilentWatcher
from lightningrl.data.taught import Taught, save_taught
from lightningrl.recipe import load_config
from lightningrl.serve import lightning

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "measuring.json"
RECIPES = ("sql_langgraph", "multi_agent", "errands")
UPDATES = 20


async def measured(recipe: str, folder: Path) -> dict[str, Any]:
    """Medians over the updates, summed over the policies."""
    config = load_config(HERE.parent / "recipes" / recipe / "recipe.toml", ["tasks.heldout=1"])
    update = measure = size = sampled = tokens = 0.0
    taught = Taught()
    async with lightning(config, folder) as server:
        loop = server.loop(SilentWatcher())
        await loop.restore()
        lessons, _ = await loop.credit(0, await loop.collect(0))
        for learner in server.learners:
            own, rows = lessons[learner.name], list[tuple[float, float]]()
            await learner.engine.pause()
            for _ in range(UPDATES):
                began = time.perf_counter()
                metrics, taught = await learner.update(own, seed=0, remaining=1e-9)
                rows.append((time.perf_counter() - began, metrics["time/measure_s"]))
            spent = np.median(rows, axis=0)
            update, measure = update + spent[0], measure + spent[1]
            save_taught(folder / "taught.npz", taught)
            size += (folder / "taught.npz").stat().st_size
            sampled += sum(np.count_nonzero(lesson.weights) for lesson in own)
            tokens += sum(map(len, taught.logprobs_after.values()))
    return {
        "groups": config.loop.tasks_per_step,
        "sampled_tokens": int(sampled),
        "measured_tokens": int(tokens),
        "update_s": round(float(update), 4),
        "measure_s": round(float(measure), 4),
        "share": round(float(measure / update), 4),
        "bytes": int(size),
    }


def main() -> None:
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            found[recipe] = asyncio.run(measured(recipe, Path(folder)))
        print(recipe, found[recipe], flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
