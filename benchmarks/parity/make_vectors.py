"""Writes tests/parity/golden.json: the answers of TRL and verl that our algorithms and losses must reproduce.

    python -m venv .venv-parity && .venv-parity/bin/pip install -r benchmarks/parity/requirements.txt
    .venv-parity/bin/pip install --no-deps -r benchmarks/parity/libraries.txt
    .venv-parity/bin/python benchmarks/parity/make_vectors.py              half a minute; no accelerator

This script imports nothing of LightningRL, and the tests import nothing of TRL or verl. See docs/parity.md.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import of_trl
import of_verl
from batch import make_batch

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "parity" / "golden.json"
LIBRARIES = ["trl", "verl", "torch", "transformers"]


def main() -> None:
    batch = make_batch()
    golden = {
        "versions": {name: version(name).partition("+")[0] for name in LIBRARIES},
        "batch": batch,
        "verl": of_verl.answers(batch),
        "trl": of_trl.answers(batch),
    }
    GOLDEN.write_text(json.dumps(_rounded(golden), indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{GOLDEN}: {GOLDEN.stat().st_size / 1000:.0f} kB")


def _rounded(tree: Any) -> Any:
    """Round to 12 decimals: enough to compare to 1e-6, and readable."""
    if isinstance(tree, dict):
        return {name: _rounded(below) for name, below in tree.items()}
    if isinstance(tree, list):
        return [_rounded(below) for below in tree]
    return round(tree, 12) if isinstance(tree, float) else tree


if __name__ == "__main__":
    main()
