"""Trains a recipe in which something breaks, and checks every attempt and the tokens learnt from."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.store import open_store
from lightningrl.types import Attempt
from tests.command import run_command

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 110.0
OVERRIDES = (
    *(
        "model.path=model",
        "engine.name=tests.recipes.forced:Forced",
        "engine.max_length=4096",
        "routes=[{}]",
        "tasks.source=tasks.jsonl",
    ),
    *(
        "tasks.heldout=1",
        "agent.workers=1",
        "agent.concurrency=1",
        "agent.timeout_s=300",
        "trainer.threads=1",
        "trainer.minibatches=1",
    ),
    *("loop.steps=1", "loop.tasks_per_step=1", "loop.group_size=4", "loop.eval_every=0", "loop.eval_tasks=1"),
)
"""One step of four sequential rollouts, after an evaluation with two. The third conversation is the first to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The four rollouts of the step."""

    attempts: Sequence[Sequence[Attempt]]
    """Attempts of each rollout, in order."""
    rewards: Sequence[Mapping[str, float]]
    """For each rollout: attempt id → final reward."""
    sampled: Mapping[str, int]
    """Attempt id → number of tokens that the policy sampled in it."""
    metrics: Mapping[str, float]

    def failed(self) -> list[str]:
        """The first line of each failed attempt's error."""
        return [
            (attempt.error or "").splitlines()[0]
            for tries in self.attempts
            for attempt in tries
            if attempt.status != "succeeded"
        ]

    def check(self) -> None:
        """Every failed attempt was retried with success, has no reward, and was not trained."""
        for tries, rewards in zip(self.attempts, self.rewards, strict=True):
            assert [attempt.status for attempt in tries[:-1]] == ["failed"] * (len(tries) - 1)
            assert tries[-1].status == "succeeded" and list(rewards) == [tries[-1].id]
        accepted = [tries[-1].id for tries in self.attempts]
        assert len({value for rewards in self.rewards for value in rewards.values()}) > 1, "there is something to learn"
        assert self.metrics["rollouts/succeeded"] == 4 and self.metrics["rollouts/excluded"] == 0
        assert self.metrics["tokens/selected"] == sum(self.sampled[attempt_id] for attempt_id in accepted)
        assert all(self.sampled[attempt.id] > 0 for tries in self.attempts for attempt in tries), (
            "failed attempts have records, too"
        )


def copied(
    recipe: str,
    folder: Path,
    *,
    model: Path,
    task: Mapping[str, Any],
    script: str,
    change: Mapping[str, tuple[str, str]],
) -> Path:
    """A copy of the recipe with one task, and with a script as the policy. `change`: file → (old text, new text)."""
    copy = folder / recipe
    shutil.copytree(
        ROOT / "recipes" / recipe, copy, ignore=shutil.ignore_patterns("warmstart", "__pycache__", "node_modules")
    )
    (copy / "model").symlink_to(model)
    (copy / "script.py").write_text(script)
    (copy / "tasks.jsonl").write_text(
        "".join(json.dumps({"input": task, "split": split}) + "\n" for split in ("train", "heldout"))
    )
    for name, (old, new) in change.items():
        before = (copy / name).read_text()
        assert before.count(old) == 1
        (copy / name).write_text(before.replace(old, new))
    return copy


async def trained(recipe: Path, *overrides: str) -> Trained:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = ["train", "recipe.toml", "--run-dir", "run", *OVERRIDES, *overrides]
    done = run_command(*command, cwd=recipe, env=environment, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr + done.stdout
    store = await open_store(f"sqlite://{recipe / 'run' / 'store.sqlite'}")
    try:
        rollouts = [rollout for rollout in await store.rollouts() if rollout.task.split == "train"]
        attempts = [
            sorted(await store.attempts([rollout.id]), key=lambda attempt: attempt.number) for rollout in rollouts
        ]
        attempt_ids = [attempt.id for tries in attempts for attempt in tries]
        sampled = dict.fromkeys(attempt_ids, 0)
        for call in await store.calls(attempt_ids):
            sampled[call.attempt_id] += len(call.completion_ids)
        given = [await store.rewards([attempt.id for attempt in tries]) for tries in attempts]
    finally:
        await store.close()
    rewards = [{reward.attempt_id: reward.value for reward in found if reward.name == "final"} for found in given]
    rows = [json.loads(line) for line in (recipe / "run" / "metrics.jsonl").read_text().splitlines()]
    return Trained(
        attempts=attempts, rewards=rewards, sampled=sampled, metrics=next(row for row in rows if row["kind"] == "step")
    )
