"""A server without a model, as `lightningrl train --listen` serves workers: store, leases, gateway, a script as model.

Prints {"port", "key_file"}, then answers each line of JSON on stdin with a line:

    {"enqueue": 3, "calls": 0, "name": "a"}   → seconds of the monotonic clock, before they are stored
    {"one_by_one": 50, "name": "b"}           → [seconds from enqueued to ended, …], one rollout after another
    {"count": true}                           → {status: number of rollouts}

    python benchmarks/crowd/server.py FOLDER [KEY=VALUE …]
"""

import asyncio
import json
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightningrl.recipe import load_config
from lightningrl.serve import LightningServer, relaying
from lightningrl.store import wait
from lightningrl.types import Rollout, Task

RECIPE = Path(__file__).parent / "recipe" / "recipe.toml"


async def main(folder: Path, overrides: Sequence[str]) -> None:
    sys.path.insert(0, str(RECIPE.parent))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with relaying(load_config(RECIPE, overrides), folder) as server:
        print(json.dumps({"port": server.port, "key_file": str(folder / "worker.key")}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _obey(json.loads(line), server)), flush=True)


async def _obey(order: dict[str, Any], server: LightningServer) -> Any:
    match order:
        case {"enqueue": count, "name": name}:
            made, began = rollouts(name, count, calls=order.get("calls", 0)), time.monotonic()
            await server.store.enqueue(made)
            return began
        case {"one_by_one": count, "name": name}:
            return [await _one(server, rollout) for rollout in rollouts(name, count, calls=order.get("calls", 0))]
        case _:
            return dict(await server.store.count())


async def _one(server: LightningServer, rollout: Rollout) -> float:
    began = time.monotonic()
    await server.store.enqueue([rollout])
    [ended] = await wait(server.store, [rollout.id], timeout_s=60.0)
    assert ended.status == "succeeded", ended
    return time.monotonic() - began


def rollouts(name: str, count: int, *, calls: int) -> list[Rollout]:
    return [
        Rollout(
            id=f"{name}-{number:05d}",
            group_id=name,
            task=Task(id=str(number), input={"number": number, "calls": calls}, split="bench"),
            max_attempts=3,
        )
        for number in range(count)
    ]


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
