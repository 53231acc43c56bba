"""`lightningrl train RECIPE --estimate`: memory, time and price of a run before it starts.

Token counts come from options, from an earlier run of the recipe, from a few trial rollouts if an engine is there, or
else from an assumption. The first of these that there is counts.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from lightningrl.cli.console import say
from lightningrl.cli.folder import RUNS
from lightningrl.cli.live import Progress
from lightningrl.cli.ready import check_servers
from lightningrl.cli.stop import run
from lightningrl.config import Config
from lightningrl.engines import model_paths
from lightningrl.errors import LightningError, UserError, meant
from lightningrl.estimate import Estimate, HostedEstimate, check_memory, estimate, estimate_hosted
from lightningrl.estimate.cards import CARDS, Card
from lightningrl.estimate.layout import gpus_named
from lightningrl.estimate.machine import this_machine
from lightningrl.estimate.parts import rollouts_together
from lightningrl.estimate.workload import Workload, assumed, outside_calls, recorded
from lightningrl.models.load import is_here
from lightningrl.models.sizes import Sizes, sizes_of_all
from lightningrl.progress import Exam
from lightningrl.store import Records, Where, open_records
from lightningrl.store.place import records_at, url_of
from lightningrl.types import Rollout

TASKS, EACH = 2, 4
"""Tasks of a trial, and rollouts of each."""
LATEST = 64
"""Rollouts of an earlier run that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options of the command line."""

    gpu: str | None = None
    """A key of `CARDS`; None: this machine."""
    per_hour: float | None = None
    run_dir: Path | None = None
    tokens: Mapping[str, float] = field(default_factory=dict[str, float])
    """Arguments of `assumed`; empty: count tokens."""


def estimate_recipe(config: Config, wishes: Wishes, *, console: Console) -> Estimate | HostedEstimate:
    """The estimate of a recipe. Raises `UserError` for an unknown card, or a model whose configuration is missing."""
    if config.backend == "tinker":
        return _at_service(config, wishes)
    sizes = sizes_of_all(model_paths(config).values(), root=config.root)
    card = _card(config, wishes.gpu)
    work = _workload(config, sizes, wishes, console=console)
    return estimate(config, sizes, card, work=work, per_hour=wishes.per_hour)


def as_json(found: Estimate | HostedEstimate) -> dict[str, Any]:
    """The estimate with what follows from it."""
    local, hosted = ("needed_bytes", "fits", "hours", "price"), ("tokens", "step_usd", "usd")
    derived = {name: getattr(found, name) for name in (local if isinstance(found, Estimate) else hosted)}
    return {**asdict(found), **derived}


def _at_service(config: Config, wishes: Wishes) -> HostedEstimate:
    if wishes.gpu is not None or wishes.per_hour is not None:
        hint = "leave out `--gpu` and `--per-hour`, and set `service.prices` for the cost"
        raise UserError("a service bills tokens, not hours of a GPU", hint=hint)
    known = _known_workload(config, wishes)
    return estimate_hosted(config, work=known or assumed(source="assumed, as a trial would cost money"))


def _card(config: Config, gpu: str | None) -> Card:
    if gpu is None:
        try:
            return this_machine(config)
        except UserError as error:
            cards = "|".join(CARDS)
            raise UserError(
                error.message, hint=f"{error.hint}; `--gpu {cards}` estimates for another machine"
            ) from error
    if gpu.lower() not in CARDS:
        raise UserError(f"no data of a GPU `{gpu}`", hint=meant(gpu, CARDS))
    return replace(CARDS[gpu.lower()], count=gpus_named(config))


def _workload(config: Config, sizes: dict[str, Sizes], wishes: Wishes, *, console: Console) -> Workload:
    known = _known_workload(config, wishes)
    if known is not None:
        return known
    missing = _no_engine(config, sizes)
    if missing:
        reason = "this machine has no engine for a trial" if wishes.gpu else missing  # another device is asked about
        return assumed(source=f"assumed, as {reason}")
    try:
        return run(_trial(config, console))
    except LightningError as error:
        say(console, ("warning: ", "bold yellow"), f"the trial rollouts failed: {error.message.splitlines()[0]}")
        return assumed(source="assumed, as the trial rollouts failed")


def _known_workload(config: Config, wishes: Wishes) -> Workload | None:
    """From options or an earlier run; None: there are neither."""
    folder = _earlier_run(config, wishes.run_dir)
    if wishes.tokens:
        return assumed(**wishes.tokens, source="your options")
    return None if folder is None else asyncio.run(_of_run(config, folder))


def _earlier_run(config: Config, run_dir: Path | None) -> Path | None:
    """The folder of a run of this recipe: `run_dir`, or the latest one; None: there is none. Raises `UserError` if
    `run_dir` holds no records.
    """
    folders = [run_dir] if run_dir else sorted(RUNS.glob(f"{config.name}-*"))
    begun = [folder for folder in folders if records_at(folder)]
    if run_dir and not begun:
        hint = "give the folder of a run, or leave out `--run-dir` to take the latest run of the recipe"
        raise UserError(f"`{run_dir}` holds no records of a run", hint=hint)
    return begun[-1] if begun else None


async def _of_run(config: Config, folder: Path) -> Workload | None:
    """The workload of the latest rollouts of a run; None if none has succeeded."""
    records = await open_records(url_of(folder))
    try:
        where = Where(status="succeeded", split="train")
        rollouts = await records.rollouts(where=where, limit=LATEST)
        return await _looked_at(
            records, rollouts, together=rollouts_together(config), source=f"{len(rollouts)} rollouts of {folder}"
        )
    finally:
        await records.close()


async def _looked_at(
    records: Records, rollouts: Sequence[Rollout], *, together: int | None, source: str
) -> Workload | None:
    """The workload of rollouts that have ended. Those of one task are a group. `together`: how many ran at the same
    time; None: too few to tell how long agents take, as they have only just started. None if there are no calls.
    """
    of_task: dict[str, list[str]] = {}
    for rollout in rollouts:
        if rollout.accepted_attempt_id is not None:
            of_task.setdefault(rollout.task.id, []).append(rollout.accepted_attempt_id)
    groups = [calls for attempts in of_task.values() if (calls := await records.calls(attempts))]
    if not groups:
        return None
    agent_s = None
    if together is not None:
        attempts = await records.attempts([rollout.id for rollout in rollouts])
        accepted = {rollout.accepted_attempt_id for rollout in rollouts}
        calls = [call for group in groups for call in group]
        agent_s = outside_calls([one for one in attempts if one.id in accepted], calls, together=together)
    return recorded(groups, agent_s=agent_s, source=source)


def _no_engine(config: Config, sizes: dict[str, Sizes]) -> str:
    """Why there can be no trial rollouts; empty: there can."""
    try:
        card = this_machine(config, timed=False)
        check_memory(config, sizes, card)
        check_servers(config)
    except UserError as error:
        return error.message
    missing = [path for path in sizes if not is_here(path, root=config.root)]
    return f"the weights of `{missing[0]}` are not on this machine" if missing else ""


class _Quiet:
    """A watcher that shows what is being done, and no results."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        self._progress.doing(what, done, total)

    def voided(self, step: int, why: str) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def examined(self, exam: Exam) -> None:
        pass


async def _trial(config: Config, console: Console) -> Workload:
    """The workload of a few rollouts, with the weights that the recipe begins with."""
    with TemporaryDirectory() as folder, Progress(console, name=config.name, steps=None, where="a trial") as progress:
        progress.starting("trying a few rollouts, to count their tokens")
        from lightningrl.serve import check_local, lightning  # slow to import, so the progress is shown first

        check_local(config)
        async with lightning(config, Path(folder), starting=progress.starting, waiting=progress.waiting) as server:
            loop = server.loop(_Quiet(progress))
            await loop.restore()
            tasks = [task for task in loop.rollouts.heldout(TASKS) for _ in range(EACH)]
            exam = await loop.rollouts.examine(tasks, version=0, mode="sampled", when="for the estimate")
            source = f"{len(tasks)} trial rollouts"
            found = await _looked_at(server.store, exam.rollouts, together=None, source=source)
    if found is None:
        raise UserError("the agent never called the model", hint="`lightningrl train` says more")
    return found
