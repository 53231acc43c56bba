"""Held-out reward on the paper's three tasks, over several seeds, with a control: does the agent learn from reward?

    python benchmarks/learning.py                                   text-to-SQL
    python benchmarks/learning.py rag_openai_agents                 a Python with the recipe's requirements.txt
    python benchmarks/learning.py math_autogen --controls 0 1       likewise; the control for two of the three seeds
    python benchmarks/learning.py rag_openai_agents --draw          only the pictures and the table, from the results

Two warm starts give twice as many runs:

    lightningrl warmstart recipes/sql_langgraph/recipe.toml seed=1 --out runs/warmstart-seed1
    python benchmarks/learning.py --warmstarts recipes/sql_langgraph/warmstart runs/warmstart-seed1

For each warm start (a model folder, made by `lightningrl warmstart`) and each seed:

    RL        `lightningrl train` on the recipe
    SFT       the control: further SFT on the same demonstrations, for the same wall-clock time and on as many threads;
              the time counts from its first step
    scores    of the warm start, RL and SFT, sampled and greedy, on the same held-out tasks, and on the other tasks or
              settings in `STUDIES`

Simultaneous runs slow each other down. With `--jobs` above 1 this holds for RL and SFT alike; the CPU seconds of each
are recorded. Each run's folder is kept, and an existing one is not run again. Results go to results/learning-TASK.json
and docs/learning-TASK.png; docs/learning.png has the curves of all tasks.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from arms import Run, once, runs_of, spent, tidy, train

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "learning.png"
GREEN, ORANGE, BLACK, GREY = "#0a7d4b", "#b3541e", "#1b1f24", "#8b949e"

HELD_OUT = "held out"
POLICIES = {"before": "before", "after": "after RL", "sft": "SFT instead"}
MODES = ("sampled", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A task of the paper. The study has the name of the recipe's folder."""

    title: str
    agent: str
    besides: Mapping[str, Sequence[str]]
    """Further scores of all policies: name → settings."""


STUDIES: Mapping[str, Study] = {
    "sql_langgraph": Study(
        title="text-to-SQL", agent="LangGraph", besides={"without the rewrite step": ['agent.env={SQL_MAX_TURNS="1"}']}
    ),
    "rag_openai_agents": Study(
        title="multi-hop questions",
        agent="OpenAI Agents SDK",
        besides={"out of distribution, 4 hops": ["tasks.source=tasks:ood"]},
    ),
    "math_autogen": Study(
        title="word problems", agent="AutoGen", besides={"out of distribution, 4 steps": ["tasks.source=tasks:ood"]}
    ),
}


