"""Does a team learn more together than each member alone? Planner, solver and critic: all three, each alone, none.

    python benchmarks/joint.py                         five seeds, with full weights and with adapters
    python benchmarks/joint.py --seeds 0 --kinds full
    python benchmarks/joint.py --draw                  the picture and the table, from the results file

The arms differ only in which policies learn. The others still answer; the hashes of their weights before and after are
in the results, and the script fails if they differ. Each run's folder is kept; an existing one is not run again.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from arms import Run, draw_curves, draw_rows, runs_of, table, train

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "multi_agent"
KINDS = {"full": RECIPE / "recipe.toml", "lora": RECIPE / "lora.toml"}
TITLES = {"full": "full weights", "lora": "three LoRAs over one base"}
RESULTS = HERE / "results" / "joint.json"
PICTURE = HERE.parent / "docs" / "joint.png"

ROLES = ("planner", "solver", "critic")
ARMS = {"all three": ROLES, **{f"{role} alone": (role,) for role in ROLES}}
COLOURS = {
    "all three": "#0a7d4b",
    "planner alone": "#2c5fa8",
    "solver alone": "#c2501c",
    "critic alone": "#b08d3c",
    "nobody": "#8b949e",
}


def learning(roles: Sequence[str]) -> list[str]:
    """Settings under which only these roles learn."""
    routes = (f'{{model="{role}",agent="{role}",policy="{role}",train={str(role in roles).lower()}}}' for role in ROLES)
    return [f"routes=[{','.join(routes)}]"]


def hashes(run: Path) -> dict[str, str]:
    """SHA-256 of each policy's newest weights."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    found = {
        role: next(
            file for name in ("model", "adapter_model") if (file := newest / role / f"{name}.safetensors").exists()
        )
        for role in ROLES
    }
    return {role: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for role, file in found.items()}


def measure(
    kind: str, seeds: Sequence[int], runs: Path, settings: Sequence[str], *, jobs: int
) -> dict[str, list[dict[str, Any]]]:
    def start(seed: int) -> dict[str, str]:
        folder = runs / kind / f"start-seed{seed}"
        train(KINDS[kind], [*settings, "loop.steps=0", "tasks.heldout=1", f"seed={seed}"], folder)
        return hashes(folder)

    def one(name: str, seed: int) -> dict[str, Any]:
        roles, folder = ARMS[name], runs / kind / f"{name.replace(' ', '-')}-seed{seed}"
        figures = train(KINDS[kind], [*learning(roles), *settings, f"seed={seed}"], folder)
        weights = {"before": before[seed], "after": hashes(folder)}
        moved = [role for role in ROLES if weights["before"][role] != weights["after"][role]]
        change = f"{figures['heldout_before']:.3f} → {figures['heldout_after']:.3f}, changed: {' '.join(moved)}"
        print(f"{kind}, {name}, seed {seed}: {change}", flush=True)
        if sorted(moved) != sorted(roles):
            sys.exit(f"error: `{' '.join(roles)}` should have changed, and nothing else")
        return {"seed": seed, **figures, "weights": weights}

    with ThreadPoolExecutor(jobs) as pool:
        before = dict(zip(seeds, pool.map(start, seeds), strict=True))
    return runs_of(ARMS, seeds, one, jobs=jobs)


def with_start(arms: Mapping[str, Sequence[Run]]) -> dict[str, list[float]]:
    """Reward at the end of each arm; `nobody` is the reward before training."""
    ends = {name: [run["heldout_after"] for run in runs] for name, runs in arms.items()}
    return {**ends, "nobody": [run["heldout_before"] for run in arms["all three"]]}


def draw(results: Mapping[str, Mapping[str, Sequence[Run]]]) -> None:
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        len(results), 2, figsize=(10.5, 0.6 + 3.9 * len(results)), dpi=150, width_ratios=(1.6, 1), squeeze=False
    )
    for (left, right), (kind, arms) in zip(grid, results.items(), strict=True):
        draw_curves(left, arms, COLOURS)
        ends = with_start(arms)
        left.axhline(mean(ends["nobody"]), color=COLOURS["nobody"], ls=(0, (4, 3)), lw=1.4)
        draw_rows(right, ends, COLOURS, order=sorted(ends, key=lambda name: mean(ends[name])))
        seeds = len(next(iter(arms.values())))
        left.set_title(
            f"{TITLES[kind]}, {seeds} seeds each: mean and 95 % interval", fontsize=10, loc="left", color="#57606a"
        )
        right.set_title("at the end, 95 % interval, single runs", fontsize=10, loc="left", color="#57606a")
        right.set(xlim=(0, 1))
    figure.suptitle("planner, solver, critic: who learns?", x=0.012, ha="left", weight="bold", fontsize=11.5)
    figure.tight_layout(w_pad=5, h_pad=2)
    figure.savefig(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for all arms")
    parser.add_argument("--runs", type=Path, default=Path("runs/joint"))
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; only the seconds depend on it")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"kinds": {}}
    if not arguments.draw:
        for kind in arguments.kinds:
            results["kinds"][kind] = measure(kind, arguments.seeds, arguments.runs, arguments.set, jobs=arguments.jobs)
        results["date"] = time.strftime("%Y-%m-%d")
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for kind, arms in results["kinds"].items():
        print(f"{TITLES[kind]}\n{table(arms)}\n")
    draw(results["kinds"])
    print(f"{RESULTS}\n{PICTURE}")


if __name__ == "__main__":
    main()
