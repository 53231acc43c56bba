"""The report on the learning signal, as a notebook shows it: warnings and notes above the signals."""

from typing import Any

from markupsafe import Markup

from lightningrl.look.checkup import Checkup, Signal
from lightningrl.notebook.html import heading, joined, line
from lightningrl.notebook.rows import Rows


class Health(Rows[Signal]):
    """The signals of a run, each at the beginning and now, with what they mean."""

    def __init__(self, checkup: Checkup) -> None:
        shown = ("policy", "name", "first", "last")
        super().__init__(checkup.signals, plain=_plain, shown=shown, above=self._told, empty="no step is finished yet")
        self.checkup = checkup
        """The whole report."""

    @property
    def warnings(self) -> list[str]:
        """What is wrong after the last step, each with a hint."""
        return [advice.text for advice in self.checkup.warnings]

    @property
    def notes(self) -> list[str]:
        """What is worth knowing and not wrong."""
        return [advice.text for advice in self.checkup.notes]

    def _told(self) -> Markup:
        parts = [heading("warning", text) for text in self.warnings] + [heading("note", text) for text in self.notes]
        verdict = "no warnings: the run is healthy" if self.checkup.conclusive else "too few steps to tell"
        return joined(parts or [line(verdict)])


def _plain(signal: Signal) -> dict[str, Any]:
    own = {name: getattr(signal, name) for name in ("name", "first", "last", "kind", "metric")}
    return {"policy": signal.policy or None, **own}
