"""How text reaches a person: as it is. Square brackets are no markup, figures are not coloured, and a line breaks at
spaces only.

Agents and models may say anything, also what a terminal would obey: control characters are shown as symbols.
"""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

VISIBLE = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},  # ESC becomes ␛
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Control character → the symbol that is shown."""


class PlainConsole(Console):
    """Never reads a string as markup, and hands a terminal no control characters but its own."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(VISIBLE), style, control)


def make_console(*, stderr: bool) -> Console:
    """A console for text of any origin."""
    return PlainConsole(stderr=stderr)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one message, made of texts and (text, style) pairs. A flag or a path is never broken; in a file or a pipe
    no line is.
    """
    text = Text.assemble(*parts)
    if console.is_terminal:
        text.plain = _broken(text.plain, width=console.width)
    console.print(text, soft_wrap=True)


def _broken(plain: str, *, width: int) -> str:
    """Newlines in the place of some spaces, so that lines fit as far as words do. Its length stays, and styles stay
    where they were.
    """
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
