"""The code blocks of the documentation work: Python runs, recipes load, and commands exist with their options."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lightningrl.cli.app import app
from lightningrl.recipe import make_config
from tests.docs.blocks import ROOT, SHELL, Block, blocks

PYTHON = blocks("python")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
RECIPE = {
    "name": "page",
    "agent": {"entry": "a:b", "reward": "a:c"},
    "tasks": {"source": "a:d"},
    "model": {"path": "model"},
}
"""What a block that shows a part of a recipe leaves out."""


def each(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=lambda block: block.where)


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In order. A block that begins with `# agent.py` is a file that later blocks may import."""
    script = []
    for block in PYTHON:
        if block.page != page or block.not_run or block.source:
            continue
        if block.file:
            (tmp_path / block.file).write_text(block.code)
            script.append(f"import {Path(block.file).stem}")
        else:
            script.append(f"exec(compile({block.code!r}, {block.where!r}, 'exec'), {{'__name__': 'page'}})")
    (tmp_path / "page.py").write_text("\n".join(script))
    env = {**os.environ, "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "page.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@each([block for block in PYTHON if block.source])
def test_an_excerpt_is_what_the_file_says(block: Block) -> None:
    assert block.source is not None
    lines = iter(block.source.read_text().splitlines())
    assert [line for line in block.code.splitlines() if line.strip() and line not in lines] == []


@each([block for block in blocks("toml") if not block.not_run])
def test_a_recipe_loads(block: Block) -> None:
    tree = tomllib.loads(block.code)
    agent = {"entry": None} if "command" in tree.get("agent", {}) else {}
    sections = {
        name: {**given, **tree.get(name, {})} if isinstance(given, dict) else tree.get(name, given)
        for name, given in RECIPE.items()
    }
    sections["agent"] = {name: value for name, value in {**sections["agent"], **agent}.items() if value is not None}
    make_config({**tree, **sections}, [], folder=ROOT, where=block.where)


@each(blocks("json"))
def test_json_parses(block: Block) -> None:
    assert [json.loads(line) for line in block.code.splitlines()]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without variables that stand before it."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        yield from _split(words)


def _split(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", "|", ";"):
            if command:
                yield command
            command = []
        else:
            command.append(word)


@each([block for block in blocks(*SHELL) if not block.not_run])
def test_commands_and_their_options_exist(block: Block) -> None:
    for words in commands(block):
        match words:
            case ["lightningrl", *arguments]:
                parse(arguments)
            case ["python", script, *_] if "/" in script:
                assert (ROOT / script).exists(), script
            case ["pip", "install", *packages]:
                named = [
                    name
                    for p in packages
                    for names in re.findall(r"lightningrl\[(.+?)\]", p)
                    for name in names.split(",")
                ]
                assert [name for name in named if name not in EXTRAS] == []


def parse(arguments: list[str]) -> None:
    """As the command line does; raises for a command, an option or a value that it refuses."""
    group = typer.main.get_command(app)
    context = group.make_context("lightningrl", ["settings"])
    name, command, rest = group.resolve_command(context, arguments)  # type: ignore[attr-defined]
    command.make_context(name, rest, parent=context)
