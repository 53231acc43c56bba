"""One vLLM server that a run owns: the state that it is in, and the steps from one state to another.

A step is measured, not believed: sleep must free memory, and a prefix cache must say that it is empty. A server that
fails in a step is ended. That frees its memory for certain, and leaves no server with weights or keys in doubt.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from lightningrl.engine.vllm_flags import HOST, Launch, command, environment
from lightningrl.engine.vllm_process import Say, VLLMProcess, free_port
from lightningrl.errors import EngineError

STEP_S = 120.0
"""Timeout for falling asleep and for waking up."""
EXITING_S = 2.0
"""A server whose engine has died exits by itself within this time (vLLM 0.32: 1.1 s)."""
FREED = 0.5
"""Share of a cache's bytes that a sleeping server must have freed at least."""
GIB = 2**30

_Answer = TypeVar("_Answer")

log = logging.getLogger(__name__)


class State(IntEnum):
    """The state of a server, and what an engine wants of it. The more it can do, the larger."""

    STOPPED = 0
    """It does not run, or does not have the weights of its engines."""
    ASLEEP = 1
    """Its weights are in the host's memory; its cache is gone."""
    WEIGHTS_AWAKE = 2
    """It can load weights, but not generate."""
    SERVING = 3


class Process(Protocol):
    """A running server, as `VLLMProcess` is one."""

    async def healthy(self) -> bool: ...

    async def exits(self, *, within_s: float) -> bool: ...

    async def stop(self) -> None: ...

    def ending(self) -> str: ...

    def resident_bytes(self) -> int: ...

    def tail(self) -> str: ...


class Starter(Protocol):
    """Starts a server and waits until it is healthy, as `VLLMProcess.start` does."""

    async def __call__(
        self, command: Sequence[str], *, env: Mapping[str, str], port: int, log: Path, say: Say
    ) -> Process: ...


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _Reset(msgspec.Struct):
    success: bool


class OwnedServer:
    """One server and the state that it is in. Its steps are not for two callers at a time."""

    def __init__(
        self,
        launch: Launch,
        *,
        env: Mapping[str, str],
        log: Path,
        used_bytes: Callable[[], int] | None = None,
        starter: Starter = VLLMProcess.start,
    ) -> None:
        """`used_bytes` measures the memory that sleep is to free: what is used of the GPU. None: the host memory of the
        server's processes.
        """
        self.launch, self.log = launch, log
        self.state = State.STOPPED
        self.sleeps = launch.sleeps
        """Whether it gives memory back when it sleeps. False once it has not."""
        self.losses = 0
        """How often it was lost."""
        self.why = "was never started"
        """What it did when it was last lost, for people: `died (exit code 1)`, and the end of its log."""
        self._process: Process | None = None
        self._port = free_port()
        self._env, self._used_bytes, self._starter = env, used_bytes, starter

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    async def start(self, say: Say) -> None:
        """Start it, with the model's own weights. It stays `STOPPED` until its engines have loaded theirs."""
        await self.stop()
        self._process = None
        self._process = await self._starter(
            command(self.launch, port=self._port),
            env=environment(self.launch, self._env),
            port=self._port,
            log=self.log,
            say=say,
        )

    async def stop(self) -> None:
        self.state = State.STOPPED
        if self._process is not None:
            await self._process.stop()

    async def lose(self, why: str) -> None:
        """End it, because of what it did: it `died`, or `did not wake up: …`."""
        self.losses += 1
        self.state, self.why = State.STOPPED, why
        if self._process is not None:
            if await self._process.exits(within_s=EXITING_S):
                why = f"died ({self._process.ending()})"
            self.why = f"{why}:\n{self._process.tail()}"
        await self.stop()

    async def check(self) -> None:
        """Find out whether it has died."""
        if self.state is not State.STOPPED and self._process is not None and not await self._process.healthy():
            await self.lose("answers no health check")

    async def sleep(self) -> None:
        """SERVING → ASLEEP. A server that frees no memory is woken up again, and stays awake from now on."""
        if self.state is not State.SERVING or not self.sleeps:
            return
        before = self._used()
        await self._step(self._request("POST", "/sleep?level=1&mode=wait"), to=State.ASLEEP, what="fall asleep")
        if self.state is not State.ASLEEP:
            return
        freed = before - self._used()
        if freed < FREED * self.launch.cache_bytes:
            expected = self.launch.cache_bytes / GIB
            log.warning(
                "vLLM fell asleep, but freed %.1f of %.1f GiB; from now on it stays awake", freed / GIB, expected
            )
            self.sleeps = False
            await self.wake_weights()
            await self.wake_cache()

    async def wake_weights(self) -> None:
        """ASLEEP → WEIGHTS_AWAKE."""
        if self.state is State.ASLEEP:
            await self._step(self._request("POST", "/wake_up?tags=weights"), to=State.WEIGHTS_AWAKE, what="wake up")

    async def wake_cache(self) -> None:
        """WEIGHTS_AWAKE → SERVING, with an empty prefix cache."""
        if self.state is State.WEIGHTS_AWAKE:
            await self._step(self._wake_cache(), to=State.SERVING, what="wake up")

    async def _wake_cache(self) -> None:
        if not (await self._ask("POST", "/reset_prefix_cache", _Reset)).success:
            raise EngineError("its prefix cache cannot be emptied")
        await self._request("POST", "/wake_up?tags=kv_cache")
        if (await self._ask("GET", "/is_sleeping", _Sleeping)).is_sleeping:
            raise EngineError("it says that it still sleeps")

    async def _step(self, work: Awaitable[object], *, to: State, what: str) -> None:
        try:
            await work
        except EngineError as error:
            await self.lose(f"did not {what}: {error.message}")
        else:
            self.state = to

    def _used(self) -> int:
        if self._used_bytes is not None:
            return self._used_bytes()
        return self._process.resident_bytes() if self._process is not None else 0

    async def _ask(self, method: str, path: str, kind: type[_Answer]) -> _Answer:
        body = await self._request(method, path)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the answer of `{path}` cannot be read: {error}") from error

    async def _request(self, method: str, path: str) -> bytes:
        timeout = aiohttp.ClientTimeout(total=STEP_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path) as answer,
            ):
                body = await answer.read()
        except TimeoutError as error:
            raise EngineError(f"`{path}` gave no answer within {STEP_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"`{path}` failed: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise EngineError(f"`{path}` answered {answer.status}: {body[:500].decode(errors='replace')}")
        return body
