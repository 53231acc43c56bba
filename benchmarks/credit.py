"""Which credit assignment learns fastest from the same number of rollouts? Held-out reward by method, several seeds, with 95 % intervals.

    python benchmarks/credit.py                                     errands: ten tool calls, one reward at the end
    python benchmarks/credit.py --recipe sql                        the text-to-SQL recipe: minutes for each run
    python benchmarks/credit.py --seeds 0 --methods uniform air     less
    python benchmarks/credit.py --draw                              the picture and the table again, from the results file

Everything but the method is the same in all arms: warm start, tasks, rollouts, learning rate. Each run's folder is kept; one that is there already
is not run again.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from arms import Run, area, draw_curves, draw_rows, table, train

HERE = Path(__file__).resolve().parent
RECIPES = {name: HERE.parent / "recipes" / folder / "recipe.toml" for name, folder in (("errands", "errands"), ("sql", "sql_langgraph"))}
PICTURES = {"errands": HERE.parent / "docs" / "credit.png", "sql": HERE.parent / "docs" / "credit-sql.png"}
RESULTS = HERE / "results" / "credit.json"

SQL_ROLES = {"writer": "sql-writer", "rewriter": "sql-rewriter"}


def methods(air: str) -> dict[str, list[str]]:
    """`air`: the rules that see something in the recipe."""
    return {
        "uniform": ["algorithm.credit=uniform"],
        "discounted": ["algorithm.credit=discounted", "algorithm.credit_options={discount=0.9}"],
        "air": ["algorithm.credit=air", "algorithm.credit_options={discount=0.5}", f"air=[{air}]"],
        "gigpo": ["algorithm.credit=gigpo"],
        "tree_loo": ["algorithm.credit=tree_loo"],
        "uniform, token-mean": ["algorithm.credit=uniform", "algorithm.aggregation=token-mean"],
    }


def only(role: str) -> list[str]:
    """The other role of the SQL recipe is answered by the same policy, but does not teach it."""
    routes = (f'{{model="{model}",agent="{name}",train={str(name == role).lower()}}}' for name, model in SQL_ROLES.items())
    return [f"routes=[{','.join(routes)}]"]


ARMS: Mapping[str, Mapping[str, list[str]]] = {
    "errands": methods('{rule="tool_ok",tool="send",value=1.0}'),
    "sql": methods('{rule="air:unreadable",value=-0.2}') | {f"uniform, {role} only": only(role) for role in SQL_ROLES},
}
COLOURS = {"uniform": "#1b1f24", "discounted": "#b08d3c", "air": "#c2501c", "gigpo": "#2c5fa8", "tree_loo": "#0a7d4b"}
CONTROLS = dict.fromkeys(("uniform, token-mean", *(f"uniform, {role} only" for role in SQL_ROLES)), "#8b949e")


def draw(recipe: str, arms: Mapping[str, Sequence[Run]]) -> None:
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.5), dpi=150, width_ratios=(1.45, 1))
    draw_curves(left, {name: runs for name, runs in arms.items() if name in COLOURS}, COLOURS)
    scores = {name: [area(run) for run in runs] for name, runs in arms.items()}
    draw_rows(right, scores, COLOURS | CONTROLS, order=sorted(scores, key=lambda name: mean(scores[name])))
    left.set_title("on the way: mean and 95 % interval", fontsize=10, loc="left", color="#57606a")
    right.set_title("mean over training", fontsize=10, loc="left", color="#57606a")
    first = next(iter(arms.values()))
    title = f"{recipe}: which call earned the reward?   {len(first)} seeds each, {first[0]['rollouts']:,} rollouts a run"
    figure.suptitle(title, x=0.012, ha="left", weight="bold", fontsize=11.5)
    figure.tight_layout(w_pad=3.5)
    figure.savefig(PICTURES[recipe])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=list(RECIPES), default="errands")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--methods", nargs="+", help="some of the arms; default: all")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings for all arms")
    parser.add_argument("--runs", type=Path, default=Path("runs/credit"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; their figures are the same, but for the seconds")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    recipe, known = arguments.recipe, ARMS[arguments.recipe]
    if unknown := set(arguments.methods or ()) - set(known):
        parser.error(f"unknown methods {sorted(unknown)}; known: {', '.join(known)}")
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not arguments.draw:
        names = list(arguments.methods or known)
        wanted = [(name, seed) for seed in arguments.seeds for name in names]  # seed by seed: should it be stopped, what is there compares

        def figures(arm: tuple[str, int]) -> dict[str, Any]:
            name, seed = arm
            folder = arguments.runs / recipe / f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}"
            run = {"seed": seed, **train(RECIPES[recipe], [*known[name], *arguments.set, f"seed={seed}"], folder)}
            print(f"{name}, seed {seed}: {run['heldout_before']:.3f} → {run['heldout_after']:.3f}", flush=True)
            return run

        with ThreadPoolExecutor(arguments.jobs) as pool:
            runs = list(zip(wanted, pool.map(figures, wanted), strict=True))
        arms = {name: [run for (of, _), run in runs if of == name] for name in names}
        results[recipe] = {"date": time.strftime("%Y-%m-%d"), "arms": arms}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results[recipe]["arms"]))
    draw(recipe, results[recipe]["arms"])
    print(f"{RESULTS}\n{PICTURES[recipe]}")


if __name__ == "__main__":
    main()
