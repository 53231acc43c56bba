"""This machine as a `Card`: the device that a recipe would use, with its memory and its speed."""

from dataclasses import replace

from lightningrl.config import Config
from lightningrl.estimate.cards import Card, card_like
from lightningrl.models.devices import device_of, devices
from lightningrl.models.memory import machine_memory
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
        return replace(known, flash=has_flash(device))
    speeds = {d: measure(device, dtype=d, threads=learners[0].trainer.threads) for d in dtypes} if timed else {}
    return Card(
        name=name,
        memory_bytes=memory,
        bandwidth=max((speed.bandwidth for speed in speeds.values()), default=0.0),
        peaks={dtype: speed.flops for dtype, speed in speeds.items()},
        is_gpu=is_gpu,
        flash=has_flash(device),
        bfloat16=gpu.bfloat16 if gpu else True,
        is_measured=timed,
    )
