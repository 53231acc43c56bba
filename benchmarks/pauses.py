"""How long does the event loop stand still while weights are saved, published and loaded? And how much memory is added?

    python benchmarks/pauses.py                    a model of 209 M parameters in float32 and bfloat16
    python benchmarks/pauses.py --layers 4         a smaller one

Each operation runs in a thread, as in a run, while a task on the event loop ticks every 10 ms. The longest delay of a
tick is the pause of every heartbeat and stream. On a machine with other work, it includes waiting for a core. Results
go to results/pauses.json.
"""

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightningrl.checkpoints import damage, seal
from lightningrl.config import LossConfig, TrainerConfig
from lightningrl.models.load import export_folder, load_into, load_model
from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer import conformance
from lightningrl.trainer.local import LocalTrainer

RESULTS = Path(__file__).resolve().parent / "results" / "pauses.json"
TICK_S, LOOK_S = 0.01, 0.002


async def ticking(longest: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        longest[0] = max(longest[0], now - last - TICK_S)
        last = now


def own_mib() -> float:
    """Memory of this process that no file holds."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds of `work`, and the memory at its peak above that before."""
    before, done = own_mib(), threading.Event()
    peak = [before]

    def look() -> None:
        while not done.wait(LOOK_S):
            peak[0] = max(peak[0], own_mib())

    looking = threading.Thread(target=look)
    looking.start()
    began = time.perf_counter()
    try:
        work()
    finally:
        seconds = time.perf_counter() - began
        done.set()
        looking.join()
    return {"seconds": round(seconds, 2), "peak_mib": round(peak[0] - before)}


async def row(work: Callable[[], object]) -> dict[str, float]:
    longest = [0.0]
    task = asyncio.create_task(ticking(longest))
    await asyncio.sleep(5 * TICK_S)
    longest[0] = 0.0
    figures = await asyncio.to_thread(measured, work)
    await asyncio.sleep(2 * TICK_S)
    task.cancel()
    return {**figures, "longest_pause_ms": round(1000 * longest[0])}


async def operations(dtype: Any, *, layers: int, folder: Path) -> dict[str, Any]:
    sizes = {"hidden": 1024, "layers": layers, "heads": 16, "kv_heads": 8, "head_size": 64, "intermediate": 3072}
    model = build_model(32000, **sizes)
    model.hf.to(getattr(torch, dtype))
    export = partial(export_folder, tokenizer=build_tokenizer(["hello world"], vocab_size=400))
    trainer = LocalTrainer(model, config=TrainerConfig(device="cpu"), loss=LossConfig(), export=export)
    conformance.step(trainer, 0)
    out = folder / dtype
    works: dict[str, Callable[[], object]] = {
        "publish": lambda: trainer.publish(out),
        "save the trainer": lambda: trainer.save(out / "trainer"),
        "seal": lambda: seal(out, policy="policy", version=1),
        "check": lambda: damage(out, policy="policy", version=1),
        "load the trainer": lambda: trainer.load(out / "trainer"),
        "load a model": lambda: load_model(str(out), dtype=dtype),
        "load into a model": lambda: load_into(model, str(out)),
    }
    found = {name: await row(work) for name, work in works.items()}
    for name, figures in found.items():
        print(f"{dtype:10} {name:20} {figures}", flush=True)
    return {"parameters": sum(p.numel() for p in model.hf.parameters()), "operations": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            results[dtype] = asyncio.run(operations(dtype, layers=arguments.layers, folder=Path(folder)))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(RESULTS)


if __name__ == "__main__":
    main()
