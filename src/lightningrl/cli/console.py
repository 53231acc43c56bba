"""Text on the screen, printed as it is: no markup, no coloured numbers, and lines break at spaces only.

The text of agents and models may have control characters that a terminal would obey. They are shown as symbols.
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
    """A console that reads no string as markup, and sends no control characters but its own."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(VISIBLE), style, control)


def make_console(*, stderr: bool) -> Console:
    return PlainConsole(stderr=stderr)


def say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print one message, made of texts and (text, style) pairs.

    In a terminal, lines break at spaces, so that flags and paths stay whole. In a file or a pipe they do not break.
    """
    text = Text.assemble(*parts)
    if console.is_terminal:
        text.plain = _broken(text.plain, width=console.width)
    console.print(text, soft_wrap=True)


def advise(console: Console, label: str, style: str, advice: str) -> None:
    """Print `label: ` and the text; below it the hint, which follows `; hint: ` in `advice`."""
    text, _, hint = advice.partition("; hint: ")
    say(console, (f"{label}: ", style), text)
    if hint:
        say(console, ("  hint: ", "yellow"), hint)


def _broken(plain: str, *, width: int) -> str:
    """The text with some spaces replaced by newlines, so that lines fit. Its length and its styles stay the same."""
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
