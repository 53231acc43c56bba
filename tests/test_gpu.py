"""What `make gpu` runs on a GPU also runs on a CPU, with tiny sizes: so it cannot break unnoticed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.card.groups import WAYS, group, passes
from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.models.tiny import build_model
from lightningrl.trainer.local import LocalTrainer

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.mark.parametrize("parts", [("matmul", "attention", "training", "memory"), ("large",)], ids=" ".join)
def test_the_benchmark_runs_on_a_cpu(parts: tuple[str, ...], tmp_path: Path) -> None:
    done = run("benchmarks/gpu.py", "--device", "cpu", "--quick", "--json", tmp_path / "gpu.json", "--only", *parts)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert set(results) == set(parts)
    assert all(part["figures"] for part in results.values())


def test_the_tests_for_gpus_run_on_a_cpu() -> None:
    some = "(one and plain and bfloat16 and 4-2-64) or bfloat16_has or tokens_come or (logprobs and 1)"
    options = f"-p no:cacheprovider -v -k '{some}'"
    done = run("benchmarks/gpu.py", "--device", "cpu", "--quick", "--only", "tests", PYTEST_ADDOPTS=options)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_nothing_is_measured_after_a_failed_test() -> None:
    done = run("benchmarks/gpu.py", "--device", "cpu", "--quick", PYTEST_ADDOPTS="--no-such-option")
    assert done.returncode != 0 and "== matmul" not in done.stdout


def test_a_missing_gpu_is_reported_before_anything_runs() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu", f"GPU_PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout == ""
    error, hint = done.stderr.splitlines()[:2]
    assert error.startswith("error: this needs a GPU, but ") and "trainer.device" not in done.stderr
    assert hint == "hint: `--device cpu --quick` runs the same code on the CPU"


def test_the_ways_that_are_compared_have_equal_gradients() -> None:
    rollouts, gradients = group(96, vocabulary=300, members=4), dict[str, torch.Tensor]()
    tokens: dict[str, int] = {}
    for name, way in WAYS.items():
        trainer = LocalTrainer(
            build_model(300), config=TrainerConfig(threads=1), loss=LossConfig(), export=lambda model, path: None
        )
        forests = passes(way(rollouts), most_tokens=200)
        for forest in forests:
            trainer.forward_backward(forest)
        tokens[name] = sum(len(forest.token_ids) for forest in forests)
        gradients[name] = torch.cat([p.grad.view(-1) for p in trainer.model.hf.parameters() if p.grad is not None])
    expected = gradients["calls"]
    assert all(float((found - expected).norm() / expected.norm()) < 1e-5 for found in gradients.values())
    assert tokens["calls"] > 2 * tokens["conversations"] > 2 * tokens["forest"]
