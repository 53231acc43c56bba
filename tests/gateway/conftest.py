"""A real gateway on a real socket, with a store in memory and an engine whose answers a test chooses."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.engine.base import Delta
from lightningrl.gateway import Route, create_app
from lightningrl.gateway.app import Gateway
from lightningrl.gateway.server import listening
from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Attempt, Call, FinishReason, Rollout, Sampling, Task, Weights

Script = Callable[[list[int], Sampling], Sequence[int]]


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


class ScriptedEngine:
    """Samples the ids that `script` returns, one token a delta when streaming. Keeps the requests it got."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[tuple[list[int], Sampling, str]] = []
        self.cancelled = 0
        self.delay_s = 0.0
        self.version = 3
        self.logprob = -0.5
        self.finish: FinishReason = "stop"
        self.error: Exception | None = None

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        self.asked.append((list(prompt_ids), sampling, policy))
        ids = tuple(self.script(list(prompt_ids), sampling))
        done = False
        try:
            pieces = [(token,) for token in ids] if stream else [ids]
            for place, piece in enumerate(pieces):
                await asyncio.sleep(self.delay_s)
                last = place == len(pieces) - 1
                if last and self.error is not None:
                    done = True
                    raise self.error
                done = done or last
                yield Delta(
                    token_ids=piece,
                    logprobs=(self.logprob,) * len(piece),
                    policy_version=self.version,
                    finish_reason=self.finish if last else None,
                )
        finally:
            self.cancelled += not done

    async def load(self, weights: Weights) -> None: ...

    async def pause(self, *, timeout_s: float = 60.0) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Stage:
    """A running gateway and its parts."""

    store: SQLiteStore
    template: ChatTemplate
    engine: ScriptedEngine
    gateway: Gateway
    url: str

    async def begin(self, rollout_id: str = "r", **sampling: Any) -> Attempt:
        task = Task(id="t", input={}, split="train")
        await self.store.enqueue([Rollout(id=rollout_id, group_id="g", task=task, sampling=sampling)])
        [(_, attempt)] = await self.store.claim("w", limit=1, lease_s=60)
        return attempt

    async def calls(self, attempt: Attempt) -> list[Call]:
        return await self.store.calls([attempt.id])

    def says(self, *texts: str) -> None:
        """Answer with these texts in turn, the last one forever: canonical token ids, and the end of the turn."""
        left = [[*self.template.encode(text), self.template.turn_end_id or 0] for text in texts]
        self.engine.script = lambda prompt_ids, sampling: left.pop(0) if len(left) > 1 else left[0]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a new socket, as `serve` does."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as sock:
        async with listening(app, sock) as url:
            yield url


@pytest.fixture
async def stage(template: ChatTemplate) -> AsyncIterator[Stage]:
    store = await SQLiteStore.open(":memory:")
    engine = ScriptedEngine(lambda prompt_ids, sampling: ())
    routes = [Route(model="checker", agent="check", policy="frozen"), Route(model="*", policy="policy")]
    gateway = create_app(
        store=store, chat=template, engines={"policy": engine, "frozen": engine}, routes=routes, seed=7, max_length=2000
    )
    async with serving(gateway) as url:
        stage = Stage(store=store, template=template, engine=engine, gateway=gateway, url=url)
        stage.says("hello")
        yield stage
    await store.close()
