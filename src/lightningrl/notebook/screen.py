"""The progress of a training in a notebook's cell: one output that is drawn anew.

It has the learning curve so far, and the lines that the training process writes.
"""

import re
from collections import deque
from typing import Any

from lightningrl.cli.folder import RunFolder
from lightningrl.look.runs import result_of
from lightningrl.notebook.curve import overview, points_of
from lightningrl.notebook.html import Html, folded, frame, link, said

LAST = 3
"""Lines that are shown; all of them can be unfolded."""
KEPT = 2000
"""Lines that are kept."""
PAGE = re.compile(r"page: (http://127\.0\.0\.1:\d+/[\w./#-]*)")
"""The line with the address of the run's page, which is served on this machine while the run goes on."""


class Lines:
    """What the training process has written to stderr."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT)

    def add(self, text: str) -> None:
        """A line; may be called from another thread."""
        self._lines.append(text.rstrip())

    def last(self, count: int = KEPT) -> list[str]:
        return list(self._lines)[-count:]


class Cell:
    """The output of a notebook's cell."""

    def __init__(self, folder: RunFolder, lines: Lines, *, steps: int) -> None:
        self._folder, self._lines, self._steps = folder, lines, steps
        self._drawn = ""
        self._output: Any = None

    def draw(self, *, ended: bool = False) -> None:
        """Show the present state, if it has changed. `ended`: also the result, if there is one."""
        from IPython.display import display  # a notebook has it

        html = self.html(ended=ended)
        if (drawn := html._repr_html_()) == self._drawn:
            return
        self._drawn = drawn
        if self._output is None:
            self._output = display(html, display_id=True)
        else:
            self._output.update(html)

    def html(self, *, ended: bool) -> Html:
        lines, points = self._lines.last(), points_of(self._folder.rows())
        result = result_of(self._folder.path) if ended else None  # before, the file may be half written
        parts = [overview(self._folder.path, points, steps=self._steps, result=result)]
        if not ended:
            parts += [link(found[1], "open the page of this run") for text in lines if (found := PAGE.fullmatch(text))]
        if result is None:
            parts.append(said("\n".join(lines[-LAST:])))
        if len(lines) > LAST:
            parts.append(folded(f"all {len(lines)} lines of its progress", said("\n".join(lines))))
        return Html(frame(*parts))
