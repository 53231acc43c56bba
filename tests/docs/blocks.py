"""The code blocks of the documentation, with what a comment above a block says of it.

    <!-- code: not run: it needs a GPU -->    a block that cannot run here; it is counted, with the reason
    <!-- code: of recipes/x/agent.py -->      an excerpt: its lines are lines of that file, in the same order

`python -m tests.docs.blocks` prints how many blocks there are of each kind.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/*.md")])
GENERATED = {ROOT / "docs" / "cli.md"}
"""Pages whose blocks are usage lines with placeholders."""

BLOCK = re.compile(r"^(?:<!-- code: (.+?) -->\n)?^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "sh", "console")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    note: str
    """What the comment above it says; empty: there is none."""
    code: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that a Python block is, e.g. `agent.py`: its first line names it. None: no file."""
        found = re.match(r"# (\w+\.py)\n", self.code)
        return found and found[1]

    @property
    def not_run(self) -> str | None:
        """Why it cannot run; None: it runs."""
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else None

    @property
    def source(self) -> Path | None:
        """The file that it is an excerpt of; None: it is not."""
        return ROOT / self.note.removeprefix("of ") if self.note.startswith("of ") else None


def blocks(*languages: str) -> list[Block]:
    """All blocks in one of the languages, page by page."""
    return [
        Block(page=page, line=_line(text, found.start(3)), language=found[2], note=found[1] or "", code=found[3])
        for page in PAGES
        if page not in GENERATED
        for text in [page.read_text(encoding="utf-8")]
        for found in BLOCK.finditer(text)
        if found[2] in languages
    ]


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def main() -> None:
    for name, languages in (("Python", ("python",)), ("TOML", ("toml",)), ("shell", SHELL), ("JSON", ("json",))):
        found = blocks(*languages)
        left_out = [block for block in found if block.not_run]
        done = Counter("excerpts of a file" if block.source else "checked" for block in found if not block.not_run)
        counts = ", ".join(f"{count} {kind}" for kind, count in [*done.items(), ("not run", len(left_out))])
        print(f"{len(found)} {name} blocks: {counts}")
        for block in left_out:
            print(f"  {block.where}: {block.not_run}")


if __name__ == "__main__":
    main()
