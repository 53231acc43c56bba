"""Two gateways before one PostgreSQL, and one of them is killed. `benchmarks/gateways.py` does it with 2,000 agents."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.postgres import binaries

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_when_a_gateway_is_killed_another_one_runs_its_rollouts_and_nothing_is_lost(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, ROOT / "benchmarks" / "gateways.py", "--json", figures]
    size = ["--agents", "32", "--rollouts", "96", "--lease", "4", "--timeout", "60"]
    done = subprocess.run(list(map(str, [*command, *size])), capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert found["problems"] == [] and found["acknowledged_finishes"] == 96
    assert found["moves"] == 2 and found["lost"] > 0, "the gateway was killed when it had nothing to do"
