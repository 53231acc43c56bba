"""What the docs name exists: files they link to, settings, and verbs of make."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightningrl.cli.settings import settings_page
from lightningrl.config import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.md")])


def commands(page: Path) -> list[str]:
    """Lines of code blocks."""
    return [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]


def every(pattern: str, lines: list[str]) -> list[Any]:
    return [match for line in lines for match in re.findall(pattern, line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)
    ]
    assert [link for link in links if not (page.parent / link).exists()] == []

    runs = [line for line in commands(page) if re.search(r"lightningrl (train|eval|demo)\b", line)]
    overrides = every(r"(?<=\s)([a-z_]+(?:\.[a-z_0-9]+)*)=\S", runs)
    quoted = re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_0-9]+)(?:=[^`]*)?`", text)
    known = {*Config.model_fields, *re.findall(r"^\| `([a-z_0-9.]+)`", settings_page(), re.MULTILINE)}
    assert [
        name
        for name in [*overrides, *quoted]
        if name not in known and not name.endswith((".py", ".mjs", ".jsonl", ".sqlite"))
    ] == []

    verbs = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [
        verb
        for verb in every(r"^\s*make ([a-z]+)", commands(page)) + re.findall(r"`make ([a-z]+)", text)
        if verb not in verbs
    ] == []


def test_the_description_of_the_package_leads_to_nothing_outside_of_it() -> None:
    """A package index shows the README alone: of links into the repository the text is left, and of its pictures
    nothing.
    """
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    description = (ROOT / "README.md").read_text()
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        description = re.sub(change["pattern"], change["replacement"], description)
    assert re.findall(r"!?\[[^\n]*\]\((?!https:)[^)]*\)", description) == []
    assert "`recipes/sql_langgraph/agent.py`" in description and 'pip install "lightningrl[train]"' in description


def test_the_page_of_settings_is_the_one_that_is_generated() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "lightningrl settings > docs/settings.md"
