"""A vLLM that a run owns, with faults: it can be slow, hang, answer errors, do half of what it was told, lie, and die.

It is a real HTTP server on the port of its command line. Its weights are a hash (`upstream.py`), and its prefix cache
remembers which weights computed a prefix, so that stale weights and stale keys both show in every sampled token.
"""

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import aiohttp
from aiohttp import web

from lightningrl.engine.vllm_process import Say
from lightningrl.errors import EngineError
from tests.engine.upstream import Row, Upstream

TEXTS = {i: f"<{i}>" for i in range(20)}
BLOCK = 4
"""Tokens of a block of the prefix cache."""
WEIGHTS_BYTES, CACHE_BYTES = 3 * 2**20, 2**20
TAGS = frozenset({"weights", "kv_cache"})

Fault: TypeAlias = Literal[
    "slow", "error", "error after", "half", "half, said done", "not done, said done", "hang", "die before", "die after"
]
"""What happens to one request. `die after`: it is done and answered, then the server dies."""
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(kw_only=True)
class Plan:
    """Which request goes wrong, and how. The requests of all servers are counted together."""

    faults: Mapping[tuple[str, int], Fault] = field(default_factory=dict[tuple[str, int], Fault])
    """(operation, how many came before) → fault."""
    frees: bool = True
    """Whether sleep frees memory."""
    met: Counter[str] = field(default_factory=Counter[str])
    """Operation → number of requests."""
    hit: list[str] = field(default_factory=list[str])
    """The faults that happened."""
    count: int = 0
    """Number of all requests."""
    at: dict[int, Callable[[], object]] = field(default_factory=dict[int, Callable[[], object]])
    """Count of requests → what happens then."""

    def next(self, operation: str) -> Fault | None:
        fault = self.faults.get((operation, self.met[operation]))
        self.met[operation] += 1
        self.count += 1
        self.at.get(self.count, lambda: None)()
        if fault is not None:
            self.hit.append(f"{operation}: {fault}")
        return fault


