"""Which tokens were likely, and which become likelier? The sampled tokens of a call, coloured by what is recorded."""

import math
from collections.abc import Callable, Mapping, Sequence
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
VISIBLE = {"\n": "⏎\n", "\t": "⇥\t", "": "∅"}
"""Text of a token → what is shown; without it, the token would have no width."""


def coloured(texts: Sequence[str], values: Sequence[float], *, colour: Colour) -> Markup:
    """One element for each token; its title has its text and the value."""
    tokens = joined(_token(text, value, colour) for text, value in zip(texts, values, strict=True))
    style = f"{MONO};white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
    return Markup('<div style="{}">{}</div>').format(style, tokens)


def legend(colour: Colour) -> Markup:
    """What the colours mean."""
    return Markup('<div style="{};font-size:11px">{}: {}</div>').format(DIM, colour, MEANING[colour])


def _token(text: str, value: float, colour: Colour) -> Markup:
    rgb, strength = _SHADES[colour](value)
    shown = VISIBLE.get(text, text.replace("\n", "⏎\n"))
    background = f"background:rgba({rgb},{strength:.2f});border-radius:2px;margin-right:1px"
    return Markup('<bdi style="{}" title="{}">{}</bdi>').format(background, f"{text!r} {colour} {value:+.4g}", shown)


def _advantage(value: float) -> tuple[str, float]:
    """Half of the strength at 1, which is one standard deviation of a group with GRPO."""
    return (UP if value >= 0 else DOWN), 0.8 * abs(value) / (abs(value) + 1)


def _logprob(value: float) -> tuple[str, float]:
    return PLAIN, 0.8 * (1 - math.exp(min(value, 0.0)))


def _ratio(value: float) -> tuple[str, float]:
    """Full strength at a change by a factor of 1.2, where PPO clips (arXiv 1707.06347)."""
    return (UP if value >= 1 else DOWN), 0.8 * min(1.0, abs(math.log(max(value, 1e-9))) / math.log(1.2))


def _entropy(value: float) -> tuple[str, float]:
    """Full strength at 2 nats: as uncertain as between seven tokens of equal probability."""
    return PLAIN, 0.8 * min(1.0, value / 2)


_SHADES: Mapping[Colour, Callable[[float], tuple[str, float]]] = {
    "advantage": _advantage,
    "logprob": _logprob,
    "ratio": _ratio,
    "entropy": _entropy,
}
