"""A Markdown extension for links from a page into the repository, e.g. `[loss](../src/lightningrl/trainer/losses.py)`.

The site does not hold those files, and the project has no public address yet: the link's text stays, the link goes. A
file that does not exist fails the build.
"""

from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from zensical.extensions.context import ContextPreprocessor

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class RepositoryLinks(Treeprocessor):
    def run(self, root: Element) -> None:
        context = ContextPreprocessor.from_markdown(self.md)
        assert context is not None, "zensical renders the page"
        page = DOCS / PurePosixPath(context.page.path)
        for link in root.iter("a"):
            target = _in_repository(page, link.get("href", ""))
            if target is None:
                continue
            if not target.exists():
                raise FileNotFoundError(
                    f"`{page.relative_to(ROOT)}` links to `{link.get('href')}`, which does not exist"
                )
            link.tag = "span"
            link.attrib = {"title": str(target.relative_to(ROOT))}


def _in_repository(page: Path, href: str) -> Path | None:
    """The file outside of docs/ that a link leads to; None for any other link."""
    url = urlsplit(href)
    if url.scheme or url.netloc or not url.path:
        return None
    target = (page.parent / unquote(url.path)).resolve()
    return None if target.is_relative_to(DOCS) else target


class RepositoryExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(RepositoryLinks(md), "repository", priority=0)  # last: after links are parsed


def makeExtension() -> RepositoryExtension:
    return RepositoryExtension()
