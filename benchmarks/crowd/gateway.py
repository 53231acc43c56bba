"""One of several gateways before one store: it gives out attempts, which are its own, and answers their calls.

Prints its port, and serves until stdin is closed.

    python benchmarks/crowd/gateway.py FOLDER STORE NAME LEASE_S
"""

import asyncio
import resource
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import lightningrl
from lightningrl.chat import ChatTemplate
from lightningrl.config import GatewayConfig
from lightningrl.engines import make_engine
from lightningrl.gateway.assembly import make_gateway, opened
from lightningrl.gateway.scripted import PLAIN
from lightningrl.gateway.server import bound
from lightningrl.gateway.workers import Workers, worker_key
from lightningrl.leases import StoreLeases
from lightningrl.recipe import load_config
from lightningrl.remote.wire import Copy
from lightningrl.store import open_store

RECIPE = Path(__file__).parent / "recipe" / "recipe.toml"


async def main(folder: Path, url: str, name: str, *, lease_s: float) -> None:
    sys.path.insert(0, str(RECIPE.parent))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config = load_config(RECIPE, ["engine.name=agent:slow_script"])
    async with AsyncExitStack() as stack:
        sock = stack.enter_context(bound(GatewayConfig(port=0)))
        template = ChatTemplate.load(PLAIN)
        store = await open_store(url)
        stack.push_async_callback(store.close)
        engines = {"policy": make_engine(config, "policy", folder=PLAIN, template=template)}
        workers = Workers(key=worker_key(folder), recipe=config.name, version=lightningrl.__version__, copy=_no_files())
        gateway = make_gateway(config, store=store, template=template, engines=engines, workers=workers, name=name)
        await stack.enter_async_context(opened(gateway, sock))
        leases = StoreLeases(store, lease_s=lease_s, gateway=name)
        workers.leases = leases
        giving = asyncio.create_task(leases.run())
        print(sock.getsockname()[1], flush=True)
        reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([giving, reading], return_when=asyncio.FIRST_COMPLETED)
        giving.cancel()
        workers.close()


async def _no_files() -> Copy:
    return Copy(files={}, agent={})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], lease_s=float(sys.argv[4])))
