"""Which tokens were likely, and which become likelier? The sampled tokens of a call, coloured by what is recorded."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from markupsafe import Markup

from lightningrl.notebook.html import DIM, DOWN, MONO, PLAIN, UP, joined

Colour: TypeAlias = Literal["advantage", "logprob", "ratio", "entropy"]

MEANING: Mapping[Colour, str] = {
    "advantage": "blue becomes more likely, orange less likely",
    "logprob": "the stronger, the less likely the token was",
    "ratio": "blue became more likely in this step, orange less likely",
    "entropy": "the stronger, the less certain the model was",
}
RARE = math.log(100)
LEAST: Mapping[Colour, float] = {"advantage": 1.0, "ratio": math.log(1.2), "entropy": 1.0}
VISIBLE = {"\n": "⏎\n", "\t": "⇥\t", "": "∅"}
"""Text of a token → what is shown; without it, the token would have no width."""


def coloured(texts: Sequence[str], values: Sequence[float], *, colour: Colour) -> Markup:
    """One element for each token; its title has its text and the value."""
    strengths = heats(values, colour=colour)
    tokens = joined(_token(*token, colour) for token in zip(texts, values, strengths, strict=True))
    style = f"{MONO};white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
    return Markup('<div style="{}">{}</div>').format(style, tokens)


def legend(colour: Colour) -> Markup:
    """What the colours mean."""
    return Markup('<div style="{};font-size:11px">{}: {}</div>').format(DIM, colour, MEANING[colour])


def _token(text: str, value: float, heat: float, colour: Colour) -> Markup:
    rgb = PLAIN if colour in ("logprob", "entropy") else UP if heat >= 0 else DOWN
    shown = VISIBLE.get(text, text.replace("\n", "⏎\n"))
    background = f"background:rgba({rgb},{0.8 * abs(heat):.2f});border-radius:2px;margin-right:1px"
    return Markup('<bdi style="{}" title="{}">{}</bdi>').format(background, f"{text!r} {colour} {value:+.4g}", shown)


def heats(values: Sequence[float], *, colour: Colour) -> list[float]:
    """How strong each token's colour is, from -1 (orange) or 0 to 1: the scales of the page (`parts/colours.js`).

    The full colour is a probability of 1 % and less for `logprob`. For the others it is the call's largest value, but
    at least an advantage of 1, a ratio of 1.2 (where PPO clips, arXiv 1707.06347), or an entropy of 1 nat.
    """
    if colour == "logprob":
        return [min(1.0, max(0.0, -value / RARE)) for value in values]
    sizes = [math.log(max(value, 1e-9)) for value in values] if colour == "ratio" else values
    full = max(LEAST[colour], *(abs(size) for size in sizes)) if sizes else 1.0
    return [size / full for size in sizes]