class FakeVLLM(Upstream):
    """One server. `die` ends it at once."""

    def __init__(self, plan: Plan, *, lora_room: int | None) -> None:
        super().__init__(texts=TEXTS, lora_room=lora_room)
        self.plan = plan
        self.asleep: frozenset[str] = frozenset()
        self.blocks: dict[tuple[str, tuple[int, ...]], str] = {}
        """(model, prefix) → the weights that computed its keys and values."""
        self.dead = asyncio.Event()
        self.awake = asyncio.Event()
        self.awake.set()

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.append(self._faulty)
        app.add_routes(
            [
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.get("/is_sleeping", self._is_sleeping),
                web.get("/health", self._health),
            ]
        )
        return app

    @property
    def resident_bytes(self) -> int:
        gone = self.asleep if self.plan.frees else frozenset()
        return WEIGHTS_BYTES * ("weights" not in gone) + CACHE_BYTES * ("kv_cache" not in gone)

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        tags = request.query.get("tags", "")
        fault = self.plan.next(f"{request.path} {tags}".strip())
        match fault:
            case "error":
                return web.Response(status=500, text="it failed")
            case "hang":
                await self.dead.wait()
            case "die before":
                self.dead.set()
                await asyncio.sleep(0.01)
            case "half" | "half, said done":
                await self._half(request)
                return web.Response(status=500) if fault == "half" else web.json_response({"success": True})
            case "not done, said done":
                return web.json_response({"success": True, "is_sleeping": False})
            case "slow":
                await asyncio.sleep(0.05)
            case _:
                pass
        response = await handler(request)
        if fault == "error after":
            return web.Response(status=500, text="it failed")
        if fault == "die after":
            asyncio.get_running_loop().call_later(0.005, self.dead.set)
        return response

    async def _half(self, request: web.Request) -> None:
        """Only a part of the tensors is written, or only one kind of memory is freed or filled."""
        match request.path:
            case "/collective_rpc":
                self.weights += " and half of others"
            case "/v1/load_lora_adapter":
                self.adapters[(await request.json())["lora_name"]] = "half an adapter"
            case "/sleep":
                self.asleep = frozenset({"kv_cache"})
            case _:
                pass

    async def _sleep(self, request: web.Request) -> web.Response:
        assert dict(request.query) == {"level": "1", "mode": "wait"}
        while self.running:
            await asyncio.sleep(0.005)
        self.asleep = TAGS
        self.awake.clear()
        self.blocks = dict.fromkeys(self.blocks, "nothing: this memory was given away")
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.asleep -= {request.query["tags"]}
        if not self.asleep:
            self.awake.set()
        return web.Response()

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self.asleep)})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        if self.reset:
            self.blocks.clear()
        return await super()._reset_prefix_cache(request)

    async def _rpc(self, request: web.Request) -> web.Response:
        assert "weights" not in self.asleep, "weights are loaded into memory that is not there"
        return await super()._rpc(request)

    async def _load_lora(self, request: web.Request) -> web.Response:
        assert "weights" not in self.asleep, "an adapter is loaded into memory that is not there"
        return await super()._load_lora(request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        await self.awake.wait()
        return await super()._completions(request)

    def _logprobs(self, ids: list[int], *, model: str) -> Row:
        now = self.weights_of(model)
        seen = {self.blocks.setdefault((model, tuple(ids[:n])), now) for n in range(BLOCK, len(ids), BLOCK)}
        if seen <= {now}:
            return super()._logprobs(ids, model=model)
        return self.pure(json.dumps(sorted(seen)))._logprobs(ids, model=model)

    @staticmethod
    def pure(weights: str) -> Upstream:
        """A server that has nothing but these weights."""
        return Upstream(texts=TEXTS, weights=weights)


def weights_in(folder: Path) -> str:
    """The hash of weights in a folder, full or an adapter, as a server has them after loading."""
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
    return "first" + files["adapter_model.safetensors"] if "adapter_config.json" in files else json.dumps(files)


class FakeProcess:
    """A fake vLLM that listens in this process. It passes for a `VLLMProcess`."""

    def __init__(self, fake: FakeVLLM, runner: web.AppRunner, listening: asyncio.Server, *, url: str) -> None:
        self.fake, self.url = fake, url
        self._runner, self._listening = runner, listening
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self.fake.dead.wait()
        self._listening.close()
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=2.0)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def exits(self, *, within_s: float) -> bool:
        await asyncio.wait([self._ending], timeout=within_s)
        return self._ending.done()

    async def stop(self) -> None:
        self.fake.dead.set()
        await self._ending

    def ending(self) -> str:
        return "killed by SIGKILL"

    def resident_bytes(self) -> int:
        return 0 if self.fake.dead.is_set() else self.fake.resident_bytes

    def tail(self) -> str:
        return "the end of its log"


@dataclass(kw_only=True)
class Machine:
    """Starts fakes, and knows all that it has started."""

    plan: Plan
    lora_room: int | None
    fake: type[FakeVLLM] = FakeVLLM
    processes: list[FakeProcess] = field(default_factory=list[FakeProcess])

    async def start(
        self, command: Sequence[str], *, env: Mapping[str, str], port: int, log: Path, say: Say
    ) -> FakeProcess:
        fault = self.plan.next("start")
        say("vLLM is starting")
        await asyncio.sleep(0.02)
        if fault is not None:
            raise EngineError("vLLM ended before it was ready (exit code 1):\nthe end of its log")
        fake = self.fake(self.plan, lora_room=self.lora_room)
        runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        assert runner.server is not None
        listening = await _listening(runner.server, port)
        process = FakeProcess(fake, runner, listening, url=f"http://127.0.0.1:{port}")
        self.processes.append(process)
        return process

    @property
    def alive(self) -> list[FakeVLLM]:
        return [process.fake for process in self.processes if not process.fake.dead.is_set()]


async def _listening(server: web.Server, port: int) -> asyncio.Server:
    """Listen on a port. While no server listened, a connection of another run may have taken it."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
        await asyncio.sleep(0.05)
    raise EngineError("vLLM ended before it was ready (exit code 1):\naddress already in use")


def sampled(weights: str, asked: Mapping[str, Any]) -> Awaitable[list[int]]:
    """The tokens that a server with these weights samples."""

    async def sample() -> list[int]:
        return [token async for token, *_ in FakeVLLM.pure(weights)._sample(dict(asked))]

    return sample()
