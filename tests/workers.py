"""A server that workers on other machines can reach: a real gateway on a real port, a store, and a scripted engine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import lightningrl
from lightningrl.chat import ChatTemplate
from lightningrl.gateway import create_app
from lightningrl.gateway.scripted import PLAIN, ScriptedEngine
from lightningrl.gateway.server import Certificate, listening
from lightningrl.gateway.workers import Workers
from lightningrl.leases import Grade, StoreLeases
from lightningrl.remote.wire import Copy
from lightningrl.store import Store, open_store, wait
from lightningrl.types import Rollout, Task

KEY = "lrl-worker-test"


COPY = Copy(files={"agent.py": "a"}, agent={"entry": "agent:run"})


@dataclass
class Server:
    """A server that can be ended and started again on the same port, with the same store."""

    path: Path
    port: int
    lease_s: float = 60.0
    copy: Copy = COPY
    certificate: Certificate | None = None
    grade: Grade | None = None
    store: Store = field(init=False)
    workers: Workers = field(init=False)

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def up(self) -> AsyncIterator["Server"]:
        template = ChatTemplate.load(PLAIN)
        engine = ScriptedEngine(lambda prompt, messages, tools: "hello", template)
        self.store = await open_store(f"sqlite://{self.path}", exclusive=True)
        self.workers = Workers(key=KEY, recipe="r", version=lightningrl.__version__, copy=_soon(self.copy))
        gateway = create_app(
            store=self.store, chat=template, engines={"policy": engine}, max_length=999, workers=self.workers
        )
        leases = StoreLeases(self.store, lease_s=self.lease_s, grade=self.grade)
        with socket.create_server(("127.0.0.1", self.port)) as sock:
            self.port = sock.getsockname()[1]
            async with listening(gateway, sock, certificate=self.certificate):
                await leases.resume()
                giving = asyncio.create_task(leases.run())
                self.workers.leases = leases
                try:
                    yield self
                finally:
                    self.workers.close()
                    giving.cancel()
                    await asyncio.gather(giving, return_exceptions=True)
                    await leases.close()
        await self.store.close()

    async def enqueue(self, *names: str, labels: Sequence[str] = (), question: str = "") -> None:
        task = Task(id="t", input={"question": question}, split="train")
        await self.store.enqueue([Rollout(id=name, group_id="g", task=task, labels=tuple(labels)) for name in names])


async def _soon(copy: Copy) -> Copy:
    return copy


async def ended(server: Server, *names: str) -> list[str]:
    return [rollout.status for rollout in await wait(server.store, names, timeout_s=10)]
