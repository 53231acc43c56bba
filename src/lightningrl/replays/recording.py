"""Which run is replayed, which of its attempts, and from which call on? All that can be wrong with them is said here.

The run is only read: it may be going on. Its agent runs again under the run's own settings, with what the user changes.
"""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lightningrl.config import Config, UpstreamConfig
from lightningrl.errors import UserError
from lightningrl.look.rollout import chosen, named
from lightningrl.plugins import names
from lightningrl.recipe import load_config
from lightningrl.store import Records, open_records
from lightningrl.store.place import found_at
from lightningrl.types import FINAL, Attempt, Call, Reward, Rollout, by_attempt

WORKERS = 2
"""Processes that run agents, if all agents of the run were on other machines: the default of `agent.workers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A run that is open for reading, and the settings under which its agent runs again."""

    folder: Path
    """The run's."""
    records: Records
    config: Config
    """The run's settings, with the user's changes. Nothing of them says any more where the run itself is served."""
    overrides: Sequence[str] = ()
    """The user's changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """An attempt with its records."""

    rollout: Rollout
    attempt: Attempt
    calls: tuple[Call, ...]
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name → value, of the attempt as a whole. If there are several of a name, the grader's counts."""

    @property
    def reward(self) -> float | None:
        """The final reward; None: it has none."""
        return self.rewards.get(FINAL)

    @property
    def answered(self) -> int:
        """Number of calls that were answered."""
        return sum(call.capture != "incomplete" for call in self.calls)

    @property
    def error(self) -> str | None:
        """The first line of the attempt's error; None: it succeeded."""
        return first_line(self.attempt.error)


@asynccontextmanager
async def recording(path: Path, overrides: Sequence[str] = ()) -> AsyncIterator[Recording]:
    """Open a run's folder, or its store.sqlite. Raises `UserError` for what cannot be replayed."""
    file, url = found_at(path)
    config = settings(file.parent, overrides)
    records = await open_records(url)
    try:
        yield Recording(folder=file.parent, records=records, config=config, overrides=tuple(overrides))
    finally:
        await records.close()


def settings(folder: Path, overrides: Sequence[str]) -> Config:
    """The settings of the run in `folder`, for this machine alone. Calls that are sampled afresh are answered by the
    embedded engine, or by the run's own script or engine class: a server of the run has other weights by now. A hosted
    backend keeps each version.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    if "engine.urls" in given and "engine.name" not in given:
        hint = "add `engine.name=vllm`, or leave out `engine.urls`"
        raise UserError("`engine.urls` needs `engine.name`: the embedded engine asks no server", hint=hint)
    file = folder / "config.toml"
    if not file.is_file():
        hint = "`lightningrl run --replay RUN -- CMD` plays the records of any program back to it"
        raise UserError(f"`{folder}` has no config.toml, so its agent is not known", hint=hint)
    config = load_config(file, overrides)
    if not config.root.is_dir():
        hint = "if it has moved, add `root=` and its new absolute path"
        raise UserError(f"the recipe's folder `{config.root}` is gone", hint=hint)
    if "root" in given:
        _check_recipe(config)
    if config.backend == "local" and config.engine.name in names("engine") and "engine.name" not in given:
        config = load_config(file, [*overrides, "engine.name=embedded", "engine.urls=[]"])
    if config.engine.owns_vllm:
        hint = "leave out `engine.name`, or name running servers in `engine.urls`"
        raise UserError("`lightningrl replay` starts no vLLM", hint=hint)
    agent = config.agent.model_copy(update={"workers": config.agent.workers or WORKERS})
    served = {"host": "127.0.0.1", "port": 0, "public_url": "", "certificate": None, "certificate_key": None}
    gateway = config.gateway.model_copy(update=served)
    upstreams = {name: _openable(upstream) for name, upstream in config.upstreams.items()}
    return config.model_copy(update={"agent": agent, "gateway": gateway, "upstreams": upstreams, "loggers": []})


def _check_recipe(config: Config) -> None:
    """Raises `UserError` if the user's `root` has another recipe than the run."""
    file = config.root / "recipe.toml"
    there = load_config(file).name if file.is_file() else config.name
    if there != config.name:
        hint = f"give the folder of `{config.name}`; if that is its name now, add `name={there}`"
        raise UserError(f"`{config.root}` has the recipe `{there}`, and the run is of `{config.name}`", hint=hint)


