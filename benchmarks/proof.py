"""Is each fault of a publication seen, at which step, and is a healthy engine never accused?

    python benchmarks/proof.py                           all faults, in this process
    python benchmarks/proof.py --fault half --steps 40   one of them, for longer
    python benchmarks/proof.py --healthy 5 --steps 5     only healthy publications, with five seeds per arm

A learner trains on samples of its own engine, which has a copy of the weights, and publishes after each update. From
version 1 on the engine has one fault. Printed and written to results/proof.json: how often the fault was named, at
which version, and the statistics of healthy publications. Arms of the file that are not run again are kept.
"""

import argparse
import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from lightningrl.config import LearnerConfig, LossConfig, ModelConfig, TrainerConfig
from lightningrl.data.forest import Lesson
from lightningrl.engine.base import Delta, Engine
from lightningrl.engine.embedded import EmbeddedEngine
from lightningrl.errors import EngineError
from lightningrl.learner import Learner
from lightningrl.models.load import export_folder, load_model, load_tokenizer
from lightningrl.models.lora import with_adapter
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Sampling, Transition, Weights

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "recipes" / "sql_langgraph" / "warmstart"
RESULTS = HERE / "results" / "proof.json"
Fault: TypeAlias = Literal["none", "old", "half", "adapter", "cache", "dtype", "raw"]
DTypeName: TypeAlias = Literal["float32", "bfloat16"]
FAULTS: tuple[Fault, ...] = ("old", "half", "adapter", "cache", "dtype", "raw")
NAMED: dict[Fault, str] = {
    "old": "the old weights",
    "half": "a mixture",
    "adapter": "other weights",
    "cache": "keys and values",
    "dtype": "logprobs of version",
    "raw": "another distribution",
}
"""Fault → what the error must say."""
OTHER = "other"
"""Folder of an adapter that no learner here has made."""
PROMPTS, SAMPLES, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 4, 150, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    fault: Fault
    rate: float
    """Learning rate."""
    dtype: DTypeName
    rank: int = 0
    """Of the adapter; 0: all weights are trained."""


Serve: TypeAlias = Callable[[Arm, Path, Path], Engine]
"""An engine with the fault of an arm. Given are the model, and a folder for the files that the fault needs."""


def in_process(arm: Arm, model: Path, folder: Path) -> Engine:
    """A faulty engine in this process, over a copy of the model."""
    narrower: DTypeName = "bfloat16" if arm.dtype == "float32" else "float32"
    copy = load_model(str(model), dtype=narrower if arm.fault == "dtype" else arm.dtype)
    return Faulty(EmbeddedEngine(copy, slots=32, max_length=256), arm.fault, folder=folder, other=folder / OTHER)


class Faulty:
    """An engine with a fault from version 1 on. `other`: the folder of another adapter."""

    def __init__(self, engine: Engine, fault: Fault, *, folder: Path, other: Path) -> None:
        self.engine, self.fault = engine, fault
        self._folder, self._other = folder, other
        self._served: Weights | None = None
        self._raw = False

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        if self._raw and sampling.top_k == 1:
            sampling = dataclasses.replace(sampling, top_k=0)  # another distribution than the one asked for
        async for delta in self.engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream):
            yield delta

    async def load(self, weights: Weights) -> None:
        fault = self.fault if weights.version else "none"
        self._raw = fault == "raw"
        if fault == "old":
            return
        if fault == "half" and self._served is not None:
            mixed = self._folder / f"mixed-{weights.version}"
            mix(Path(weights.uri), Path(self._served.uri), mixed)
            weights = dataclasses.replace(weights, uri=str(mixed))
        if fault == "adapter":
            weights = dataclasses.replace(weights, uri=str(self._other))
        if fault == "cache":
            await self._load_but_keep_cache(weights)
        else:
            await self.engine.load(weights)
        self._served = weights

    async def _load_but_keep_cache(self, weights: Weights) -> None:
        assert isinstance(self.engine, EmbeddedEngine)
        cache = self.engine._scheduler.cache  # pyright: ignore[reportPrivateUsage]  the fault
        known = cache.known.copy()
        await self.engine.load(weights)
        cache.known[:] = known

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self.engine.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        await self.engine.resume()

    async def close(self) -> None:
        await self.engine.close()


