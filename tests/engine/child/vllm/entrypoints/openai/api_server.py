"""A fake vLLM as a process: `python -m vllm.entrypoints.openai.api_server` starts it where this folder is on the path.

The variable FAULTS holds its faults, e.g. `{"/sleep 1": "die before"}`. It has the memory of a cache, and gives it back
when it sleeps, unless the variable KEEPS is set.
"""

import argparse
import asyncio
import json
import os
import signal
from typing import Any

from aiohttp import web

from tests.engine.owned import FakeVLLM, Fault, Plan


class Server(FakeVLLM):
    """A fake with real memory."""

    def __init__(self, plan: Plan, *, lora_room: int | None, cache_bytes: int) -> None:
        super().__init__(plan, lora_room=lora_room)
        self._cache_bytes = cache_bytes
        self._cache = b"x" * cache_bytes

    async def _sleep(self, request: web.Request) -> web.Response:
        response = await super()._sleep(request)
        if "KEEPS" not in os.environ:
            self._cache = b""
        return response

    async def _wake_up(self, request: web.Request) -> web.Response:
        response = await super()._wake_up(request)
        if not self.asleep:
            self._cache = b"x" * self._cache_bytes
        return response


async def serve(arguments: Any) -> None:
    faults: dict[tuple[str, int], Fault] = {}
    for where, fault in json.loads(os.environ.get("FAULTS", "{}")).items():
        operation, _, nth = where.rpartition(" ")
        faults[operation, int(nth)] = fault
    fake = Server(
        Plan(faults=faults),
        lora_room=arguments.max_loras if arguments.enable_lora else None,
        cache_bytes=arguments.kv_cache_memory_bytes,
    )
    runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, arguments.host, arguments.port).start()
    await fake.dead.wait()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--host", "--model"):
        parser.add_argument(name)
    for name in ("--port", "--kv-cache-memory-bytes", "--max-loras"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enable-lora", action="store_true")
    asyncio.run(serve(parser.parse_known_args()[0]))


if __name__ == "__main__":
    main()
