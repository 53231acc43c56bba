"""Compare algorithms at the same number of rollouts: held-out reward of each, several seeds, 95 % intervals.

    python benchmarks/algorithms.py                                       all studies: hours
    python benchmarks/algorithms.py --studies credit --jobs 2             one of them
    python benchmarks/algorithms.py --studies credit --seeds 0 --arms uniform air
    python benchmarks/algorithms.py --draw                                pictures and tables, from the results file

All arms of a study share everything but the algorithm: warm start, tasks, rollouts, learning rate. Each run's folder is
kept; an existing one is not run again. Results go to results/algorithms.json, docs/credit.png, docs/credit-sql.png and
docs/algorithms/curves.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from arms import Run, area, draw_alone, draw_curves, draw_rows, runs_of, table, train

from lightningrl.presets import PRESETS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "algorithms.json"
PAGES = ROOT / "docs" / "algorithms"

SQL_ROLES = {"writer": "sql-writer", "rewriter": "sql-rewriter"}
COLOURS = {
    "fork": "#8250df",
    "uniform": "#1b1f24",
    "discounted": "#b08d3c",
    "air": "#c2501c",
    "gigpo": "#2c5fa8",
    "tree_loo": "#0a7d4b",
}
"""Arms with a curve of their own; the others are grey rows without one."""
GREY = "#8b949e"


DELIVERED = '{rule="tool_ok",tool="send",value=1.0}'
FORKS = ["loop.tasks_per_step=8", "loop.group_size=6", "loop.fork_share=0.67", "loop.forks=2"]
"""Eight tasks, two trunks each, two branches of each: on errands, as many sampled tokens as 4 tasks x 8 rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Arms over one recipe: name → settings."""

    recipe: Path
    arms: Mapping[str, Sequence[str]]
    settings: Sequence[str] = ()
    """Settings of all arms."""
    picture: Path | None = None
    title: str = ""
    pages: bool = False
    """Whether each algorithm's page shows its curve."""


def credits(air: str) -> dict[str, list[str]]:
    """`air`: a rule that gives rewards in this recipe."""
    return {
        "uniform": ["algorithm.credit=uniform"],
        "discounted": ["algorithm.credit=discounted", "algorithm.credit_options={discount=0.9}"],
        "air": ["algorithm.credit=air", "algorithm.credit_options={discount=0.5}", f"air=[{air}]"],
        "gigpo": ["algorithm.credit=gigpo"],
        "tree_loo": ["algorithm.credit=tree_loo"],
        "uniform, token-mean": ["algorithm.credit=uniform", "algorithm.aggregation=token-mean"],
    }


def only(role: str) -> list[str]:
    """Train only one role of the SQL recipe. The same policy answers for the other role, but does not learn from it."""
    routes = (
        f'{{model="{model}",agent="{name}",train={str(name == role).lower()}}}' for name, model in SQL_ROLES.items()
    )
    return [f"routes=[{','.join(routes)}]"]


ERRANDS = ROOT / "recipes" / "errands" / "recipe.toml"
SQL = ROOT / "recipes" / "sql_langgraph" / "recipe.toml"
STUDIES: Mapping[str, Study] = {
    "credit": Study(
        recipe=ERRANDS,
        arms=credits(DELIVERED),
        picture=ROOT / "docs" / "credit.png",
        title="errands: which of ten calls earned the reward?",
        pages=True,
    ),
    "fork": Study(
        recipe=ERRANDS,
        arms={
            "fork": ["algorithm.credit=fork", *FORKS],
            "uniform, 8 tasks": ["algorithm.credit=uniform", "loop.tasks_per_step=8", "loop.group_size=4"],
            **{name: credits(DELIVERED)[name] for name in ("uniform", "tree_loo", "gigpo", "air")},
        },
    ),
    "sql": Study(
        recipe=SQL,
        arms=credits('{rule="air:unreadable",value=-0.2}')
        | {f"uniform, {role} only": only(role) for role in SQL_ROLES},
        settings=[
            "loop.steps=12",
            "loop.tasks_per_step=16",
            "loop.eval_every=4",
            "loop.eval_tasks=100",
            "tasks.heldout=100",
        ],
        picture=ROOT / "docs" / "credit-sql.png",
        title="text-to-SQL: which call earned the reward?",
    ),
    "presets": Study(
        recipe=ERRANDS,
        arms={name: [f"preset={name}"] for name in PRESETS} | {"opo": ["algorithm.advantage=opo"]},
        settings=["loop.steps=12", "loop.eval_tasks=50", "tasks.heldout=50"],
        pages=True,
    ),
}


def measure(
    study: Study, *, names: Sequence[str], seeds: Sequence[int], runs: Path, jobs: int
) -> dict[str, list[dict[str, Any]]]:
    def figures(name: str, seed: int) -> dict[str, Any]:
        folder = runs / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
        run = {"seed": seed, **train(study.recipe, [*study.arms[name], *study.settings, f"seed={seed}"], folder)}
        print(f"{name}, seed {seed}: {run['heldout_before']:.3f} → {run['heldout_after']:.3f}", flush=True)
        return run

    return runs_of(names, seeds, figures, jobs=jobs)


def draw(study: Study, arms: Mapping[str, Sequence[Run]]) -> None:
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if study.picture is not None:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.5), dpi=150, width_ratios=(1.45, 1))
        draw_curves(left, {name: runs for name, runs in arms.items() if name in COLOURS}, COLOURS)
        scores = {name: [area(run) for run in runs] for name, runs in arms.items()}
        draw_rows(
            right,
            scores,
            dict.fromkeys(arms, GREY) | COLOURS,
            order=sorted(scores, key=lambda name: mean(scores[name])),
        )
        left.set_title("during training: mean and 95 % interval", fontsize=10, loc="left", color="#57606a")
        right.set_title("mean over training", fontsize=10, loc="left", color="#57606a")
        first = next(iter(arms.values()))
        figure.suptitle(
            f"{study.title}   {len(first)} seeds each, {first[0]['rollouts']:,} rollouts a run",
            x=0.012,
            ha="left",
            weight="bold",
            fontsize=11.5,
        )
        figure.tight_layout(w_pad=3.5)
        figure.savefig(study.picture)
        plt.close(figure)
    for name in arms if study.pages else ():
        if (PAGES / f"{name}.md").exists():
            figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=120)
            draw_alone(axes, name, arms)
            figure.tight_layout()
            figure.savefig(PAGES / "curves" / f"{name}.png")
            plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", choices=list(STUDIES), nargs="+", default=list(STUDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", help="some of the arms of each study; default: all")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; only the seconds depend on it")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in arguments.studies:
        study = STUDIES[name]
        if unknown := set(arguments.arms or ()) - set(study.arms):
            parser.error(f"unknown arms {sorted(unknown)}; known: {', '.join(study.arms)}")
        if not arguments.draw:
            wanted = arguments.arms or list(study.arms)
            arms = measure(study, names=wanted, seeds=arguments.seeds, runs=arguments.runs / name, jobs=arguments.jobs)
            results[name] = {"date": time.strftime("%Y-%m-%d"), "settings": list(study.settings), "arms": arms}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}\n{table(results[name]['arms'])}\n")
        draw(study, results[name]["arms"])


if __name__ == "__main__":
    main()
