"""Everything that only a machine with a GPU can show: speed, memory, and agents that learn on it. Needs no network.

    make gpu                                      all parts, one after the other
    make gpu ARGS="--only attention training"     some parts
    make gpu ARGS="--device cpu --quick"          the same code on a CPU, in minutes; its figures mean nothing

    tests        tests_gpu; if one fails, nothing is measured
    matmul       TFLOP/s of a large matrix product: the peak that shares refer to
    attention    one layer over a group of rollouts: `VarlenAttention`, `ForestAttention`, and rows; errors in bfloat16
    training     a whole model's forward and backward pass at 2k, 8k and 32k tokens: forest, conversations, calls
    memory       bytes of weights, masters, moments and a pass, against the estimate
    sql          the text-to-SQL recipe for ten steps, on the GPU and on the CPU
    large        a model of over 100 million parameters is made, and learns from reward

A part that needs a package which is not installed says so, and the others run. Each part's figures are written to
benchmarks/results/gpu.json when it ends; those of other parts stay.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from card.bench import Bench, Missing
from card.learning import large, sql
from card.memory import memory
from card.speed import attention, matmul, training

from lightningrl.errors import UserError
from lightningrl.models.devices import device_of, set_up

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TESTS = "tests"
"""The part that measures nothing."""
PARTS: dict[str, Callable[[Bench, Path], Any]] = {
    "matmul": lambda bench, _: matmul(bench),
    "attention": lambda bench, _: attention(bench),
    "training": lambda bench, _: training(bench),
    "memory": lambda bench, _: memory(bench),
    "sql": sql,
    "large": large,
}


def machine(bench: Bench) -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    for package in ("torch", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def measure(bench: Bench, names: list[str], *, path: Path, runs: Path) -> None:
    """Measure these parts, and write each to `path`."""
    for name in names:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        try:
            figures = PARTS[name](bench, runs)
        except Missing as error:
            print(f"skipped: {error}", flush=True)
            continue
        part = {**machine(bench), "took_s": round(time.monotonic() - began, 1), "figures": figures}
        print(json.dumps(part["figures"], indent=1), flush=True)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(results | {name: part}, indent=1) + "\n", encoding="utf-8")


def test(device: str) -> int:
    """Run tests_gpu on the device. Returns the exit code."""
    print(f"== {TESTS}", flush=True)
    return subprocess.run([sys.executable, "-m", "pytest", "tests_gpu", "--device", device], cwd=ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [TESTS, *PARTS]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="run these parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: runs the code, measures nothing")
    parser.add_argument(
        "--json", type=Path, help=f"where to write; by default {RESULTS.name}, on a GPU without --quick"
    )
    arguments = parser.parse_args()
    try:
        device = device_of(arguments.device)
    except UserError as error:
        reason = error.message.partition(", but ")[2]
        print(f"error: this needs a GPU, but {reason}", file=sys.stderr)
        print("hint: `--device cpu --quick` runs the same code on the CPU", file=sys.stderr)
        return 2
    if TESTS in arguments.only and (failed := test(arguments.device)):
        return failed
    set_up([device])
    bench = Bench(device=device, quick=arguments.quick)
    with tempfile.TemporaryDirectory(prefix="lightningrl-gpu-") as scratch:
        real = device.type == "cuda" and not arguments.quick
        path = arguments.json or (RESULTS if real else Path(scratch, "gpu.json"))
        measure(bench, [name for name in arguments.only if name != TESTS], path=path, runs=Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
