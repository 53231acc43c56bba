"""Links of the built site that lead nowhere are found."""

from pathlib import Path

import pytest

from docs_site.links import main

PAGE = '<h2 id="here">Here</h2><a href="../">home</a><img src="../picture.png"><a href="#here">up</a>'


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("../#top", False),
        ("../other/#here", False),
        ("https://example.com/a", False),
        ("../nothing/", True),
        ("../#nothing", True),
        ("nothing.png", True),
        ("https://", True),
        ("javascript:open()", True),
    ],
)
def test_a_link_leads_to_a_page_and_to_a_heading_of_it(tmp_path: Path, link: str, broken: bool) -> None:
    for folder in ("page", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "index.html").write_text(PAGE)
    (tmp_path / "picture.png").touch()
    (tmp_path / "index.html").write_text('<h1 id="top">Top</h1><a href="page/">page</a>')
    with (tmp_path / "page" / "index.html").open("a") as page:
        page.write(f'<a href="{link}">link</a>')
    assert main(tmp_path) == broken


def test_a_site_without_pages_is_broken(tmp_path: Path) -> None:
    assert main(tmp_path) == 1
