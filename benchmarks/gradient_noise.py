"""How much does a gradient say, per sampled token? Signal and noise of the credits, at the warm start of errands.

    python benchmarks/gradient_noise.py                        all arms; about half an hour of CPU time
    python benchmarks/gradient_noise.py --arms uniform air     some of them

Each arm runs one step with many tasks and learns nothing from it. Every group then gives its gradient g, by the loss
`pg`, through the code that a run uses. With N groups,

    signal = |mean of g|², without its bias: (|Σ g|² - Σ |g|²) / (N (N - 1))        noise = mean of |g|² - signal

and the figure is signal / noise / (sampled tokens of a group), times 100,000. Twice the figure means that half the
tokens give a gradient of the same quality. The interval is a jackknife over eighths of the groups. Results go to
results/gradient_noise.json.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from lightningrl.algorithms import lessons_of
from lightningrl.algorithms.air import air_rewards
from lightningrl.algorithms.selection import learnable
from lightningrl.config import Config
from lightningrl.data.forest import Lesson, build_forest
from lightningrl.data.packing import pack
from lightningrl.models.load import local_folder
from lightningrl.policies import load_models
from lightningrl.recipe import load_config
from lightningrl.store import Where, open_records
from lightningrl.tracing import spans_of
from lightningrl.trainer.local import LocalTrainer
from lightningrl.types import Call, Floats, Reward, Rollout, accepted_attempts

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "errands" / "recipe.toml"
RESULTS = HERE / "results" / "gradient_noise.json"
PARTS = 8
"""Of the jackknife."""
FORK = ["algorithm.credit=fork"]
MANY = [*FORK, "loop.group_size=22", "loop.fork_share=0.82", "loop.forks=3"]
ARMS: Mapping[str, Sequence[str]] = {
    "uniform": [],
    "uniform, rloo": ["algorithm.advantage=rloo"],
    "tree_loo": ["algorithm.credit=tree_loo"],
    "gigpo": ["algorithm.credit=gigpo"],
    "air": [
        "algorithm.credit=air",
        "algorithm.credit_options={discount=0.5}",
        'air=[{rule="tool_ok",tool="send",value=1.0}]',
    ],
    "fork, 4 trunks, 6 places of 3": MANY,
    "fork, the same, rloo": [*MANY, "algorithm.advantage=rloo"],
    "fork, the same, shared siblings": [*MANY, 'algorithm.credit_options={siblings="shared"}'],
    "fork, the same, κ = 0": [*MANY, "algorithm.credit_options={shrinkage=0.0}"],
    "fork, the same, κ = 4": [*MANY, "algorithm.credit_options={shrinkage=4.0}"],
    "fork, by variance": [*MANY, "loop.fork_at=variance"],
    "fork, 4 trunks, 2 places of 4": [*FORK, "loop.group_size=12", "loop.fork_share=0.67", "loop.forks=4"],
}
"""Settings of each arm. Arms with the same loop settings share their rollouts."""

Records: TypeAlias = tuple[list[Rollout], list[Call], list[Reward]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    signal_to_noise: float
    """Per 100,000 sampled tokens."""
    half_width: float
    """Half of the 95 % interval."""
    tokens: float
    """Sampled tokens of a group."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--runs", type=Path, default=Path("runs/gradient-noise"))
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.arms:
        config = load_config(RECIPE, [*ARMS[name], "loss.name=pg", "trainer.threads=1"])
        folder = collected(ARMS[name], tasks=given.tasks, runs=given.runs)
        records = asyncio.run(records_of(folder))
        measured = signal(*gradients(config, records))
        found[name] = {"groups": given.tasks, **{field: getattr(measured, field) for field in Signal.__slots__}}
        print(f"{name:<34}{measured.signal_to_noise:6.2f} ± {measured.half_width:.2f}", flush=True)
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def collected(settings: Sequence[str], *, tasks: int, runs: Path) -> Path:
    """The folder of a run of one step. It is only run if there is none."""
    loop = [word for word in settings if word.startswith("loop.")]
    folder = (runs / ("-".join(loop) or "trunks")).resolve()
    if not (folder / "result.json").exists():
        credit = FORK if loop else []
        step = ["loop.steps=1", f"loop.tasks_per_step={tasks}", "loop.eval_every=0", "tasks.heldout=2", "seed=200"]
        command = [sys.executable, "-m", "lightningrl", "train", RECIPE, *loop, *credit, *step, "--run-dir", folder]
        subprocess.run([*map(str, command), "--json", "--no-ui"], check=True, stdout=subprocess.DEVNULL)
    return folder


