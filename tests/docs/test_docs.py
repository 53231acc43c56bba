"""What the docs name exists: files they link to, settings, and verbs of make."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lightningrl.config import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])


def settings(section: type[BaseModel], *, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings(field.annotation, prefix=f"{prefix}{name}.")


def commands(page: Path) -> list[str]:
    """Lines of code blocks."""
    return [line for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE) for line in block.splitlines()]


def every(pattern: str, lines: list[str]) -> list[Any]:
    return [match for line in lines for match in re.findall(pattern, line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []

    runs = [line for line in commands(page) if re.search(r"lightningrl (train|eval|demo)\b", line)]
    overrides = every(r"(?<=\s)([a-z_]+(?:\.[a-z_0-9]+)*)=\S", runs)
    quoted = re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_0-9]+)(?:=[^`]*)?`", text)
    known = set(settings(Config))
    assert [name for name in [*overrides, *quoted] if name not in known and not (ROOT / "src/lightningrl" / name).exists()] == []

    verbs = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [verb for verb in every(r"^\s*make ([a-z]+)", commands(page)) + re.findall(r"`make ([a-z]+)", text) if verb not in verbs] == []


def test_every_setting_says_what_it_means() -> None:
    def silent(section: type[BaseModel]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from silent(field.annotation)
            elif not field.description and section is not Config:
                yield f"{section.__name__}.{name}"

    assert list(silent(Config)) == []
