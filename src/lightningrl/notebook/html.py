"""What notebooks show: static HTML with inline styles, without scripts, for light and dark themes.

Text is escaped by markupsafe: `Markup(…).format(…)` escapes all that is not `Markup` itself. What agents and models
said is always inside `said`, which also keeps right-to-left marks inside, and notebooks from typesetting `$…$`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

DIM = "opacity:.65"
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px"
UP, DOWN, PLAIN = "59,130,246", "234,118,0", "139,92,246"
"""Red, green and blue of a colour. Blue and orange differ for colour-blind people, on white and on black."""
LONG = 600
"""Characters of a text that are shown before the rest is folded."""


@dataclass(frozen=True, slots=True)
class Html:
    """A piece of HTML that a notebook shows as a cell's result."""

    markup: Markup = field(repr=False)

    def _repr_html_(self) -> str:
        return str(self.markup)


def frame(*parts: Markup) -> Markup:
    """The outermost element. Its classes keep MathJax away, its colours are the notebook's."""
    style = "font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums;max-width:960px;text-align:left"
    return Markup('<div class="tex2jax_ignore mathjax_ignore" style="{}">{}</div>').format(style, joined(parts))


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def heading(title: str, *facts: str) -> Markup:
    """A bold title, and facts beside it."""
    rest = Markup('<span style="{}"> · {}</span>').format(DIM, " · ".join(facts)) if facts else Markup()
    return Markup('<div style="margin:.6em 0 .3em"><b><bdi>{}</bdi></b>{}</div>').format(title, rest)


def line(text: str, *, dim: bool = False) -> Markup:
    return Markup('<div style="{}"><bdi>{}</bdi></div>').format(DIM if dim else "", text)


def link(url: str, text: str) -> Markup:
    """A link to a page of this machine. `url` is ours; what agents said never becomes a link."""
    return Markup('<div><a href="{}" target="_blank" rel="noopener">{}</a></div>').format(url, text)


def said(text: str) -> Markup:
    """Text by an agent, a model or a program, with its line breaks. The rest of a long one is folded."""
    if len(text) > LONG + 200:
        rest = Markup('<details><summary style="{};cursor:pointer">{:,} more characters</summary>{}</details>')
        return said(text[:LONG]) + rest.format(DIM, len(text) - LONG, _pre(text[LONG:]))
    return _pre(text)


def _pre(text: str) -> Markup:
    style = f"{MONO};white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:0;background:none;color:inherit"
    return Markup('<pre style="{}"><bdi>{}</bdi></pre>').format(style, text)


def turn(who: str, body: Markup) -> Markup:
    """A part of a conversation: who speaks, then what."""
    template = '<div style="display:flex;gap:12px;margin:2px 0"><div style="{}">{}</div><div style="{}">{}</div></div>'
    left = f"{DIM};flex:0 0 104px;text-align:right;overflow-wrap:anywhere"
    return Markup(template).format(left, who, "flex:1;min-width:0", body)


def boxed(*parts: Markup) -> Markup:
    style = "border-left:3px solid rgba(128,128,128,.35);padding:2px 0 4px 12px;margin:8px 0"
    return Markup('<div style="{}">{}</div>').format(style, joined(parts))


def folded(summary: str, body: Markup) -> Markup:
    style = f"{DIM};cursor:pointer"
    return Markup('<details><summary style="{}">{}</summary>{}</details>').format(style, summary, body)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table of texts and numbers. Columns of numbers are on the right; None is empty."""
    sides = ["text-align:" + ("right" if _numeric(column) else "left") for column in zip(*rows, strict=True)]
    dim = f"{DIM};font-weight:normal"
    head = joined(_cell("th", name, f"{dim};{side}") for name, side in zip(columns, sides, strict=True))
    body = joined(
        Markup("<tr>{}</tr>").format(
            joined(_cell("td", figure(value), side) for value, side in zip(row, sides, strict=True))
        )
        for row in rows
    )
    style = "border-collapse:collapse;margin:4px 0;font-size:13px"
    template = '<div style="overflow-x:auto"><table style="{}"><tr>{}</tr>{}</table></div>'
    return Markup(template).format(style, head, body)


def figure(value: object) -> str:
    """A value in a few characters."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _numeric(column: Iterable[object]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in column)


def _cell(kind: str, text: str, style: str) -> Markup:
    shape = "padding:2px 14px 2px 0;vertical-align:top;background:none;border:0;max-width:420px;overflow-wrap:anywhere"
    return Markup('<{} style="{};{}"><bdi>{}</bdi></{}>').format(Markup(kind), shape, style, text, Markup(kind))
