"""When could an agent not get on, through no fault of its own? Its server was away, or its machine stood still."""

import asyncio
import math
import time

TICK_S = 1.0
LATE_S = 3.0
"""A tick that is so late was not due to load: the process was stopped, or the machine slept."""


class Outages:
    """The latest outage. Times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._going_on = False
        self._ended = -math.inf

    def begin(self) -> None:
        """The server is away."""
        self._going_on = True

    def end(self) -> None:
        """The server is back."""
        self._going_on, self._ended = False, time.monotonic()

    def since(self, moment: float) -> bool:
        """Was there an outage at any time since `moment`?"""
        return self._going_on or self._ended >= moment

    async def watch(self) -> None:
        """Notice when this process has stood still. Runs until it is cancelled."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            if time.monotonic() - before > TICK_S + LATE_S:
                self._ended = time.monotonic()
