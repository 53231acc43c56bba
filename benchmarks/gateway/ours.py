"""Our gateway as `lightningrl train` serves it: SQLite on disk, `VLLMEngine`, no loop, no agents.

Prints its URL, then answers each line of JSON on stdin with a line:

    {"attempts": 3}          → [[id, token], …]
    {"finish": [id, …]}      → true

    python benchmarks/gateway/ours.py FOLDER TOKENIZER UPSTREAM
"""

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from lightningrl.chat import ChatTemplate
from lightningrl.config import AgentConfig, Config, EngineConfig, ModelConfig, TasksConfig
from lightningrl.engines import make_engine
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.server import bound
from lightningrl.models.memory import keep_freed_memory
from lightningrl.store import Store, open_store
from lightningrl.types import Rollout, Task

MAX_LENGTH = 65536
"""Tokens; the same as the upstream reports."""


async def main(folder: Path, tokenizer: Path, upstream: str) -> None:
    config = Config(
        name="gateway",
        agent=AgentConfig(entry="none:run", reward="none:reward"),
        tasks=TasksConfig(source="none:tasks"),
        model=ModelConfig(path=str(tokenizer)),
        engine=EngineConfig(name="vllm", urls=[upstream], max_length=MAX_LENGTH),
    )
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(config.gateway))
        keep_freed_memory()
        template = ChatTemplate.load(tokenizer)
        store = await open_store(f"sqlite://{folder / 'store.sqlite'}", exclusive=True)
        stack.push_async_callback(store.close)
        engine = make_engine(config, "policy", folder=tokenizer, template=template)
        stack.push_async_callback(engine.close)
        gateway = make_gateway(config, store=store, template=template, engines={"policy": engine})
        print(await stack.enter_async_context(opened(gateway, sock)), flush=True)
        numbers = itertools.count()
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _obey(json.loads(line), store, numbers)), flush=True)


async def _obey(order: dict[str, Any], store: Store, numbers: "itertools.count[int]") -> Any:
    if "attempts" in order:
        return await _attempts(store, [f"r{next(numbers)}" for _ in range(order["attempts"])])
    await asyncio.gather(*(store.finish(attempt_id, "succeeded") for attempt_id in order["finish"]))
    return True


async def _attempts(store: Store, names: Sequence[str]) -> list[tuple[str, str]]:
    await store.enqueue(
        [Rollout(id=name, group_id=name, task=Task(id=name, input={"number": name}, split="bench")) for name in names]
    )
    claimed = await store.claim("bench", limit=len(names), lease_s=3600.0)
    assert len(claimed) == len(names), "an attempt of an earlier order was still queued"
    return [(attempt.id, attempt.token) for _, attempt in claimed]


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