async def records_of(folder: Path) -> Records:
    """The rollouts of the first step, with their calls and rewards."""
    store = await open_records(f"sqlite://{folder}/store.sqlite")
    rollouts = [of for of in await store.rollouts(where=Where(prefix="train-00000-")) if of.status == "succeeded"]
    accepted = accepted_attempts(rollouts)
    return rollouts, await store.calls(accepted), await store.rewards(accepted)


def gradients(config: Config, records: Records) -> tuple[Floats, Floats]:
    """[N, P] the gradient of each group, and [N] its sampled tokens."""
    torch.set_num_threads(1)
    folder = Path(local_folder(config.model.path, root=config.root))
    (model,) = load_models(config, {config.model.path: folder}).values()
    trainer = LocalTrainer(model, config=config.trainer, loss=config.loss, export=_nowhere)
    lessons = _lessons(config, records)
    groups = dict[str, list[Lesson]]()
    for lesson in lessons:
        if lesson.transition.replays is None:
            groups.setdefault(lesson.group_id, []).append(lesson)
    made = [_gradient(trainer, own) for own in groups.values()]
    tokens = [sum(len(lesson.transition.completion_ids) for lesson in own) for own in groups.values()]
    return np.array(made, np.float32), np.array(tokens, np.float32)


def signal(g: Floats, tokens: Floats) -> Signal:
    """From the gradients [N, P] and the tokens [N] of all groups."""
    N, cost = len(g), float(tokens.mean())
    left_out = [_ratio(g[np.arange(N) % PARTS != part]) / cost * 1e5 for part in range(PARTS)]
    spread = float(np.std(left_out)) * np.sqrt(PARTS - 1)
    return Signal(signal_to_noise=_ratio(g) / cost * 1e5, half_width=1.96 * float(spread), tokens=cost)


def _ratio(g: Floats) -> float:
    """Signal over noise of one group."""
    N, squares, total = len(g), float((g.astype(np.float64) ** 2).sum()), g.sum(axis=0, dtype=np.float64)
    found = (float(total @ total) - squares) / (N * (N - 1))
    return found / (squares / N - found)


def _lessons(config: Config, records: Records) -> list[Lesson]:
    rollouts, calls, rewards = records
    algorithm = config.algorithm
    air = air_rewards(spans_of(calls), config.air, root=config.root) if config.air else []
    trajectories, _ = learnable(
        rollouts,
        calls,
        rewards,
        air=air,
        policy="policy",
        algorithm=algorithm,
        routes=config.routes,
        root=config.root,
        oldest_version=0,
    )
    return lessons_of(trajectories, algorithm, root=config.root)[0]


def _gradient(trainer: LocalTrainer, lessons: Sequence[Lesson]) -> Floats:
    """[P] the gradient of a group whose weights sum to 1."""
    whole = sum(float(lesson.weights.sum()) for lesson in lessons)
    scaled = [replace(lesson, weights=lesson.weights / whole) for lesson in lessons]
    for piece in pack(scaled, max_tokens=trainer.max_tokens, teaching=list):
        trainer.forward_backward(build_forest(piece))
    weights = list(trainer.model.trainable().values())
    parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in weights]
    for p in weights:
        p.grad = None
    return torch.cat(parts).numpy()


def _nowhere(*_: Any) -> None:
    """The trainer publishes nothing."""


if __name__ == "__main__":
    main()
