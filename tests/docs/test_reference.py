"""The pages of the reference say what the code says."""

import re
import tomllib

import pytest

import lightningrl
from docs_site.reference import PAGES, SOURCE
from tests.docs.blocks import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "write it again: make reference"


def test_the_page_of_http_has_every_path_that_the_gateway_knows() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    sources = "".join(file.read_text() for room in ("gateway", "dialects") for file in SOURCE.rglob(f"{room}/*.py"))
    paths = set(re.findall(r'"(/[a-z_/]{2,}[a-z])"', sources))
    assert {"/chat/completions", "/messages", "/rewards"} <= paths
    assert [path for path in paths if f"{path}`" not in page] == []


def test_the_page_of_python_has_every_public_name() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    public = set(lightningrl.__all__) - {"__version__"}
    assert [name for name in sorted(public) if f"::: lightningrl.{name}\n" not in page] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert set(re.findall(r"'([^']+\.md)'", str(navigation))) == pages
