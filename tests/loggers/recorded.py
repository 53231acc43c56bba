"""A run's folder with a store and metrics, which a test fills as a run does."""

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from lightningrl.config import Config
from lightningrl.loggers import examples
from lightningrl.recipe import make_config
from lightningrl.store import Store, open_store
from lightningrl.store.examples import rollout
from lightningrl.types import Span

RECIPE = """
name = "recorded"
[agent]
entry = "agent:run"
reward = "agent:reward"
[agent.env]
SECRET = "hunter2"
[tasks]
source = "agent:tasks"
[model]
path = "model"
"""


def config(*loggers: str) -> Config:
    return make_config({**tomllib.loads(RECIPE), "loggers": list(loggers)}, [], folder=Path("."), where="RECIPE")


@dataclass(kw_only=True)
class Recorded:
    """The folder, and its store."""

    folder: Path
    store: Store

    async def end(self, rollout_id: str, *, status: str = "succeeded", spans: tuple[Span, ...] = ()) -> None:
        """Run the rollout once: two calls with a tool between them, and rewards."""
        await self.store.enqueue([replace(rollout(rollout_id), max_attempts=1)])
        [(_, attempt)] = await self.store.claim("w", limit=1, lease_s=60)
        calls = examples.calls_of(attempt)
        own = [replace(span, attempt_id=attempt.id, call_id=span.call_id and calls[0].id) for span in spans]
        rewards = [replace(reward, attempt_id=attempt.id) for reward in examples.ended("r").rewards[:1]]
        polite = replace(examples.ended("r").rewards[1], attempt_id=attempt.id, call_id=calls[1].id)
        await self.store.append(*calls, *own, polite)
        if status == "succeeded":
            await self.store.finish(attempt.id, "succeeded", rewards=rewards, output="It is warm.")
        else:
            await self.store.finish(attempt.id, "failed", error="ValueError: a secret")

    def write(self, *rows: dict[str, object]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def complete(self) -> None:
        (self.folder / "result.json").write_text('{"heldout_after": 0.75}')


async def recorded(folder: Path) -> Recorded:
    return Recorded(folder=folder, store=await open_store(f"sqlite://{folder / 'store.sqlite'}"))


def step(number: int) -> dict[str, object]:
    return {"kind": "step", "step": number, "at": 1_800_000_000.0 + number, "reward/mean": number / 10}


def exam(version: int, mode: str = "sampled") -> dict[str, object]:
    return {"kind": "exam", "step": version, "mode": mode, "reward/mean": 0.5, "tasks": 4}
