"""The vLLM servers that a run owns: started and ended with it, started again when they die, asleep while it trains.

    serving  → asleep           all engines are paused: keys, values and weights leave the GPU
    asleep   → weights awake    the first engine loads new weights
    weights awake → serving     the first engine resumes
    any      → stopped          the server has died, or did not do what it was told: it is killed
    stopped  → serving          it is started again when it is needed next, and every engine restores its weights

A server that does not fall asleep or wake up properly is killed, which frees its memory for certain.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from enum import Enum
from pathlib import Path
from typing import TypeAlias

import aiohttp
import msgspec

from lightningrl.engine.vllm_flags import HOST, Launch, command, environment
from lightningrl.engine.vllm_process import Say, VLLMProcess, free_port
from lightningrl.errors import EngineError

DEATHS = 3
"""Starts after a death before the run gives up, unless an update has succeeded in between."""
STEP_S = 120.0
"""Timeout for falling asleep and for waking up."""
FREED = 0.5
"""Share of a cache's bytes that a sleeping server must have freed at least."""
GIB = 2**30

Restore: TypeAlias = Callable[[Set[str]], Awaitable[None]]
"""Loads the weights of one engine into the servers at these URLs, which were started again."""

log = logging.getLogger(__name__)


class State(Enum):
    STOPPED = "stopped"
    SERVING = "serving"
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "weights awake"


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class OwnedServer:
    """One server and the state that it is in."""

    def __init__(
        self, launch: Launch, *, env: Mapping[str, str], log: Path, used_bytes: Callable[[], int] | None = None
    ) -> None:
        """`used_bytes` measures the memory that sleep is to free: what is used of the GPU. None: the host memory of the
        server's processes.
        """
        self.launch, self.log = launch, log
        self.state = State.STOPPED
        self._process: VLLMProcess | None = None
        self._port = free_port()
        self._env, self._used_bytes = env, used_bytes
        self._sleeps = launch.sleeps

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        return self._process.ending() if self._process is not None else "never started"

    def tail(self) -> str:
        """The end of its log."""
        return self._process.tail() if self._process is not None else ""

    async def start(self, say: Say) -> None:
        self._process = await VLLMProcess.start(
            command(self.launch, port=self._port),
            env=environment(self.launch, self._env),
            port=self._port,
            log=self.log,
            say=say,
        )
        self.state = State.SERVING

    async def stop(self) -> None:
        self.state = State.STOPPED
        if self._process is not None:
            await self._process.stop()

    async def works(self) -> bool:
        """Whether it runs and is healthy."""
        return self.state is not State.STOPPED and self._process is not None and await self._process.healthy()

    async def sleep(self) -> None:
        """Give the GPU memory to the trainer. Whatever happens, the memory is free then, or the user is told."""
        if self.state is not State.SERVING or not self._sleeps:
            return
        before = self._used()
        try:
            await self._post("/sleep?level=1&mode=wait")
            asleep = (await self._sleeping()).is_sleeping
        except EngineError as error:
            log.warning("vLLM did not fall asleep, so it was ended until the update is done: %s", error.message)
            await self.stop()
            return
        freed = before - self._used()
        self.state = State.ASLEEP
        if not asleep or freed < FREED * self.launch.cache_bytes:
            log.warning(
                "vLLM says that it sleeps, but freed %.1f of %.1f GiB; it stays awake from now on",
                freed / GIB,
                self.launch.cache_bytes / GIB,
            )
            self._sleeps = False
            await self.wake()

    async def wake(self, *, weights_only: bool = False) -> None:
        """Bring weights, or weights and cache, back to the GPU. A server that does not wake up is stopped."""
        if self.state is State.ASLEEP:
            await self._wake("weights", State.WEIGHTS_AWAKE)
        if self.state is State.WEIGHTS_AWAKE and not weights_only:
            await self._wake("kv_cache", State.SERVING)

    async def _wake(self, tag: str, state: State) -> None:
        try:
            await self._post(f"/wake_up?tags={tag}")
            if state is State.SERVING and (await self._sleeping()).is_sleeping:
                raise EngineError("it says that it still sleeps")
        except EngineError as error:
            log.warning("vLLM did not wake up, so it was ended: %s", error.message)
            await self.stop()
        else:
            self.state = state

    def _used(self) -> int:
        if self._used_bytes is not None:
            return self._used_bytes()
        return self._process.resident_bytes() if self._process is not None else 0

    async def _post(self, path: str) -> None:
        await self._request("POST", path)

    async def _sleeping(self) -> _Sleeping:
        return msgspec.json.decode(await self._request("GET", "/is_sleeping"), type=_Sleeping)

    async def _request(self, method: str, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=STEP_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path) as answer,
            ):
                body = await answer.read()
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            raise EngineError(f"`{path}` failed: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise EngineError(f"`{path}` answered {answer.status}: {body[:500].decode(errors='replace')}")
        return body


class Fleet:
    """All owned servers of a run, and the engines that use them. Belongs to one event loop."""

    def __init__(self, servers: Sequence[OwnedServer], *, say: Say) -> None:
        self.servers = tuple(servers)
        self.say = say
        """Receives a line about what is being waited for."""
        self.starts = 0
        """How often servers were started. A change means that a request may have met a server without weights."""
        self.failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """The error with which the fleet has given up."""
        self._restores: list[Restore] = []
        self._policies: set[str] = set()
        self._paused: set[str] = set()
        self._deaths = 0
        self._changing = asyncio.Lock()
        self._awake = asyncio.Event()

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    async def start(self) -> None:
        await asyncio.gather(*(server.start(self.say) for server in self.servers))
        self.starts += 1
        self._awake.set()

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.servers))

    def join(self, policy: str, *, restore: Restore) -> None:
        """Add an engine. `restore` loads its weights into servers that were started again."""
        self._restores.append(restore)
        self._policies.add(policy)

    def leave(self) -> None:
        """An engine was closed: its generations need not wait for the servers any more."""
        self._awake.set()

    async def paused(self, policy: str) -> None:
        """An engine has no generations. If no engine has any, the trainer gets the GPU's memory."""
        self._paused.add(policy)
        async with self._changing:
            if self._policies <= self._paused:
                self._awake.clear()
                await asyncio.gather(*(server.sleep() for server in self.servers))

    async def awake(self) -> None:
        """Wait until the servers serve. Raises `EngineError` if they never will."""
        await self._awake.wait()
        if self.failed.done():
            raise self.failed.result()

    async def ready(self, *, weights_only: bool = False) -> None:
        """Wake the servers up, and start those again that have died. Raises `EngineError` if they keep dying."""
        async with self._changing:
            while True:
                self.say("waking vLLM")
                await asyncio.gather(*(server.wake(weights_only=weights_only) for server in self.servers))
                works = await asyncio.gather(*(server.works() for server in self.servers))
                broken = [server for server, healthy in zip(self.servers, works, strict=True) if not healthy]
                if not broken:
                    break
                self._awake.clear()
                await self._start_again(broken)
            if not weights_only:
                self._awake.set()

    def resumed(self, policy: str) -> None:
        self._paused.discard(policy)

    def updated(self) -> None:
        """New weights were loaded: earlier deaths are forgiven."""
        self._deaths = 0

    async def _start_again(self, broken: Sequence[OwnedServer]) -> None:
        """Start servers again, and load what they have served. They may die at that, too."""
        self._deaths += 1
        endings = ", ".join(dict.fromkeys(server.ending for server in broken))
        if self._deaths > DEATHS:
            tail = broken[0].tail()
            raise self._give_up(f"vLLM died {self._deaths} times since the last update ({endings}):\n{tail}")
        began = time.monotonic()
        self.say(f"vLLM died ({endings}); starting it again")
        try:
            for server in broken:
                await server.stop()
                await server.start(self.say)
            self.starts += 1
            for restore in self._restores:
                await restore({server.url for server in broken})
        except EngineError as error:
            if all([await server.works() for server in broken]):
                raise self._give_up(error.message) from error
            log.warning("vLLM did not start again: %s", error.message)
        else:
            log.warning("vLLM died (%s) and was started again in %.0f s", endings, time.monotonic() - began)

    def _give_up(self, message: str) -> EngineError:
        error = EngineError(message, hint=f"its log: `{self.servers[0].log}`")
        if not self.failed.done():
            self.failed.set_result(error)
        self._awake.set()  # whoever waits gets the error
        return error
