"""The learning curve as a picture: the reward of every training step, and the held-out exams with their intervals."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from lightningrl.notebook.html import DOWN, UP, joined, line

WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 26, 24
"""Margins of the plot."""

Dot = tuple[float, float, float | None, float | None]
"""(step, mean reward, and the ends of its interval)."""


def chart(training: Sequence[tuple[float, float]], heldout: Sequence[Dot], *, steps: int) -> Markup:
    """An SVG picture. `training`: (step, mean reward). `steps`: of the whole run, the right end."""
    values = [y for _, y in training] + [y for _, *ys in heldout for y in ys if y is not None]
    if not values:
        return line("no step is finished yet", dim=True)
    plot = _Plot(steps=max(steps, 1), low=min(0.0, *values), high=max(1.0, *values))
    parts = [*plot.axes(), plot.path(training, DOWN, width=1.5), plot.path([dot[:2] for dot in heldout], UP, width=2)]
    parts += [plot.dot(dot) for dot in heldout]
    heldout_label = "━● held-out reward" + (", 95 % interval" if any(low is not None for *_, low, _ in heldout) else "")
    parts += [_label(LEFT, 14, heldout_label, UP), _label(LEFT + 220, 14, "━ training reward", DOWN)]
    box = f"0 0 {WIDTH} {HEIGHT}"
    style = "width:100%;max-width:640px;height:auto;display:block"
    return Markup('<svg viewBox="{}" role="img" aria-label="learning curve" style="{}">{}</svg>').format(
        box, style, joined(parts)
    )


class _Plot:
    """From steps and rewards to places in the picture."""

    def __init__(self, *, steps: int, low: float, high: float) -> None:
        self._steps, self._low, self._high = steps, low, high

    def place(self, step: float, reward: float) -> tuple[float, float]:
        across, up = step / self._steps, (reward - self._low) / (self._high - self._low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[Markup]:
        parts: list[Markup] = []
        for reward in (self._low, (self._low + self._high) / 2, self._high):
            _, y = self.place(0, reward)
            parts.append(_stroke(f"M{LEFT} {y:.1f}H{WIDTH - RIGHT}", "128,128,128", width=0.5))
            parts.append(_label(LEFT - 6, y + 4, f"{reward:.3g}", None, anchor="end"))
        every = max(1, math.ceil(self._steps / 10))
        for step in range(0, self._steps + 1, every):
            x, _ = self.place(step, 0)
            parts.append(_label(x, HEIGHT - 6, f"step {step}" if step == 0 else str(step), None, anchor="middle"))
        return parts

    def path(self, points: Sequence[tuple[float, ...]], rgb: str, *, width: float) -> Markup:
        places = [self.place(step, reward) for step, reward in points]
        return _stroke("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), rgb, width=width) if places else Markup()

    def dot(self, dot: Dot) -> Markup:
        step, reward, low, high = dot
        x, y = self.place(step, reward)
        told = f"after {step:g} steps: {reward:.3f}"
        bar = Markup()
        if low is not None and high is not None:
            told += f" [{low:.3f}, {high:.3f}]"
            bar = _stroke(f"M{x:.1f} {self.place(step, low)[1]:.1f}V{self.place(step, high)[1]:.1f}", UP, width=1)
        circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="rgb({})"><title>{}</title></circle>')
        return bar + circle.format(x, y, UP, told)


def _stroke(path: str, rgb: str, *, width: float) -> Markup:
    return Markup('<path d="{}" fill="none" stroke="rgb({})" stroke-width="{}"/>').format(path, rgb, width)


def _label(x: float, y: float, text: str, rgb: str | None, *, anchor: str = "start") -> Markup:
    colour = "currentColor" if rgb is None else f"rgb({rgb})"
    template = '<text x="{:.1f}" y="{:.1f}" font-size="11" fill="{}" text-anchor="{}">{}</text>'
    return Markup(template).format(x, y, colour, anchor, text)
