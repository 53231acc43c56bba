"""The README is short, and leads to every page of the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def prose() -> str:
    """The README without code, tables and the targets of links."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^\|[^\n]*$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_it_has_at_most_900_words() -> None:
    assert len(re.findall(r"\w\S*", prose())) <= 900


def test_it_links_to_every_page() -> None:
    pages = {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} - {"docs/index.md"}
    assert pages <= set(re.findall(r"\]\((docs/[^)#]+)", TEXT))


def test_the_files_to_read_first_have_at_most_1600_lines() -> None:
    order = (ROOT / "AGENTS.md").read_text(encoding="utf-8").partition("in this order")[2].partition("\n\nThen ")[0]
    files = re.findall(r"`(src/[^`]+)`", order)
    assert len(files) == 6
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 1600
