"""How text reaches a person: as it is. Square brackets are no markup, figures are not coloured, and a line breaks at spaces only."""

from rich.console import Console
from rich.text import Text


def make_console(*, stderr: bool) -> Console:
    """A console that never reads a string as markup: `lightningrl[train]` stays what it is."""
    return Console(stderr=stderr, markup=False, highlight=False)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one message, made of texts and (text, style) pairs. A flag or a path is never broken; in a file or a pipe no line is."""
    text = Text.assemble(*parts)
    if console.is_terminal:
        text.plain = _broken(text.plain, width=console.width)
    console.print(text, soft_wrap=True)


def _broken(plain: str, *, width: int) -> str:
    """Newlines in the place of some spaces, so that lines fit as far as words do. Its length stays, and styles stay where they were."""
    lines: list[str] = []
    for line in plain.split("\n"):
        rest = line
        while len(rest) > width:
            indent = len(rest) - len(rest.lstrip())
            cut = rest.rfind(" ", indent, width + 1)
            if cut < 0:
                cut = rest.find(" ", max(indent, width))
            if cut < 0:
                break
            lines.append(rest[:cut])
            rest = rest[cut + 1 :]
        lines.append(rest)
    return "\n".join(lines)
