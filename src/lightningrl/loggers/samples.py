"""Which rollouts are worth a row in a table? A few of each step and of each exam: a service need not hold them all."""

import re
from collections import Counter
from collections.abc import Iterable

from lightningrl.loggers.base import Ended

SAMPLES = 8
"""Rollouts that are shown of a step or of an exam: the first that end."""
PART = re.compile(r"(train|exam)-(\d+)")


class Samples:
    """Counts the rollouts that were shown."""

    def __init__(self) -> None:
        self._shown = Counter[str]()

    def of(self, batch: Iterable[Ended]) -> list[tuple[int, Ended]]:
        """(number of steps taken, rollout) of those to show."""
        chosen: list[tuple[int, Ended]] = []
        for ended in batch:
            if (part := PART.match(ended.rollout.id)) is None:
                continue
            self._shown[part[0]] += 1
            if self._shown[part[0]] <= SAMPLES:
                chosen.append((int(part[2]) + (part[1] == "train"), ended))
        return chosen
