"""Recipes are scripts beside a recipe.toml, imported by plain names such as `agent`: here, for as long as one test file needs them."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SQL = Path(__file__).parents[2] / "recipes" / "sql_langgraph"


class Recipe:
    """The modules of a recipe as attributes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def sql() -> Iterator[Recipe]:
    names = {file.stem for file in SQL.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.path.insert(0, str(SQL))
    yield Recipe(SQL)
    sys.path.remove(str(SQL))
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(others)
