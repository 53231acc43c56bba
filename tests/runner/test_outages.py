"""An attempt that fails while the server is away, or while its worker is stopped, is lost. Its agent is not blamed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import pytest

from lightningrl.leases import Outcome
from lightningrl.runner.conformance import attempt
from lightningrl.runner.outages import Outages
from lightningrl.runner.relay import Relay
from lightningrl.runner.remote_worker import RelayedRunner
from lightningrl.types import Attempt, AttemptStatus, Rollout


class Meanwhile:
    """A runner whose attempts end so, after something has happened."""

    def __init__(self, outcome: Outcome, event: Callable[[], None]) -> None:
        self._outcome = outcome
        self._event = event

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, rollout: Rollout, attempt: Attempt, env: Mapping[str, str]) -> Outcome:
        self._event()
        return self._outcome


@pytest.mark.parametrize(
    ("status", "error", "reported"),
    [
        ("timeout", "AgentError: timed out", "lost"),
        ("failed", "AgentError: ConnectionError", "lost"),
        ("failed", "GraderError: ValueError", "failed"),
        ("succeeded", None, "succeeded"),
    ],
)
@pytest.mark.parametrize("back", [True, False])
async def test_the_agent_is_not_blamed_for_an_outage(
    status: AttemptStatus, error: str | None, reported: str, back: bool
) -> None:
    outages = Outages()

    def away() -> None:
        outages.begin()
        if back:
            outages.end()

    ended = Outcome(status=status, error=error)
    async with Relay("http://127.0.0.1:9") as relay:
        runner = RelayedRunner(Meanwhile(ended, away), relay, outages)
        assert (await runner.run(*attempt({}, name="1", timeout_s=9.0))).status == reported


async def test_an_outage_before_an_attempt_excuses_nothing() -> None:
    outages = Outages()
    outages.begin()
    outages.end()
    await asyncio.sleep(0.01)
    ended = Outcome(status="timeout", error="AgentError: timed out")
    async with Relay("http://127.0.0.1:9") as relay:
        runner = RelayedRunner(Meanwhile(ended, lambda: None), relay, outages)
        assert (await runner.run(*attempt({}, name="1", timeout_s=9.0))).status == "timeout"


STANDS = """
import asyncio, time
from lightningrl.runner.outages import Outages

async def main():
    outages, began = Outages(), time.monotonic()
    watching = asyncio.create_task(outages.watch())
    await asyncio.sleep(0.1)
    print("running", flush=True)
    await asyncio.sleep(2.5)
    print(outages.since(began), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped_s", [0.0, 6.0])
def test_a_stopped_process_is_an_outage(stopped_s: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", STANDS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    if stopped_s:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(process.pid, signal.SIGCONT)
    said, _ = process.communicate(timeout=30)
    assert said.strip() == str(stopped_s > 0)