async def trunk_of(run: Recording, rollout_id: str, *, number: int | None = None) -> Course:
    """The attempt to replay: the accepted one of this rollout, or the one with this number. Raises `UserError`."""
    rollout = await named(run.records, rollout_id)
    attempts = await run.records.attempts([rollout.id])
    attempt = chosen(rollout, attempts, number)
    if number is None and rollout.accepted_attempt_id is None:
        raise _unaccepted(rollout, attempt)
    if attempt is None or attempt.status == "running":
        raise UserError(f"rollout `{rollout.id}` is {rollout.status}: its attempt has not ended", hint="wait for it")
    [course] = await _courses(run.records, [(rollout, attempt)])
    return course


async def courses(records: Records, rollouts: Sequence[Rollout]) -> list[Course]:
    """The accepted, or else the latest attempt of each of these rollouts."""
    tried: dict[str, list[Attempt]] = {}
    for attempt in await records.attempts([rollout.id for rollout in rollouts]):
        tried.setdefault(attempt.rollout_id, []).append(attempt)
    of_each = [(rollout, chosen(rollout, tried.get(rollout.id, ()), None)) for rollout in rollouts]
    return await _courses(records, [(rollout, attempt) for rollout, attempt in of_each if attempt is not None])


async def _courses(records: Records, attempts: Sequence[tuple[Rollout, Attempt]]) -> list[Course]:
    ids = [attempt.id for _, attempt in attempts]
    calls, rewards = by_attempt(await records.calls(ids)), by_attempt(await records.rewards(ids))
    return [
        Course(
            rollout=rollout,
            attempt=attempt,
            calls=tuple(calls.get(attempt.id, ())),
            rewards=_of_attempt(rewards.get(attempt.id, ())),
        )
        for rollout, attempt in attempts
    ]


def place_of(trunk: Course, number: int, *, run: Path) -> Call:
    """Call `number` of the trunk, from 1, as the place of another answer. Raises `UserError` if it cannot be one."""
    call = next((call for call in trunk.calls if call.index + 1 == number), None)
    rollout = trunk.rollout.id
    look = f"`lightningrl show {run} {rollout}` shows its calls"
    if call is None:
        last = max((call.index + 1 for call in trunk.calls), default=0)
        count = f"calls 1 to {last}" if last > 1 else f"{last or 'no'} call"
        raise UserError(f"rollout `{rollout}` has no call {number}: it has {count}", hint=look)
    if call.capture == "incomplete":
        raise UserError(f"call {number} of `{rollout}` was never answered: {call.capture_reason}", hint=look)
    if call.capture == "upstream":
        hint = f"give the number of a call that an engine has answered: {look}"
        raise UserError(f"call {number} of `{rollout}` was answered by another server, `{call.policy}`", hint=hint)
    if call.replays is not None and trunk.rollout.branch is not None:
        origin = trunk.rollout.branch.attempt_id.rpartition(".")[0]
        first = int(call.replays.rpartition("-")[2]) + 1
        hint = f"`lightningrl replay {run} {origin} --at {first}`, or give a later call: {look}"
        raise UserError(f"call {number} of `{rollout}` was played back from call {first} of `{origin}`", hint=hint)
    return call


def first_line(error: str | None) -> str | None:
    return None if error is None else error.partition("\n")[0]


def _openable(upstream: UpstreamConfig) -> UpstreamConfig:
    """The same without a key that is not set here: what is played back needs none."""
    return upstream if upstream.key_env in os.environ else upstream.model_copy(update={"key_env": ""})


def _unaccepted(rollout: Rollout, attempt: Attempt | None) -> UserError:
    if attempt is None or rollout.status != "failed":
        return UserError(f"rollout `{rollout.id}` is {rollout.status}: it has not ended yet", hint="wait for it")
    error = first_line(attempt.error) or f"its attempt was {attempt.status}"
    hint = f"add `--attempt {attempt.number}` to replay that attempt nevertheless"
    return UserError(f"rollout `{rollout.id}` failed: {error}", hint=hint)


def _of_attempt(rewards: Sequence[Reward]) -> dict[str, float]:
    found = [reward for reward in rewards if reward.call_id is None]
    return {reward.name: reward.value for reward in sorted(found, key=lambda reward: reward.source == "grader")}