def mix(new: Path, old: Path, mixed: Path) -> None:
    """Write a folder like `new` in which half of the tensors are those of `old`: every other pair, so that both
    matrices of a LoRA adapter are of one version.
    """
    mixed.mkdir(parents=True)
    for file in new.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (mixed / file.name).write_bytes(file.read_bytes())
    for file in new.glob("*.safetensors"):
        tensors, before = load_file(file), load_file(old / file.name)
        kept = {name: before[name] for k, name in enumerate(sorted(tensors)) if k // 2 % 2 == 0}
        save_file(tensors | kept, mixed / file.name, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Publications:
    """A learner, and the publications of its weights to an engine."""

    learner: Learner
    folder: Path
    rng: np.random.Generator
    vocab_size: int

    async def step(self, version: int) -> dict[str, float]:
        """Sample, update, publish `version`. Returns metrics. Raises `EngineError` if the fault is seen."""
        lessons = await self._lessons()
        await self.learner.prepare(lessons)
        await self.learner.engine.pause()
        await self.learner.update(lessons, seed=0, remaining=1.0)
        return await self.publish(version)

    async def publish(self, version: int) -> dict[str, float]:
        weights = self.learner.weights(version)
        await self.learner.export(self.folder / weights.uri)
        return await self.learner.serve(weights)

    async def _lessons(self) -> list[Lesson]:
        prompts = [self.rng.integers(8, self.vocab_size, PROMPT_TOKENS) for _ in range(PROMPTS)]
        asked = [(p, k) for p in range(PROMPTS) for k in range(SAMPLES)]
        found = await asyncio.gather(*(self._sample(prompts[p].tolist(), seed=k) for p, k in asked))
        total = sum(len(delta.token_ids) for delta in found)
        return [_lesson(prompts[p], delta, p, k, total, self.rng) for (p, k), delta in zip(asked, found, strict=True)]

    async def _sample(self, prompt: list[int], *, seed: int) -> Delta:
        sampling = Sampling(max_tokens=COMPLETION_TOKENS, seed=seed)
        (delta,) = [d async for d in self.learner.engine.generate(prompt, sampling=sampling, policy=self.learner.name)]
        return delta


def _lesson(prompt: np.ndarray, delta: Delta, p: int, k: int, total: int, rng: np.random.Generator) -> Lesson:
    count = len(delta.token_ids)
    return Lesson(
        rollout_id=f"{p}/{k}",
        group_id=str(p),
        transition=Transition(
            call_id=f"{p}/{k}",
            parent_call_id=None,
            agent="",
            policy_version=0,
            prompt_ids=prompt.astype(np.int32),
            completion_ids=np.array(delta.token_ids, np.int32),
            logprobs=np.array(delta.logprobs, np.float32),
            reward=None,
        ),
        advantages=np.full(count, rng.normal(), np.float32),
        weights=np.full(count, 1 / total),
    )


@asynccontextmanager
async def publications(
    arm: Arm, folder: Path, *, seed: int, model: Path = MODEL, serve: Serve = in_process
) -> AsyncIterator[Publications]:
    trained, tokenizer = load_model(str(model), dtype=arm.dtype), load_tokenizer(str(model))
    if arm.rank:
        stranger = with_adapter(load_model(str(model), dtype=arm.dtype), rank=arm.rank, seed=seed + 1)
        _perturb(stranger.trainable(), seed=seed, size=10 * arm.rate)
        export_folder(stranger, folder / OTHER, tokenizer=tokenizer)
        trained = with_adapter(trained, rank=arm.rank, seed=seed)
    settings = TrainerConfig(learning_rate=arm.rate, schedule="constant", minibatches=1, threads=1)
    trainer = LocalTrainer(
        trained, config=settings, loss=LossConfig(), export=partial(export_folder, tokenizer=tokenizer)
    )
    config = LearnerConfig(model=ModelConfig(path=str(model), dtype=arm.dtype, lora_rank=arm.rank), trainer=settings)
    faulty = serve(arm, model, folder)
    with ThreadPoolExecutor(1) as compute:
        learner = Learner(
            "policy",
            config,
            engine=faulty,
            trainer=trainer,
            compute=compute,
            folder=folder,
            checkpoints="step-{:05d}",
            kind="lora" if arm.rank else "full",
            routes=[],
            root=folder,
        )
        try:
            yield Publications(
                learner=learner, folder=folder, rng=np.random.default_rng(seed), vocab_size=trained.vocab_size
            )
        finally:
            await faulty.close()


def _perturb(parameters: dict[str, torch.Tensor], *, seed: int, size: float) -> None:
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter += size * torch.randn(parameter.shape, generator=chance)


async def run(arm: Arm, *, seed: int, steps: int, model: Path = MODEL, serve: Serve = in_process) -> dict[str, Any]:
    """Publish up to `steps` versions, until the fault is seen. Returns the version, the error and all metrics."""
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        async with publications(arm, Path(name), seed=seed, model=model, serve=serve) as made:
            for version in range(steps + 1):
                try:
                    rows.append(await (made.step(version) if version else made.publish(0)))
                except EngineError as error:
                    return {"seed": seed, "version": version, "error": str(error).splitlines()[0], "rows": rows}
    return {"seed": seed, "version": None, "error": None, "rows": rows}


def arms(
    faults: Sequence[Fault], dtypes: Sequence[DTypeName], rates: Sequence[float], ranks: Sequence[int]
) -> list[Arm]:
    made = [
        Arm(fault=fault, rate=rate, dtype=dtype, rank=rank)
        for fault in faults
        for dtype in dtypes
        for rate in rates
        for rank in ranks
    ]
    return [arm for arm in made if arm.rank or arm.fault != "adapter"]


def show(arm: Arm, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Print and return the summary of an arm."""
    seen = [each["version"] for each in found if each["version"] is not None]
    named = sum(NAMED.get(arm.fault, "–") in (each["error"] or "") for each in found)
    rows = [row for each in found for row in each["rows"][1:]]
    confirmed = sum(row.get("engine/confirmed", 0.0) for row in rows)
    nearer = [row["engine/nearer"] for row in rows if "engine/nearer" in row]
    slopes = [row["engine/slope"] for row in rows if "engine/slope" in row]
    summary = dataclasses.asdict(arm) | {
        "runs": len(found),
        "publications": len(rows) + len(seen),
        "seen": len(seen),
        "named": named,
        "versions": seen,
        "confirmed": int(confirmed),
        "nearer": [round(x, 3) for x in nearer],
        "slopes": [round(x, 3) for x in slopes],
        "errors": sorted({each["error"] for each in found if each["error"]})[:3],
    }
    kind = f"rank {arm.rank}" if arm.rank else "full"
    print(
        f"{arm.fault:8} {arm.dtype:9} {arm.rate:.0e} {kind:7} seen {len(seen)}/{len(found)} named {named} "
        f"at {seen}; {int(confirmed)} of {len(rows)} publications confirmed; {summary['errors'][:1]}",
        flush=True,
    )
    return summary


def keep(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary of an arm to a results file, in place of an earlier one of this arm."""
    arm = [field.name for field in dataclasses.fields(Arm)]
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    others = [each for each in found if any(each[name] != summary[name] for name in arm)]
    path.write_text(json.dumps([*others, summary], indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--rank", type=int, action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults: Sequence[Fault] = ("none",) if options.healthy else cast(Any, options.fault) or FAULTS
    for arm in arms(
        faults, options.dtype or ["bfloat16", "float32"], options.rate or [1e-6, 1e-4], options.rank or [0, 8]
    ):
        seeds = range(options.healthy or options.seeds)
        found = [asyncio.run(run(arm, seed=seed, steps=options.steps)) for seed in seeds]
        keep(options.out, show(arm, found))


if __name__ == "__main__":
    main()
