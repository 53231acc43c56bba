"""The vLLM servers that a run owns: how many, where, with which flags; started here, and ended with the run."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from lightningrl.config import Config
from lightningrl.engine.vllm_flags import Launch
from lightningrl.engine.vllm_fleet import Fleet
from lightningrl.engine.vllm_process import Say
from lightningrl.engine.vllm_server import OwnedServer
from lightningrl.estimate.layout import Layout
from lightningrl.estimate.machine import layout_here
from lightningrl.estimate.parts import rank_of
from lightningrl.models.devices import memory_used
from lightningrl.models.load import base_of, is_adapter, local_folder
from lightningrl.models.sizes import sizes_of


@asynccontextmanager
async def owned_fleet(
    config: Config, folders: Mapping[str, Path], folder: Path, *, say: Say, training: bool = True
) -> AsyncIterator[Fleet | None]:
    """The servers, while the block runs; None: the engine is another one, or its servers are given. If they cannot be
    kept alive, the block is cancelled and the error raised. `folders`: model path → folder. `folder`: the run's, for
    their logs. `say` receives what is being waited for. `training`: beside a trainer.
    """
    if not config.engine.owns_vllm:
        yield None
        return
    layout = await asyncio.to_thread(layout_here, config, training=training)
    launches = await asyncio.to_thread(launches_of, config, layout, folders)
    gpus = layout.gpus or (None,)
    servers = [
        OwnedServer(
            launch,
            env=os.environ,
            log=folder / ("vllm.log" if len(launches) == 1 else f"vllm-{number}.log"),
            used_bytes=None if gpu is None else lambda gpu=gpu: memory_used(gpu),
        )
        for number, (launch, gpu) in enumerate(zip(launches, gpus, strict=True))
    ]
    fleet = Fleet(servers, say=say)
    block = asyncio.current_task()
    assert block is not None
    fleet.failed.add_done_callback(lambda _: block.cancel())
    try:
        await fleet.start()
        yield fleet
    except asyncio.CancelledError:
        if fleet.failed.done():
            block.uncancel()
            raise fleet.failed.result() from None
        raise
    finally:
        await fleet.stop()


def launches_of(config: Config, layout: Layout, folders: Mapping[str, Path]) -> list[Launch]:
    """What each server is started with. All policies have one model, on every server."""
    learners = list(config.learners().values())
    first = learners[0]
    ranks = [rank_of(learner, sizes_of(learner.model.path, root=config.root)) for learner in learners]
    return [
        Launch(
            folder=_base(folders[first.model.path], root=config.root),
            dtype=first.model.dtype,
            max_length=config.engine.max_length,
            lora_rank=max(ranks),
            adapters=len(learners),
            cache_bytes=layout.cache_bytes,
            utilization=layout.utilization,
            sleeps=sleeps,
            gpu=visible,
            python=config.vllm_python,
            flags=tuple(config.engine.flags),
        )
        for visible, sleeps in zip(layout.visible, layout.sleeps, strict=True)
    ]


def _base(folder: Path, *, root: Path) -> Path:
    """The model folder that a server loads: under an adapter, its base."""
    return Path(local_folder(base_of(folder), root=root)) if is_adapter(str(folder)) else folder
