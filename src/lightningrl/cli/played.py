"""What did a recording answer? The facts that `lightningrl run --replay` reports, from the calls that it recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from lightningrl.branches import DIFFERS
from lightningrl.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Counts over all attempts of a command."""

    recorded: int
    """Calls on the recording."""
    played_back: int
    """Of them, those that were asked for."""
    unknown: Sequence[str]
    """The requests that are not on the recording, each with how it differs."""

    @property
    def never_asked(self) -> int:
        return self.recorded - self.played_back

    def as_json(self) -> dict[str, Any]:
        return {
            "recorded": self.recorded,
            "played_back": self.played_back,
            "never_asked": self.never_asked,
            "unknown": list(self.unknown),
        }

    def add_rows(self, table: Table) -> None:
        """Add the lines of the table that `lightningrl run` prints."""
        table.add_row("played back", f"{self.played_back} of {self.recorded} recorded calls")
        if self.never_asked:
            table.add_row("never asked", Text(str(self.never_asked), style="yellow"))
        if self.unknown:
            times = len(self.unknown)
            what = "request that was not recorded" if times == 1 else "requests that were not recorded"
            table.add_row("unknown", Text(f"{times} {what}", style="red"))
            for why in dict.fromkeys(self.unknown):
                table.add_row("", Text(why, style="red"))


def played(calls: Sequence[Call], *, recorded: int) -> Played:
    """`calls`: of all attempts of the command. `recorded`: number of calls on the recording."""
    reasons = [call.capture_reason or "" for call in calls]
    return Played(
        recorded=recorded,
        played_back=len({call.replays for call in calls} - {None}),
        unknown=[reason.removeprefix(DIFFERS) for reason in reasons if reason.startswith(DIFFERS)],
    )
