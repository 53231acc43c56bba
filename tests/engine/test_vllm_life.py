"""The whole cycle with a server in a real process: signals kill it, its memory is measured, and none of it is left."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lightningrl.engine import vllm_fleet
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_owned import OwnedVLLM
from lightningrl.engine.vllm_server import OwnedServer, State
from lightningrl.errors import EngineError
from lightningrl.keeper import descendants, parents
from lightningrl.types import Sampling, Weights
from tests.engine.owned import Fault, sampled, weights_in
from tests.engine.test_vllm_fleet import launch, setup_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
TESTS = Path(__file__).parent
CACHE = 64 * 2**20
PROMPT = [1, 2, 3, 5, 8]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_fleet, "DYING_S", 0.05)


class Life:
    """A server with one policy, which trains a little."""

    def __init__(self, server: OwnedServer, fleet: Fleet, folder: Path) -> None:
        self.server, self._folder = server, folder
        self.engine = OwnedVLLM(setup_of("policy"), fleet=fleet)
        self._version = 0

    async def publish(self) -> None:
        self._version += 1
        folder = self._folder / f"{self._version}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(f"{self._version}")
        await self.engine.pause()
        await self.engine.load(Weights(policy="policy", version=self._version, uri=str(folder), kind="lora"))
        await self.engine.resume()

    async def ask(self) -> None:
        """The answer is that of the version that was published last."""
        wanted = Sampling(max_tokens=8, seed=0)
        (delta,) = [delta async for delta in self.engine.generate(PROMPT, sampling=wanted, policy="policy")]
        asked = {"model": "served", "prompt": PROMPT, "seed": 0, "temperature": 1.0, "top_p": 1.0, "max_tokens": 8}
        assert list(delta.token_ids) == await sampled(weights_in(self._folder / f"{self._version}"), asked)

    def kill(self) -> None:
        """Kill the server itself, not its keeper."""
        (process,) = [one for one, line in below().items() if "-m\0vllm." in line and "keeper.py" not in line]
        os.kill(process, signal.SIGKILL)


@asynccontextmanager
async def living(folder: Path, faults: dict[str, Fault] | None = None, **env: str) -> AsyncIterator[Life]:
    path = os.pathsep.join([str(TESTS / "child"), str(TESTS.parent.parent)])
    variables = {**os.environ, **env, "PYTHONPATH": path, "FAULTS": json.dumps(faults or {})}
    server = OwnedServer(replace(launch(lora_room=1), cache_bytes=CACHE), env=variables, log=folder / "vllm.log")
    fleet = Fleet([server], say=lambda what: None)
    try:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(fleet.stop)
            await fleet.start()
            life = Life(server, fleet, folder)
            stack.push_async_callback(life.engine.close)
            yield life
    finally:
        assert not any("vllm" in line for line in below().values()), "a process is left"


def below() -> dict[int, str]:
    """Our descendants: process id → command line, its words separated by zeros."""
    return {
        process: Path(f"/proc/{process}/cmdline").read_text() for process in descendants([os.getpid()], parents())[1:]
    }


async def test_sleep_frees_memory_that_is_measured_and_each_death_is_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with living(tmp_path) as life:
        await life.publish()
        await life.ask()
        await life.engine.pause()
        assert life.server.state is State.ASLEEP and life.server.sleeps, caplog.text
        life.kill()  # asleep
        await life.engine.resume()
        await life.ask()
        life.kill()  # awake
        await asyncio.gather(life.ask(), life.ask())
        await life.publish()
        await life.ask()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("lightningrl")]
    assert len(lines) == 2
    assert all(line.startswith("vLLM died (killed by SIGKILL); it was started again in ") for line in lines), lines


async def test_sleep_that_frees_nothing_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with living(tmp_path, KEEPS="1") as life:
        for _ in range(2):
            await life.publish()
            await life.ask()
            assert life.server.state is State.SERVING and not life.server.sleeps
    (record,) = [record for record in caplog.records if record.name.startswith("lightningrl")]
    assert record.getMessage().startswith("vLLM fell asleep, but freed ")


async def test_a_server_that_dies_whenever_it_loads_is_one_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as raised:
        async with living(tmp_path, {"/v1/load_lora_adapter 0": "die before"}) as life:
            await life.publish()
    assert "At last it died (killed by SIGKILL)" in raised.value.message
    assert raised.value.hint == f"its log: `{tmp_path / 'vllm.log'}`"


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    async def live() -> None:
        async with living(tmp_path):
            pass

    starting = asyncio.create_task(live())
    while not below():
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
