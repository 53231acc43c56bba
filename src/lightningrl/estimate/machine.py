"""This machine: the device that a recipe would use as a `Card`, and the layout of a vLLM that the run owns."""

import os
from dataclasses import replace

from lightningrl.config import Config
from lightningrl.engine.vllm_package import CPU_PACKAGE, installed
from lightningrl.engines import model_paths
from lightningrl.estimate.cards import Card, card_like
from lightningrl.estimate.layout import Layout, layout
from lightningrl.models.devices import device_of, devices
from lightningrl.models.memory import machine_memory
from lightningrl.models.sizes import sizes_of_all
from lightningrl.models.speed import measure
from lightningrl.models.varlen_attention import has_flash


def this_machine(config: Config, *, timed: bool = True) -> Card:
    """The device of the recipe's first policy. Raises `UserError` if this machine lacks it. `timed`: with its speed; a
    card that is not known is measured.
    """
    learners = list(config.learners().values())
    device = device_of(learners[0].trainer.device)
    dtypes = sorted({learner.model.dtype for learner in learners})
    is_gpu = device.type == "cuda"
    gpu = devices()[device.index] if is_gpu else None
    name = gpu.name if gpu else "this machine's CPU"
    memory = gpu.memory_bytes if gpu else machine_memory()
    known = card_like(name, memory_bytes=memory)
    if known is not None:
        return replace(known, flash=has_flash(device), count=len(devices()), host_bytes=machine_memory())
    speeds = {d: measure(device, dtype=d, threads=learners[0].trainer.threads) for d in dtypes} if timed else {}
    return Card(
        name=name,
        memory_bytes=memory,
        bandwidth=max((speed.bandwidth for speed in speeds.values()), default=0.0),
        peaks={dtype: speed.flops for dtype, speed in speeds.items()},
        is_gpu=is_gpu,
        count=len(devices()),
        host_bytes=machine_memory() if is_gpu else None,
        flash=has_flash(device),
        bfloat16=gpu.bfloat16 if gpu else True,
        is_measured=timed,
    )


def layout_here(config: Config, *, training: bool = True) -> Layout:
    """How the run starts its own vLLM servers on this machine, beside a trainer if it is `training`. Raises
    `UserError` for settings that this machine cannot follow.
    """
    package = installed(config.vllm_python)
    on_cpu = package is not None and package.name == CPU_PACKAGE
    return layout(
        config,
        sizes_of_all(model_paths(config).values(), root=config.root),
        gpus=[] if on_cpu else [device.memory_bytes for device in devices()],
        machine_bytes=machine_memory(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        training=training,
    )
