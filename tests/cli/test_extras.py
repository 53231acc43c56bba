"""Missing packages are named together, with the command that installs them."""

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from lightningrl.cli.extras import extra_of, packages

SRC = Path(__file__).parents[2] / "src"
TRAIN = {"torch", "transformers", "matplotlib"}
RECIPES = {"langgraph", "langchain-openai"}


@pytest.fixture
def without(tmp_path: Path):
    """Run `lightningrl` without some packages: the environment consists of links to all others."""

    def run(missing: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        packages_folder = tmp_path / "site-packages"
        packages_folder.mkdir()
        modules = {name.replace("-", "_") for name in missing}
        for folder in [*sys.path, *site.getsitepackages()]:
            for entry in Path(folder).glob("*") if folder.endswith("site-packages") else ():
                link = packages_folder / entry.name
                if (
                    entry.name.split("-")[0].split(".")[0] not in modules
                    and entry.suffix != ".pth"
                    and not link.exists()
                ):
                    link.symlink_to(entry)
        command = [sys.executable, "-S", "-m", "lightningrl", *arguments]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SRC, packages_folder)))}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)

    return run


def test_the_packages_of_an_extra_come_from_the_metadata() -> None:
    assert set(packages("train")) >= TRAIN and set(packages("recipes")) == RECIPES
    assert (extra_of("torch.nn"), extra_of("huggingface_hub"), extra_of("langchain_openai")) == (
        "train",
        "train",
        "recipes",
    )
    assert extra_of("json") is None


def test_the_demo_names_all_that_is_missing(without) -> None:
    done = without(TRAIN | RECIPES, "demo")
    assert done.returncode == 2
    assert all(f"`{name}`" in done.stderr for name in TRAIN | RECIPES) and "are not installed" in done.stderr
    assert 'hint: pip install "lightningrl[train,recipes]"' in done.stderr


def test_training_requires_only_its_own_packages(without) -> None:
    recipe = SRC.parent / "recipes" / "from_scratch" / "recipe.toml"
    done = without({"torch"} | RECIPES, "train", str(recipe))
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: `torch` is not installed", 'hint: pip install "lightningrl[train]"']


def test_doctor_tells_required_from_optional_packages(without) -> None:
    done = without({"torch", "langgraph"}, "doctor", "--json")
    assert done.returncode == 1
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["torch"]["ok"] is False and found["torch"]["hint"] == 'pip install "lightningrl[train]"'
    assert found["langgraph"]["ok"] is None and "only `lightningrl demo` needs it" in found["langgraph"]["found"]
    assert found["gpu"]["ok"] is None and "without torch" in found["gpu"]["found"]
    assert found["fits"]["ok"] is None and found["fits"]["found"] == "unknown without torch"
    assert 'hint: torch: pip install "lightningrl[train]"' in done.stderr, "brackets and all"
    assert without_error(found) == {"torch"}


def without_error(found: dict[str, dict[str, object]]) -> set[str]:
    return {name for name, check in found.items() if check["ok"] is False}
