"""What the docs name exists: files and headings they link to, settings, and verbs of make."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightningrl.cli.settings import settings_page
from lightningrl.config import Config
from tests.docs.blocks import PAGES, ROOT

FILES = (".py", ".mjs", ".jsonl", ".sqlite")
"""Endings of names that look like a setting, e.g. `store.sqlite`."""


def each_page() -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands(page: Path) -> list[str]:
    """Lines of code blocks."""
    found = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


def every(pattern: str, lines: list[str]) -> list[Any]:
    return [match for line in lines for match in re.findall(pattern, line)]


def headings(page: Path) -> set[str]:
    """The fragments that GitHub and the site give to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", name) for name in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in names}


@each_page()
def test_what_a_page_links_to_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if not re.match(r"[a-z]+:", link)]
    for link in links:
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not fragment or target.suffix != ".md" or fragment in headings(target), link


@each_page()
def test_the_settings_that_a_page_names_exist(page: Path) -> None:
    runs = [line for line in commands(page) if re.search(r"lightningrl (train|eval|demo)\b", line)]
    overrides = every(r"(?<=\s)([a-z_]+(?:\.[a-z_0-9]+)*)=\S", runs)
    quoted = re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_0-9]+)(?:=[^`]*)?`", page.read_text())
    known = {*Config.model_fields, *re.findall(r"^\| `([a-z_0-9.]+)`", settings_page(), re.MULTILINE)}
    assert [name for name in [*overrides, *quoted] if name not in known and not name.endswith(FILES)] == []


@each_page()
def test_the_verbs_of_make_that_a_page_names_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = every(r"^\s*make ([a-z-]+)", commands(page)) + re.findall(r"`make ([a-z-]+)", page.read_text())
    assert [verb for verb in named if verb not in verbs] == []


def test_the_description_of_the_package_leads_to_nothing_outside_of_it() -> None:
    """A package index shows the README alone: links into the repository become plain text, pictures disappear."""
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    description = (ROOT / "README.md").read_text()
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        description = re.sub(change["pattern"], change["replacement"], description)
    assert re.findall(r"!?\[[^\n]*\]\((?!https:)[^)]*\)", description) == []
    assert "`recipes/sql_langgraph/agent.py`" in description and 'pip install "lightningrl[train]"' in description
