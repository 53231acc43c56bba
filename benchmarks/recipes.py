"""Does every recipe learn, how are its calls captured, and where does the time go? Trains each one briefly.

    python benchmarks/recipes.py                     all of them; about a minute each on two cores
    python benchmarks/recipes.py --recipes multi_agent math_autogen
    python benchmarks/recipes.py --check             write nothing; exit with 1 if a recipe has not learnt (z > 2),
                                                     or if calls that should be bridged are forked
    python benchmarks/recipes.py --python rag_openai_agents=/path/to/python
                                                     a recipe's Python, if it is not where `make` puts it

A recipe with a requirements.txt runs in a venv of its own, which `make recipes` sets up; the others run in the Python
of this script. RECIPES has the settings, and the forks that an agent intends. If a recipe cannot run, the script prints
its error and exits with 1.

    before, after    held-out reward at T = 1, on the same tasks; `z` is the mean difference in standard errors
    calls            per rollout that succeeded
    bridged …        share of calls, by how their prompts came about (docs/token-exact.md)
    prompt …         tokens per call: read, of these reused from the conversation so far, and sampled
    agents … rest    seconds of CPU (src/lightningrl/cpu.py)

Prints the table and writes benchmarks/results/recipes.json.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightningrl.chat.reasons import TOOLS_CHANGED
from lightningrl.cli.rollouts import read
from lightningrl.cpu import PARTS
from lightningrl.look.listing import Line, Listing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
TIMEOUT_S = 1200.0
"""Timeout of one recipe: ten times what it takes."""
LEARNT_Z = 2.0
"""One in 44 runs of a recipe that does not learn exceeds it (the normal distribution's upper tail at 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A short run of a recipe."""

    settings: Sequence[str] = ("loop.steps=6", "tasks.heldout=100", "loop.eval_every=0")
    """Settings over those of its recipe.toml."""
    forks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reason for which each rollout may fork one call (its `capture_reason`) → the agent's intention."""


# Each rollout of node_vercel starts a node process: 0.3 s of CPU. errands learns slowly: ten calls for each reward.
RECIPES = {
    "rag_openai_agents": Short(),
    "math_autogen": Short(
        forks={
            TOOLS_CHANGED: "AutoGen's reflection: after the last round of tool calls it asks once more, without tools"
        }
    ),
    "from_scratch": Short(),
    "node_vercel": Short(settings=["loop.steps=6", "tasks.heldout=40", "loop.eval_every=0"]),
    "multi_agent": Short(),
    "sql_langgraph": Short(),
    "errands": Short(settings=["loop.steps=16", "tasks.heldout=200", "loop.eval_every=0"]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of one recipe."""

    before: float
    after: float
    """Mean held-out reward at T = 1."""
    standard_errors: float
    """Mean difference per task, in its own standard errors; infinite if all tasks differ by the same amount."""
    tasks: int
    """Held-out tasks that succeeded in both exams."""
    rollouts: int
    failed: int
    """How many of them failed."""
    calls_per_rollout: float
    bridged: float
    partly: float
    rendered: float
    forked: float
    """Shares of all calls, including those that were not trained."""
    partly_reasons: Mapping[str, int]
    fork_reasons: Mapping[str, int]
    """Calls by reason."""
    prompt_tokens: float
    reused_tokens: float
    sampled_tokens: float
    """Mean per call."""
    seconds: float
    """Wall-clock of the run."""
    cpu_s: Mapping[str, float]
    """Seconds of CPU by part; empty if the system does not report it."""

    def broken(self, forks: Mapping[str, str]) -> list[str]:
        """Everything that is wrong. Each rollout may fork one call for each reason in `forks`."""
        too_many = {
            why: count for why, count in self.fork_reasons.items() if count > (self.rollouts if why in forks else 0)
        }
        found = [
            f"{count} calls in {self.rollouts} rollouts were forked that should have been bridged: {why}"
            for why, count in too_many.items()
        ]
        found += [f"{count} calls were bridged only partly: {why}" for why, count in self.partly_reasons.items()]
        if not self.standard_errors > LEARNT_Z:
            change = f"{self.before:.3f} → {self.after:.3f} is {self.standard_errors:+.1f} standard errors"
            hint = f"it takes more than {LEARNT_Z:g}"
            found.append(f"held-out reward did not rise beyond chance: {change}; hint: {hint}")
        return found


def measure(name: str, python: Path, folder: Path) -> Row:
    """Train the recipe into `folder`. Raises `RuntimeError` if it cannot run."""
    if not python.exists():
        hint = f"`make recipes` sets it up, or name one: --python {name}=/path/to/python"
        raise RuntimeError(f"there is no `{python}`; hint: {hint}")
    shutil.rmtree(folder, ignore_errors=True)
    recipe = ROOT / "recipes" / name / "recipe.toml"
    command = [python, "-m", "lightningrl", "train", recipe, *RECIPES[name].settings, "--run-dir", folder, "--json"]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        program = f"`lightningrl train {recipe.relative_to(ROOT)}`"
        raise RuntimeError(f"{program} ended with exit code {done.returncode}; see the output above")
    return row_of(read(folder, report=True), json.loads(done.stdout.splitlines()[-1]))


def row_of(listing: Listing, result: Mapping[str, Any]) -> Row:
    census, lines = listing.census, listing.lines
    assert census is not None, "the listing was read with its report"
    before, after = (_rewards(lines, f"exam-{version:05d}-sampled-") for version in (0, result["steps"]))
    difference = (after - before)[~np.isnan(after - before)]
    mean, error = float(difference.mean()), float(difference.std(ddof=1)) / math.sqrt(len(difference))
    certain = math.copysign(math.inf, mean) if mean else 0.0
    succeeded = [line for line in lines if line.status == "succeeded"]
    return Row(
        before=float(np.nanmean(before)),
        after=float(np.nanmean(after)),
        standard_errors=mean / error if error else certain,
        tasks=len(difference),
        rollouts=len(lines),
        failed=len(lines) - len(succeeded),
        calls_per_rollout=sum(line.calls for line in succeeded) / len(succeeded),
        bridged=census.captures["bridged"] / census.calls,
        partly=census.captures["partly"] / census.calls,
        rendered=census.captures["rendered"] / census.calls,
        forked=census.captures["forked"] / census.calls,
        partly_reasons={why: reason.calls for why, reason in census.partly_reasons.items()},
        fork_reasons={why: reason.calls for why, reason in census.fork_reasons.items()},
        prompt_tokens=census.prompt_tokens / census.calls,
        reused_tokens=census.reused_tokens / census.calls,
        sampled_tokens=census.sampled_tokens / census.calls,
        seconds=result["seconds"],
        cpu_s=result["cpu_s"],
    )


def _rewards(lines: Sequence[Line], exam: str) -> npt.NDArray[np.float64]:
    """[tasks] Reward of each rollout; NaN if it failed."""
    found = {line.id: line.reward for line in lines if line.id.startswith(exam)}
    return np.array([math.nan if found[name] is None else found[name] for name in sorted(found)])


def table(rows: Mapping[str, Row]) -> str:
    heads = ["before", "after", "z", "calls", "bridged", "partly", "rendered", "forked", "prompt", "reused", "sampled"]
    heads += ["failed", "seconds", *PARTS]
    lines = [f"{'':<18}" + "".join(f"{head:>9}" for head in heads)]
    for name, row in rows.items():
        cells = [f"{row.before:.3f}", f"{row.after:.3f}", f"{row.standard_errors:+.1f}", f"{row.calls_per_rollout:.2f}"]
        cells += [f"{share:.0%}" for share in (row.bridged, row.partly, row.rendered, row.forked)]
        cells += [f"{tokens:.0f}" for tokens in (row.prompt_tokens, row.reused_tokens, row.sampled_tokens)]
        cells += [str(row.failed), f"{row.seconds:.0f}"]
        cells += [f"{row.cpu_s[part]:.0f}" if part in row.cpu_s else "–" for part in PARTS]
        lines.append(f"{name:<18}" + "".join(f"{cell:>9}" for cell in cells))
        lines += [f"    {count} calls bridged only partly: {why}" for why, count in row.partly_reasons.items()]
        lines += [f"    {count} calls forked: {why}" + _meant(name, why) for why, count in row.fork_reasons.items()]
    return "\n".join(lines)


def _meant(name: str, why: str) -> str:
    forks = RECIPES[name].forks
    return f" (meant: {forks[why]})" if why in forks else ""


def python_of(name: str, given: Mapping[str, Path]) -> Path:
    if name in given:
        return given[name]
    own = (ROOT / "recipes" / name / "requirements.txt").exists()
    return ROOT / f".venv-{name}" / "bin" / "python" if own else Path(sys.executable)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument(
        "--python", nargs="+", action="extend", default=[], metavar="RECIPE=PATH", help="the Python that runs a recipe"
    )
    runs = ROOT / "runs" / "recipes"
    parser.add_argument("--runs", type=Path, default=runs, help="folder of the runs; earlier ones are removed")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    given = {name: Path(path) for name, _, path in (text.partition("=") for text in arguments.python)}
    rows: dict[str, Row] = {}
    broken: list[str] = []
    for name in arguments.recipes:
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            rows[name] = measure(name, python_of(name, given), arguments.runs / name)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            broken.append(f"{name}: {error}")
            continue
        if arguments.check:
            broken += [f"{name}: {problem}" for problem in rows[name].broken(RECIPES[name].forks)]
    print(table(rows))
    if not arguments.check and rows:
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"recipes": {}}
        results["recipes"] |= {name: {"date": time.strftime("%Y-%m-%d"), **asdict(row)} for name, row in rows.items()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
