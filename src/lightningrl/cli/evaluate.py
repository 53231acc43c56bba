"""`lightningrl eval`: compares models and servers by their reward on the same held-out tasks.

The reward of a model folder is reproducible to the last digit; that of a server is not.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.cli.live import Progress
from lightningrl.cli.ready import check_device, check_memory_of, check_servers, check_tasks
from lightningrl.cli.report import heldout_table, interval, mean_interval
from lightningrl.cli.stop import Interrupted, run
from lightningrl.cli.verdict import signed
from lightningrl.config import BackendName, Config, RouteConfig, UpstreamConfig
from lightningrl.data.intervals import RESAMPLES, Difference, paired_difference
from lightningrl.engines import check_weights, final_weights
from lightningrl.errors import Stopped
from lightningrl.progress import MODES, Exam, Mode

SERVER = "evaluated"
"""Name of the upstream that answers all calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """The recipe with other weights, or with a server that answers all calls."""

    name: str
    config: Config
    server: bool = False

    @property
    def modes(self) -> tuple[Mode, ...]:
        """A server gets the requests as the agent sends them, in one mode only."""
        return ("sampled",) if self.server else MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result for one contestant, as `--json` prints it."""

    heldout: float
    """Mean reward, sampled at temperature 1; for a server, as it answers."""
    heldout_interval: tuple[float, float]
    """95 %, bootstrap over tasks."""
    heldout_greedy: float | None
    """Mean reward of greedy answers; None for a server."""
    tasks: int
    failed: int
    """Number of failed rollouts in both modes; the means leave them out."""
    seconds: float
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of all contestants, and the differences to the first one."""

    scores: Sequence[Score]
    differences: Sequence[Mapping[Mode, Difference]]
    """For each contestant after the first: its reward minus that of the first, paired by task."""

    def as_json(self) -> dict[str, Any]:
        against = [
            asdict(score) | {"difference": {mode: asdict(found) for mode, found in by_mode.items()}}
            for score, by_mode in zip(self.scores[1:], self.differences, strict=True)
        ]
        return asdict(self.scores[0]) | ({"against": against} if against else {})


def contestant(config: Config, name: str | None, *, key_env: str) -> Contestant:
    """`name` is a model folder, the folder of a run, or `URL#model` of a server. None: the recipe as it is."""
    if name is None:
        return Contestant(name=config.model.path, config=config)
    if "://" in name:
        url, _, model = name.partition("#")
        upstream = UpstreamConfig(url=url, key_env=key_env, model=model)
        update = {
            "upstreams": {**config.upstreams, SERVER: upstream},
            "routes": [RouteConfig(policy=f"upstreams.{SERVER}")],
        }
        return Contestant(name=name, config=config.model_copy(update=update), server=True)
    return Contestant(name=name, config=_with_weights(config, Path(name)))


def evaluate(contestants: Sequence[Contestant], *, console: Console) -> Evaluation:
    """Run the recipe's held-out tasks with each contestant, one after the other."""
    loaded = [one.config for one in contestants if not one.server]
    for config in loaded:
        check_device(config)
        check_servers(config)
    check_tasks(contestants[0].config, ("heldout",), console=console)
    with console.status("loading torch"):
        for config in loaded:
            check_memory_of(config, training=False)
    try:
        return run(_evaluate(contestants, console=console))
    except Interrupted as stop:
        hint = "repeat the command to start again"
        said = f"stopped by {stop.signal.name}; an evaluation keeps no partial results"
        raise Stopped(said, hint=hint, exit_code=stop.exit_code) from None


async def _evaluate(contestants: Sequence[Contestant], *, console: Console) -> Evaluation:
    exams: list[dict[Mode, Exam]] = []
    scores: list[Score] = []
    for one in contestants:
        began = time.monotonic()
        found = await _examine(one, console=console)
        exams.append(found)
        scores.append(_score(one, found, seconds=time.monotonic() - began))
    first, *others = exams
    differences: list[dict[Mode, Difference]] = [
        {mode: paired_difference(exam.rewards, first[mode].rewards) for mode, exam in own.items() if mode in first}
        for own in others
    ]
    evaluation = Evaluation(scores=scores, differences=differences)
    _show(contestants, exams, differences, console=console)
    return evaluation


async def _examine(one: Contestant, *, console: Console) -> dict[Mode, Exam]:
    config = one.config
    progress = Progress(console, name=f"{config.name}: held-out tasks", steps=None, where=one.name)
    with tempfile.TemporaryDirectory(prefix="lightningrl-eval-") as scratch, progress:
        progress.starting("loading torch")
        from lightningrl.serve import check_local, lightning, relaying  # slow to import, so the progress is shown first

        check_local(config)
        serving = relaying if one.server else partial(lightning, waiting=progress.waiting)
        async with serving(config, Path(scratch), starting=progress.starting) as server:
            loop = server.loop(progress)
            if not one.server:
                await loop.restore()
            return {mode: await loop.examine(0, mode) for mode in one.modes}


def _score(one: Contestant, exams: Mapping[Mode, Exam], *, seconds: float) -> Score:
    sampled, greedy = exams["sampled"], exams.get("greedy")
    return Score(
        heldout=sampled.mean,
        heldout_interval=mean_interval(sampled),
        heldout_greedy=None if greedy is None else greedy.mean,
        tasks=len(sampled.rollouts),
        failed=sum(exam.failed for exam in exams.values()),
        seconds=round(seconds, 1),
        model=one.name,
    )


def _show(
    contestants: Sequence[Contestant],
    exams: Sequence[Mapping[Mode, Exam]],
    differences: Sequence[Mapping[Mode, Difference]],
    *,
    console: Console,
) -> None:
    for number, one in enumerate(contestants, start=1):
        say(console, f"{number}  {one.name}")
    table = heldout_table(exam for own in exams for exam in own.values())
    for column in ("", "mode", "reward", *(("change against 1", "p") if differences else ())):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for number, (one, own) in enumerate(zip(contestants, exams, strict=True), start=1):
        for mode, exam in own.items():
            found = differences[number - 2].get(mode) if number > 1 else None
            change = (signed(found), f"{found.p:.3g}") if found else ()
            table.add_row(str(number), "as it answers" if one.server else mode, interval(exam), *change)
    console.print(table)
    if differences:
        test = f"change: mean over tasks; p: two-sided permutation test with {RESAMPLES:,} permutations"
        say(console, (test, "dim"))


def _with_weights(config: Config, given: Path) -> Config:
    """The recipe with the weights of a model folder, or with the final weights of a run."""
    folder = final_weights(given)
    if config.policies:
        policies = {
            name: {**own, "model": {**own.get("model", {}), **_model(folder / name, config.backend)}}
            for name, own in config.policies.items()
        }
        return config.model_copy(update={"policies": policies})
    return config.model_copy(update={"model": config.model.model_copy(update=_model(folder, config.backend))})


def _model(folder: Path, backend: BackendName) -> dict[str, Any]:
    """Settings of `[model]` for a model folder. No new adapter is added; one in the folder is loaded."""
    check_weights(folder, backend=backend)
    return {"path": str(folder.resolve()), "lora_rank": 0}
