"""Every algorithm has a complete page, and its settings load."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from lightningrl.cli.ready import check_names
from lightningrl.config import LossConfig
from lightningrl.plugins import BUILTIN
from lightningrl.presets import PRESETS
from lightningrl.recipe import make_config

DOCS = Path(__file__).parents[2] / "docs"
OVERVIEW = DOCS / "algorithms.md"
PAGES = sorted(DOCS.glob("algorithms/*.md"))
NAMES = {
    "Presets": list(PRESETS),
    "Credit": list(BUILTIN["credit"]),
    "Advantage": list(BUILTIN["advantage"]),
    "Loss": list(get_args(LossConfig.model_fields["name"].annotation)),
}

NO_CURVE = {"fork"}
"""Pages whose experiment has not been run yet."""


def recipe() -> dict[str, Any]:
    return {
        "name": "page",
        "agent": {"entry": "a:b", "reward": "a:c"},
        "tasks": {"source": "a:d"},
        "model": {"path": "model"},
    }


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_has_a_page_and_every_row_a_name(kind: str) -> None:
    (section,) = re.findall(rf"^## {kind}.*?\n(.*?)^## ", OVERVIEW.read_text(), re.DOTALL | re.MULTILINE)
    rows = dict(re.findall(r"^\| \[`([^`]+)`\]\((algorithms/[^)]+)\)", section, re.MULTILINE))
    assert sorted(rows) == sorted(NAMES[kind])
    assert [page for page in rows.values() if not (DOCS / page).exists()] == []


def test_the_table_of_presets_says_what_they_fill_in() -> None:
    rows = re.findall(
        r"^\| \[`([^`]+)`\]\(\S+\) \| (\S+) \| (\S+) \| (\S+) \| (\w+), (\S+) and (\S+) \|",
        OVERVIEW.read_text(),
        re.MULTILINE,
    )
    for name, credit, advantage, aggregation, loss, low, high in rows:
        config = make_config(recipe() | {"preset": name}, [], folder=DOCS, where=name)
        found = (config.algorithm.credit, config.algorithm.advantage, config.algorithm.aggregation, config.loss.name)
        assert found == (credit, advantage, aggregation, loss)
        assert (config.loss.clip_low, config.loss.clip_high) == (float(low), float(high))
    assert {name for name, *_ in rows} == set(PRESETS) - {"rloo"}, "all that clip"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_an_equation_a_source_code_a_curve_and_settings_that_load(page: Path) -> None:
    text = page.read_text()
    curve = [] if page.stem in NO_CURVE else ["Curve"]
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Equation", "Settings", "What differs", *curve]
    assert f"](algorithms/{page.name})" in OVERVIEW.read_text()
    assert "Source: " in text and re.search(r"Code:\s.*\]\(\.\./\.\./src/lightningrl/", text, re.DOTALL)
    for number, address in re.findall(r"\[arXiv ([\d.]+)\]\(([^)]+)\)", text):
        assert address == f"https://arxiv.org/abs/{number}"

    shown = f"](curves/{page.stem}.png)" in text
    assert shown == (page.parent / "curves" / f"{page.stem}.png").is_file() == bool(curve)

    (settings,) = re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    config = make_config(recipe() | tomllib.loads(settings), [], folder=DOCS, where=str(page))
    check_names(config)
    chosen = {config.preset, config.algorithm.credit, config.algorithm.advantage}
    assert chosen & {page.stem, page.stem.replace("_pp", "++")}


@pytest.mark.parametrize("page", [OVERVIEW, *PAGES], ids=lambda page: page.stem)
def test_functions_that_a_page_links_are_in_the_file_that_it_links(page: Path) -> None:
    for names, path in re.findall(r"\[((?:`\w+`(?:, )?)+)\]\((\S+\.py)\)", page.read_text()):
        code = (page.parent / path).read_text()
        assert [
            name
            for name in re.findall(r"`(\w+)`", names)
            if not re.search(rf"^ *(?:async )?def {name}\b", code, re.MULTILINE)
        ] == []
