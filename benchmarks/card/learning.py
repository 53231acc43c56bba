"""Do agents learn on the GPU, with the embedded engine on the same device, and in which time against the CPU?

Each run is the command that a user types, in a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from card.bench import Bench, need

ROOT = Path(__file__).resolve().parents[2]
SQL, SCRATCH = ROOT / "recipes" / "sql_langgraph", ROOT / "recipes" / "from_scratch"
TIMEOUT_S = 540.0
"""Timeout of one command."""
LARGE = "{hidden=768, layers=12, heads=12, kv_heads=4, head_size=64, intermediate=3072}"
"""104 million parameters, and the embeddings of a small vocabulary."""
MEANS = ("time/collect_s", "time/learn_s", "tokens/computed", "policy/logprob_gap_max")
"""Metrics of a step. Those of the trainer are missing where all rewards of each group are equal."""
SMALL = "{hidden=64, layers=2, heads=4, kv_heads=2, head_size=16, intermediate=128}"


def sql(bench: Bench, runs: Path) -> dict[str, Any]:
    """The first steps of the text-to-SQL recipe, on the device and on the CPU."""
    need("langgraph", "langchain_openai", "openai")
    short = ["agent.workers=1", "loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=4", "tasks.heldout=4"]
    settings = [*(short if bench.quick else ["loop.steps=10", "tasks.heldout=100"]), "loop.eval_every=0"]
    return {
        device: _train(SQL / "recipe.toml", runs / f"sql-{device}", [*settings, f"trainer.device={device}"])
        for device in dict.fromkeys((bench.device.type, "cpu"))
    }


def large(bench: Bench, runs: Path) -> dict[str, Any]:
    """A model of over 100 million parameters: made from wrong demonstrations, then corrected by reward."""
    need("openai")
    device = f"trainer.device={bench.device.type}"
    shape, steps, batch = (SMALL, 1, 8) if bench.quick else (LARGE, 250, 24)
    model = runs / "large"
    made = _run(
        *("warmstart", SCRATCH / "habits.toml", device, f"warmstart.shape={shape}", f"warmstart.steps={steps}"),
        *(f"warmstart.batch={batch}", "warmstart.learning_rate=5e-4", f"warmstart.count={steps * batch}"),
        *("--out", model, "--run-dir", runs / "large-made", "--json"),
    )
    settings = [f"model.path={model}", "trainer.learning_rate=3e-5", "loop.eval_every=0", device]
    short = ["agent.workers=1", "loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=4", "tasks.heldout=4"]
    trained = _train(SCRATCH / "recipe.toml", runs / "large-trained", [*settings, *(short if bench.quick else [])])
    found = {"parameters": made["parameters"], "made_s": made["seconds"], "trained": trained}
    if bench.device.type == "cpu":
        return found
    slow = ["loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=4", "tasks.heldout=4", "trainer.device=cpu"]
    on_cpu = _train(SCRATCH / "recipe.toml", runs / "large-cpu", [*settings[:-1], *slow])
    return {**found, "one_small_step_on_cpu": on_cpu}


def _train(recipe: Path, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Held-out reward before and after, and seconds of a step by what was done."""
    result = _run("train", recipe, *settings, "--run-dir", folder, "--json")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    means = {name: _mean([step[name] for step in steps if name in step]) for name in MEANS}
    keys = ("heldout_before", "heldout_after", "heldout_tasks", "steps", "rollouts", "seconds")
    return {**{name: result[name] for name in keys}, **means}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _run(*arguments: object) -> dict[str, Any]:
    """The JSON that a command prints. Its other output goes to the screen."""
    command = [sys.executable, "-m", "lightningrl", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])
