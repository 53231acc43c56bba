"""Does the agent learn, and from what? Held-out reward of the text-to-SQL recipe, several seeds and warm starts, with two controls.

    python recipes/sql_langgraph/warmstart.py --seed 1 --out runs/warmstart-seed1                                   a second warm start
    python benchmarks/learning.py --warmstarts recipes/sql_langgraph/warmstart runs/warmstart-seed1                 50 minutes on 2 cores
    python benchmarks/learning.py --seeds 0        less
    python benchmarks/learning.py --draw           the picture and the table again, from the results file

For each warm start (a model folder, made by recipes/sql_langgraph/warmstart.py) and each seed:

    rl           `lightningrl train` on the recipe
    no rewrite   the trained policy, in the same agent with its rewrite step switched off
    sft          instead of RL, the same wall-clock of further SFT on the same demonstrations (once per warm start)

Each run's folder is kept; one that is there already is not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "sql_langgraph"
RESULTS = HERE / "results" / "learning.json"
PICTURE = HERE.parent / "docs" / "learning.png"
NO_REWRITE = 'agent.env={SQL_MAX_TURNS="1"}'


def lightningrl(*arguments: str | Path) -> dict[str, Any]:
    """Run a command of the CLI; its JSON result."""
    done = subprocess.run([sys.executable, "-m", "lightningrl", *map(str, arguments), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def once(path: Path, make: Any) -> dict[str, Any]:
    """The JSON in `path`, made if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make()) + "\n", encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def reinforce(warmstart: Path, seed: int, folder: Path) -> dict[str, Any]:
    recipe = RECIPE / "recipe.toml"
    rl = once(folder / "rl.json", lambda: lightningrl("train", recipe, f"model.path={warmstart}", f"seed={seed}", "--run-dir", folder / "run"))
    bare = once(folder / "no_rewrite.json", lambda: lightningrl("eval", recipe, NO_REWRITE, f"seed={seed}", "--checkpoint", folder / "run"))
    curve = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [[row["step"], row["reward/mean"]] for row in curve if row["kind"] == "exam" and row["mode"] == "sampled"]
    return {"warmstart": warmstart.name, "seed": seed, "rl": figures(rl), "no_rewrite": figures(bare), "heldout_curve": points}


def imitate(warmstart: Path, warmstart_seed: int, seconds: float, folder: Path) -> dict[str, Any]:
    """The control: more of the same demonstrations, for as long as RL took."""

    def make() -> dict[str, Any]:
        command = [sys.executable, RECIPE / "warmstart.py", "--continue", warmstart, "--seconds", str(seconds), "--seed", str(warmstart_seed)]
        command += ["--steps", str(10**9), "--threads", "2", "--out", folder / "model"]
        subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)
        return lightningrl("eval", RECIPE / "recipe.toml", "--checkpoint", folder / "model")

    return {"warmstart": warmstart.name, "seconds": seconds, "score": figures(once(folder / "sft.json", make))}


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Numbers only: where files lie is nobody's business."""
    return {name: value for name, value in result.items() if not isinstance(value, str)}


FIGURES = ("heldout_before", "heldout_after", "heldout_greedy_before", "heldout_greedy_after", "seconds")


def table(results: dict[str, Any]) -> str:
    """Means over all runs, and their spread."""
    rows: list[tuple[str, list[float]]] = [(name, [run["rl"][name] for run in results["rl"]]) for name in FIGURES]
    rows += [(f"no_rewrite_{name}", [run["no_rewrite"][name] for run in results["rl"]]) for name in ("heldout", "heldout_greedy")]
    rows += [(f"sft_{name}", [run["score"][name] for run in results["sft"]]) for name in ("heldout", "heldout_greedy")]
    lines = [f"{'':<24}{'mean':>8}{'sd':>8}{'min':>8}{'max':>8}{'runs':>6}"]
    for name, values in rows:
        spread = stdev(values) if len(values) > 1 else 0.0
        lines.append(f"{name:<24}{mean(values):>8.3f}{spread:>8.3f}{min(values):>8.3f}{max(values):>8.3f}{len(values):>6}")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> None:
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    steps = [step for step, _ in results["rl"][0]["heldout_curve"]]
    curves = [[reward for _, reward in run["heldout_curve"]] for run in results["rl"]]
    for curve in curves:
        axes.plot(steps, curve, color="#0a7d4b", alpha=0.25, lw=1)
    middle = [mean(values) for values in zip(*curves, strict=True)]
    axes.plot(steps, middle, color="#0a7d4b", lw=3, marker="o", label=f"LightningRL, mean of {len(curves)} runs")
    control = mean(run["score"]["heldout"] for run in results["sft"])
    axes.axhline(control, color="#b3541e", ls="--", lw=1.5, label="control: the same time of further SFT")
    bare = mean(run["no_rewrite"]["heldout"] for run in results["rl"])
    axes.scatter([steps[-1]], [bare], color="#1b1f24", marker="v", s=45, zorder=3, label="trained, rewrite step switched off")
    for index, below in ((0, -16), (-1, 9)):
        axes.annotate(
            f"{middle[index]:.2f}", (steps[index], middle[index]), textcoords="offset points", xytext=(0, below), ha="center", weight="bold"
        )
    minutes = mean(run["rl"]["seconds"] for run in results["rl"]) / 60
    title = f"text-to-SQL, an unmodified LangGraph agent: {minutes:.0f} minutes on two CPU cores"
    axes.set(xlabel="step", ylabel="reward on held-out tasks (T = 1)", ylim=(0, 1), title=title)
    axes.grid(axis="y", color="#e4e7eb")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warmstarts", type=Path, nargs="+", default=[RECIPE / "warmstart"], help="their n-th is taken to be made with --seed n")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    if not arguments.draw:
        results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "rl": [], "sft": []}
        for number, warmstart in enumerate(path.resolve() for path in arguments.warmstarts):
            name = f"warmstart{number}"
            runs = [reinforce(warmstart, seed, arguments.runs / f"{name}-seed{seed}") for seed in arguments.seeds]
            seconds = mean(run["rl"]["seconds"] for run in runs)
            results["rl"] += runs
            results["sft"].append(imitate(warmstart, number, seconds, arguments.runs / f"{name}-sft"))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    print(table(results))
    draw(results)
    print(f"{RESULTS}\n{PICTURE}")


if __name__ == "__main__":
    main()
