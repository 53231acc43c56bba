"""Check every link of the built site: `python docs_site/links.py site`.

Links and pictures inside the site must lead to a file of it, and fragments to an id on that page. Links to other
servers must be well-formed; nothing is fetched. Exits with 1 if a link is broken.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SKIPPED = {"404.html"}
"""Pages that the theme makes: their links are absolute and depend on where the site is served."""


@dataclass
class Page(HTMLParser):
    """The links and the ids of one page."""

    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := values.get(name))}
        if tag != "link" or values.get("rel") != "canonical":
            self.links += [value for name in ("href", "src") if (value := values.get(name)) is not None]


def read_pages(site: Path) -> dict[Path, Page]:
    pages = {}
    for file in sorted(site.rglob("*.html")):
        if str(file.relative_to(site)) in SKIPPED:
            continue
        pages[file] = Page()
        pages[file].feed(file.read_text(encoding="utf-8"))
    return pages


def broken_links(pages: Mapping[Path, Page]) -> Iterator[str]:
    for file, page in pages.items():
        for link in page.links:
            if (wrong := _wrong(file, link, pages)) is not None:
                yield f"{file}: `{link}` {wrong}"


def _wrong(file: Path, link: str, pages: Mapping[Path, Page]) -> str | None:
    """What is wrong with a link on the page `file`; None: nothing."""
    url = urlsplit(link)
    if url.scheme in ("http", "https"):
        return None if "." in (url.hostname or "") and " " not in link else "is no well-formed address"
    if url.scheme:
        return None if url.scheme in ("mailto", "data") else "has an unknown scheme"
    target = (file.parent / unquote(url.path)).resolve() if url.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "leads to no file of the site"
    if url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
        return "leads to no id on that page"
    return None


def main(site: Path) -> int:
    pages = read_pages(site.resolve())
    broken = list(broken_links(pages))
    for line in broken:
        print(f"error: {line}", file=sys.stderr)
    print(f"{sum(len(page.links) for page in pages.values())} links on {len(pages)} pages, {len(broken)} broken")
    return 1 if broken or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
