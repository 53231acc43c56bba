"""Does a recipe learn at a service as it learns here? The same settings at a SkyRL server on this CPU, and local LoRA.

    .venv-tinker/bin/python benchmarks/hosted.py              three seeds; starts the server of .venv-skyrl
    .venv-tinker/bin/python benchmarks/hosted.py --seeds 0 --url http://127.0.0.1:8000        a server that runs already
    .venv-tinker/bin/python benchmarks/hosted.py --draw       the picture and the table, from the results file

Both arms have adapters of the same rank and scale. Two differences remain: SkyRL 0.3.0 does not clip gradients, and it
has one A for q, k and v and one for gate and up. Each run's folder is kept; an existing one is not run again.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from arms import Run, area, draw_curves, interval, runs_of, table, train

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests_tinker.server import Server, free_port

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hosted.json"
PICTURE = ROOT / "docs" / "hosted.png"
COLOURS = {"here": "#1b1f24", "at the service": "#c2501c"}
RECIPES = {
    "errands": (
        "algorithm.credit=air",
        "algorithm.credit_options={discount=0.5}",
        'air=[{rule="tool_ok",tool="send",value=1.0}]',
        "model.lora_rank=16",
        "trainer.learning_rate=3e-3",
        "loop.steps=12",
        "loop.eval_every=4",
        "tasks.heldout=50",
    ),
    "from_scratch": (
        "model.lora_rank=16",
        "trainer.learning_rate=4e-3",
        "loop.steps=8",
        "loop.tasks_per_step=8",
        "loop.eval_every=2",
        "tasks.heldout=50",
    ),
}
"""Settings of both arms. SkyRL's LoRA has alpha = 32, as ours of rank 16 has."""
PATIENT = ("agent.timeout_s=900", "agent.concurrency=32")
"""The first answers of a SkyRL server wait for compilations. It has 15 connections to its database for all requests
that wait: 32 were not too many.
"""


@contextmanager
def server(url: str, model: Path) -> Iterator[str]:
    """The address of a server of `model`; `url`: one that runs already."""
    if url:
        yield url
        return
    with TemporaryDirectory() as folder:
        started = Server(folder=Path(folder), model=model, port=free_port())
        try:
            started.start()
            yield started.url
        finally:
            started.kill()


def measure(recipe: str, seeds: Sequence[int], runs: Path, url: str) -> dict[str, list[dict[str, Any]]]:
    folder = ROOT / "recipes" / recipe
    model = folder / "warmstart"
    arms = {"here": [], "at the service": ["backend=tinker", f"service.url={url}", f"service.model={model}"]}

    def one(name: str, seed: int) -> dict[str, Any]:
        run = runs / recipe / f"{name.replace(' ', '-')}-seed{seed}"
        settings = [*arms[name], *RECIPES[recipe], *PATIENT, f"seed={seed}", "--no-ui"]
        figures = train(folder / "recipe.toml", settings, run)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        gap = max(row["policy/logprob_gap"] for row in rows if row["kind"] == "step")
        points = " ".join(f"{reward:.3f}" for _, reward in figures["curve"])
        print(f"{recipe}, {name}, seed {seed}: {points}, {figures['seconds']:.0f} s", flush=True)
        return {"seed": seed, **figures, "logprob_gap": gap}

    return runs_of(arms, seeds, one, jobs=1)


def differences(arms: Mapping[str, Sequence[Run]]) -> list[tuple[int, float, float]]:
    """(step, mean, half of the 95 % interval) of service minus here, paired by seed."""
    pairs = list(zip(arms["at the service"], arms["here"], strict=True))
    found: list[tuple[int, float, float]] = []
    for place, (step, _) in enumerate(pairs[0][0]["curve"]):
        found.append((step, *interval([there["curve"][place][1] - here["curve"][place][1] for there, here in pairs])))
    return found


def draw(recipes: Mapping[str, Mapping[str, Sequence[Run]]]) -> None:
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(recipes), figsize=(7.2 * len(recipes), 4.2), dpi=150, squeeze=False)
    for place, (recipe, arms) in zip(axes[0], recipes.items(), strict=True):
        draw_curves(place, arms, COLOURS)
        title = f"{recipe}, LoRA of rank 16, {len(arms['here'])} seeds: mean and 95 % interval"
        place.set_title(title, fontsize=10, loc="left", color="#57606a")
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=["errands"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--url", default="", help="a server of the recipe's model that runs already")
    parser.add_argument("--runs", type=Path, default=Path("runs/hosted"))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-dummy")
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"recipes": {}}
    for recipe in arguments.recipes if not arguments.draw else ():
        with server(arguments.url, ROOT / "recipes" / recipe / "warmstart") as url:
            results["recipes"][recipe] = measure(recipe, arguments.seeds, arguments.runs, url)
        results["date"] = time.strftime("%Y-%m-%d")
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for recipe, arms in results["recipes"].items():
        print(f"{recipe}\n{table(arms)}")
        for step, middle, half in differences(arms):
            print(f"  after {step:>2} steps, service minus here: {middle:+.3f} ± {half:.3f}")
        overall = [area(there) - area(here) for there, here in zip(arms["at the service"], arms["here"], strict=True)]
        print("  over training: {:+.3f} ± {:.3f}".format(*interval(overall)))
    draw(results["recipes"])
    print(f"{RESULTS}\n{PICTURE}")


if __name__ == "__main__":
    main()