def results_of(task: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"learning-{task}.json"


def measure(
    task: str, warmstart: Path, *, number: int, seed: int, control: bool, settings: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run one seed of warm start number `number`, with its control and scores."""
    recipe = ROOT / "recipes" / task / "recipe.toml"
    settings = [f"model.path={warmstart}", f"seed={seed}", *settings]
    rl = train(recipe, settings, folder / "run")
    print(f"{task}, {warmstart.name}, seed {seed}: {rl['heldout_before']:.3f} → {rl['heldout_after']:.3f}", flush=True)
    run = {
        "warmstart": number,
        "seed": seed,
        "rl": {**rl, "spent": json.loads((folder / "run" / "spent.json").read_text(encoding="utf-8"))},
    }
    policies = {"before": warmstart, "after": folder / "run"}
    if control:
        policies["sft"] = folder / "sft"
        run["sft"] = once(
            folder / "sft.json",
            lambda: imitate(task, warmstart, policies["sft"], seconds=rl["seconds"], number=number, seed=seed),
        )
    besides = {HELD_OUT: (), **STUDIES[task].besides}
    file = folder / ("scores.json" if control else "scores-without-control.json")
    run["scores"] = once(
        file, lambda: {where: scores(recipe, [*settings, *own], policies) for where, own in besides.items()}
    )
    return run


def imitate(task: str, warmstart: Path, out: Path, *, seconds: float, number: int, seed: int) -> dict[str, Any]:
    """The control: further SFT on the warm start's demonstrations, in another order."""
    recipe = ROOT / "recipes" / task / "recipe.toml"
    further = [f"seed={number}", f"warmstart.base={warmstart}", "warmstart.steer=false", f"warmstart.steps={10**9}"]
    command = [
        sys.executable,
        "-m",
        "lightningrl",
        "warmstart",
        recipe,
        *further,
        "--seconds",
        str(seconds),
        "--order",
        str(seed),
    ]
    return {"seconds": seconds, "spent": spent(*command, "--threads", "2", "--out", out)}


def scores(recipe: Path, settings: Sequence[str], policies: Mapping[str, Path]) -> dict[str, dict[str, float]]:
    """Scores of each policy on the same tasks."""
    _, *others = policies.values()
    against = [word for folder in others for word in ("--against", folder)]
    command = [
        sys.executable,
        "-m",
        "lightningrl",
        "eval",
        recipe,
        *settings,
        "--checkpoint",
        policies["before"],
        *against,
        "--json",
    ]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    first = json.loads(done.stdout.splitlines()[-1])
    found = zip(policies, [first, *first["against"]], strict=True)
    return {
        name: {"sampled": one["heldout"], "greedy": one["heldout_greedy"], "failed": one["failed"]}
        for name, one in found
    }


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation; the mean alone for one value."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def scored(runs: Iterable[Run], where: str, policy: str) -> list[Mapping[str, float]]:
    """The scores of `policy` on `where`, of the runs that have them."""
    return [run["scores"][where][policy] for run in runs if policy in run["scores"].get(where, {})]


def table(task: str, runs: Sequence[Run]) -> str:
    lines = [f"{'reward':<30}{'':<13}{'sampled (T = 1)':>18}{'greedy':>18}{'runs':>6}"]
    for where in (HELD_OUT, *STUDIES[task].besides):
        for policy, name in POLICIES.items():
            if found := scored(runs, where, policy):
                cells = "".join(f"{spread([score[mode] for score in found]):>18}" for mode in MODES)
                lines.append(f"{where:<30}{name:<13}{cells}{len(found):>6}")
    took = {
        name: [run[kind]["spent"] for run in runs if "spent" in run.get(kind, {})]
        for kind, name in (("rl", "RL"), ("sft", "SFT instead"))
    }
    lines.append(f"\n{'seconds':<30}{'':<13}{'wall-clock':>18}{'CPU':>18}{'runs':>6}")
    for name, found in took.items():
        if found:
            cells = "".join(f"{spread([one[key] for one in found], 0):>18}" for key in ("wall_s", "cpu_s"))
            lines.append(f"{'':<30}{name:<13}{cells}{len(found):>6}")
    return "\n".join(lines)


def quarters(minutes: float) -> str:
    """`5½` for 5.4."""
    whole, rest = divmod(round(4 * minutes), 4)
    return f"{whole}{('', '¼', '½', '¾')[rest]}"


def duration(runs: Sequence[Run]) -> str:
    """Minutes of a run: the mean, or the range if runs differ by a minute or more."""
    minutes = [run["rl"].get("spent", {}).get("wall_s", run["rl"]["seconds"]) / 60 for run in runs]
    if max(minutes) - min(minutes) < 1:
        return quarters(mean(minutes))
    return f"{quarters(min(minutes))}–{quarters(max(minutes))}"


def draw_task(axes: Any, task: str, results: Mapping[str, Any]) -> None:
    """Plot the held-out reward of each run, their mean, the start and the control."""
    study, runs = STUDIES[task], results["runs"]
    steps = [step for step, _ in runs[0]["rl"]["curve"]]
    curves = [[reward for _, reward in run["rl"]["curve"]] for run in runs]
    for curve in curves:
        axes.plot(steps, curve, color=GREEN, alpha=0.25, lw=1)
    middle = [mean(values) for values in zip(*curves, strict=True)]
    axes.axhline(middle[0], color=GREY, ls=":", lw=1.5, label="before")
    if control := scored(runs, HELD_OUT, "sft"):
        axes.axhline(
            mean(score["sampled"] for score in control),
            color=ORANGE,
            ls="--",
            lw=1.5,
            label="control: further SFT, as long",
        )
    axes.plot(steps, middle, color=GREEN, lw=3, marker="o", label=f"LightningRL, mean of {len(curves)} runs")
    for where in study.besides:
        ends = [
            (at, face, scored(runs, where, policy))
            for at, face, policy in ((steps[0], "white", "before"), (steps[-1], BLACK, "after"))
        ]
        for at, face, found in ends:
            if found:
                label = f"{where}: {'after' if face == BLACK else 'before'}"
                axes.scatter(
                    [at],
                    [mean(score["sampled"] for score in found)],
                    color=face,
                    edgecolor=BLACK,
                    marker="v",
                    s=45,
                    zorder=3,
                    label=label,
                )
    for index, offset in ((0, (8, -17)), (-1, (-8, 11))):
        place = (steps[index], middle[index])
        axes.annotate(
            f"{middle[index]:.3f}",
            place,
            textcoords="offset points",
            xytext=offset,
            ha="left" if index == 0 else "center",
            weight="bold",
        )
    axes.set(
        xlabel="step",
        ylim=(0, 1),
        title=f"{study.title}\n{study.agent}, {duration(runs)} minutes on {results['machine']['cores']} CPU cores",
    )
    tidy(axes, grid="y")
    axes.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        fontsize=8.5,
        columnspacing=1,
        handlelength=1.5,
    )


def draw(measured: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot the tasks side by side."""
    import matplotlib  # slow to load

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, row = plt.subplots(
        1,
        len(measured),
        figsize=(8 if len(measured) == 1 else 4.9 * len(measured), 4.8),
        dpi=150,
        sharey=True,
        squeeze=False,
    )
    for axes, (task, results) in zip(row[0], measured.items(), strict=True):
        draw_task(axes, task, results)
    row[0][0].set_ylabel("held-out reward (T = 1)")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(STUDIES), nargs="?", default="sql_langgraph")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls", type=int, nargs="*", help="seeds that have a control; default: all")
    parser.add_argument(
        "--warmstarts", type=Path, nargs="+", help="model folders, the n-th made with seed n; default: the recipe's"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings over the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous runs; they slow each other down")
    parser.add_argument("--draw", action="store_true", help="draw from the results; run nothing")
    arguments = parser.parse_args()
    task: str = arguments.task
    if not arguments.draw:
        warmstarts = {
            f"warmstart{n}": p.resolve()
            for n, p in enumerate(arguments.warmstarts or [ROOT / "recipes" / task / "warmstart"])
        }
        controls = arguments.seeds if arguments.controls is None else arguments.controls

        def one(name: str, seed: int) -> dict[str, Any]:
            folder = arguments.runs.resolve() / task / f"{name}-seed{seed}"
            number = list(warmstarts).index(name)
            return measure(
                task,
                warmstarts[name],
                number=number,
                seed=seed,
                control=seed in controls,
                settings=arguments.set,
                folder=folder,
            )

        runs = [run for own in runs_of(warmstarts, arguments.seeds, one, jobs=arguments.jobs).values() for run in own]
        made = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "jobs": arguments.jobs,
            "settings": arguments.set,
            "runs": runs,
        }
        results_of(task).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    measured = {
        name: json.loads(results_of(name).read_text(encoding="utf-8")) for name in STUDIES if results_of(name).exists()
    }
    print(table(task, measured[task]["runs"]))
    own = PICTURE.with_stem(f"learning-{task}")
    draw({task: measured[task]}, own)
    draw(measured, PICTURE)
    print(f"{results_of(task)}\n{own}\n{PICTURE}")


if __name__ == "__main__":
    main()
