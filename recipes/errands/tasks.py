"""Tasks and the reward. Everything depends on (split, seed) alone."""

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from house import COLOURS, PEOPLE, ROOMS, THINGS

HELDOUT_SHARE = 5
"""One structure in this many is held out."""
ERRANDS = 3
CHOICE = 3
"""Colours of each kind of thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    thing: str
    colour: str
    room: str
    person: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.thing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    errands: tuple[Errand, ...]
    rooms: Mapping[str, tuple[str, ...]]
    """The things in each room that is not empty."""
    request: str
    """The agent's prompt."""


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train` or `heldout`. No combination of things, rooms and people occurs in both splits."""
    return [
        as_task(problem, f"{split}-{seed}-{index}")
        for index, problem in enumerate(problems(split, seed=seed, count=count))
    ]


def problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """The same tasks as `Problem`s."""
    return [
        random_problem(random.Random(f"{split}-{seed}-{index}"), heldout=split != "train") for index in range(count)
    ]


def as_task(problem: Problem, task_id: str) -> dict[str, Any]:
    """A task's row. The agent reads `request` and walks through `rooms`; the grader reads the rest."""
    wanted = [[errand.person, errand.name] for errand in problem.errands]
    rooms = {room: list(things) for room, things in problem.rooms.items()}
    return {"id": task_id, "input": {"request": problem.request, "rooms": rooms, "wanted": wanted}}


def reward(task_input: Mapping[str, Any], output: object) -> float:
    """The share of errands that were run."""
    sent = output.get("sent") if isinstance(output, Mapping) else None
    wanted = task_input["wanted"]
    return sum(wish in sent for wish in wanted) / len(wanted) if isinstance(sent, list) else 0.0


def random_problem(rng: random.Random, *, heldout: bool) -> Problem:
    while True:
        problem = _draw(rng)
        if is_heldout(structure(problem)) == heldout:
            return problem


def structure(problem: Problem) -> str:
    """The things, rooms and people of the errands, without colours."""
    return " ".join(f"{errand.thing} {errand.room} {errand.person}" for errand in problem.errands)


def is_heldout(structure: str) -> bool:
    return zlib.crc32(structure.encode()) % HELDOUT_SHARE == 0


def _draw(rng: random.Random) -> Problem:
    kinds, rooms, people = rng.sample(THINGS, ERRANDS), rng.sample(ROOMS, ERRANDS), rng.sample(PEOPLE, ERRANDS)
    there = {
        room: tuple(f"{colour} {kind}" for colour in rng.sample(COLOURS, CHOICE))
        for room, kind in zip(rooms, kinds, strict=True)
    }
    errands = tuple(
        Errand(thing=kind, colour=rng.choice(there[room]).split()[0], room=room, person=person)
        for kind, room, person in zip(kinds, rooms, people, strict=True)
    )
    wishes = [f'send "{errand.name}" from "{errand.room}" to "{errand.person}"' for errand in errands]
    return Problem(errands=errands, rooms=there, request="\n".join(wishes))
