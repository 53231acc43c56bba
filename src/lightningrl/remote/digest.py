"""Do two machines have the same copy of a recipe? Digests of its files, and the settings that a worker runs by.

A worker runs its own copy: the server names no code that a worker would load. So a copy that differs would teach from
another agent, or by another reward.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.config import AgentConfig
from lightningrl.remote.wire import Copy

LARGEST = 2**20
"""Bytes. Larger files are data rather than code, and are not compared."""
FILES, TOTAL = 2000, 2**26
"""Number of files that are compared, in the order of their paths, and their bytes together."""
FOLDERS = 2000
"""Number of folders that are searched for them."""
PASSED_OVER = {"__pycache__", "node_modules", "runs", "site-packages", "venv"}
"""Folders that hold no code of the recipe; nor do hidden ones, environments, models and runs (`_is_code`)."""
MARKS = ("pyvenv.cfg", "store.sqlite", "store.url", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
"""A folder with one of these files is an environment, a run or a model."""
APART = ("recipe.toml",)
"""Files that may differ: of the recipe, the settings are compared and not the text."""
ENDINGS = (".key", ".log", ".pem", ".pyc")
"""Names of files that are no code: keys, certificates, logs."""
SETTINGS = ("entry", "command", "reward", "reward_range", "grade", "isolation")
"""Settings of `[agent]` that both sides must share, besides `env`."""
FIRST = "recipe.json"
"""File in the run's folder with the paths that the recipe had when the run began."""
SHOWN = 20
"""Number of differences that are told; the others are counted."""


def copy_of(agent: AgentConfig, *, root: Path) -> Copy:
    """Digests of the recipe in `root`. Reads up to 2000 files; call it in a thread."""
    return Copy(
        files=dict(_digests(root)),
        agent=agent.model_dump(mode="json", include=set(SETTINGS)),
        env={name: hashlib.sha256(value.encode()).hexdigest() for name, value in agent.env.items()},
    )


def served_copy(agent: AgentConfig, *, root: Path, folder: Path) -> Copy:
    """The server's copy, for the run in `folder`. What agents and graders have written into the recipe's folder since
    the run began is `added`: a server that starts again must not turn its workers away for it. Call it in a thread.
    """
    found = copy_of(agent, root=root)
    first = folder / FIRST
    if not first.exists():
        draft = first.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(sorted(found.files)))
        draft.replace(first)
    before = msgspec.json.decode(first.read_bytes(), type=set[str])
    return msgspec.structs.replace(found, added=sorted(found.files.keys() - before))


def differences(*, worker: Copy, server: Copy) -> list[str]:
    """What differs, a line each; empty if a worker with this copy runs what the server means."""
    found = [
        f"`agent.{name}` is `{_shown(mine)}` on the worker and `{_shown(other)}` on the server"
        for name, mine, other in _pairs(worker.agent, server.agent)
    ]
    found += _unequal(worker.env, server.env, prefix="agent.env.")
    added = set(server.added)
    mine, others = ({path: it for path, it in copy.files.items() if path not in added} for copy in (worker, server))
    found += _unequal(mine, others)
    more = len(found) - SHOWN
    return [*found[:SHOWN], f"and {more} more"] if more > 0 else found


def _unequal(worker: Mapping[str, str], server: Mapping[str, str], *, prefix: str = "") -> Iterator[str]:
    """What differs by its digest, a line each, with the prefix before its name."""
    for key, mine, other in _pairs(worker, server):
        name = f"{prefix}{key}"
        if mine is None:
            yield f"`{name}` is missing on the worker"
        elif other is None:
            yield f"`{name}` is missing on the server"
        else:
            yield f"`{name}` is another on the worker than on the server"


def _pairs(worker: Mapping[str, Any], server: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of what differs; None: one side lacks it."""
    for name in sorted({*worker, *server}):
        if worker.get(name) != server.get(name):
            yield name, worker.get(name), server.get(name)


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value}"[:200]


def _digests(root: Path) -> Iterator[tuple[str, str]]:
    left = TOTAL
    for path in sorted(_files(root))[:FILES]:
        try:
            content = path.read_bytes()
        except OSError:  # it was just deleted, or belongs to another user
            continue
        left -= len(content)
        if left < 0:
            return
        yield path.relative_to(root).as_posix(), hashlib.sha256(content).hexdigest()


def _files(root: Path) -> Iterator[Path]:
    for number, (place, folders, names) in enumerate(os.walk(root)):
        if number == FOLDERS:
            return
        folders[:] = sorted(name for name in folders if _is_code(Path(place, name)))
        for name in names:
            passed_over = name.startswith(".") or name.endswith(ENDINGS) or name in APART
            if not passed_over and _is_small_file(path := Path(place, name)):
                yield path


def _is_small_file(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:  # a link that leads nowhere
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST


def _is_code(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in PASSED_OVER:
        return False
    return not any(os.path.exists(folder / mark) for mark in MARKS)
