"""A Markdown extension for links that read well in the repository, but not on the site.

- `[loss](../src/lightningrl/trainer/losses.py)` leads out of the site, and the project has no public address yet. The
  text stays, with the path as its title. A file that does not exist fails the build.
- `[settings.md](settings.md)` gets the page's name in the navigation as its text.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class RepositoryLinks(Treeprocessor):
    def __init__(self, md: Markdown) -> None:
        super().__init__(md)
        navigation = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
        self._names = {DOCS / page: name for name, page in _pages(navigation)}

    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        assert context is not None, "zensical renders the page"
        page = DOCS / PurePosixPath(context.page.path)
        for link in root.iter("a"):
            href = urlsplit(link.get("href", ""))
            if href.scheme or href.netloc or not href.path:
                continue
            target = (page.parent / unquote(href.path)).resolve()
            if not target.is_relative_to(DOCS):
                _take_out(link, target, page)
            elif (link.text or "").endswith(".md"):
                link.text = self._names.get(target, link.text)


def _pages(navigation: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Name and file of each page, e.g. ("Settings", "settings.md")."""
    for entry in navigation:
        for name, below in entry.items():
            if isinstance(below, str):
                yield name, below
            else:
                yield from _pages(below)


def _take_out(link: Element, target: Path, page: Path) -> None:
    if not target.exists():
        raise FileNotFoundError(f"`{page.relative_to(ROOT)}` links to `{link.get('href')}`, which does not exist")
    link.tag = "span"
    link.attrib = {"class": "repository", "title": str(target.relative_to(ROOT))}


class RepositoryExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(RepositoryLinks(md), "repository", priority=0)  # last: after links are parsed


def makeExtension() -> RepositoryExtension:
    return RepositoryExtension()
