"""What did a step teach, beyond what its records tell? One file for each step and policy: `RUN/taught/`.

    values            each trained call         the critic's value, from which advantages are computed again
    entropies         calls of some groups      before the update
    logprobs_after    calls of the same groups  after the update; ratio = exp(logprobs_after - recorded logprobs)

The file has plain arrays that numpy reads: `np.load(path)`.
"""

import logging
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from lightningrl.errors import UserError
from lightningrl.types import Floats

log = logging.getLogger(__name__)

DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    KeyError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    TypeError,
)
"""What numpy and zipfile raise for a file that is not whole, e.g. if the flags of an entry have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What one step taught one policy. Calls that a mapping lacks were not measured."""

    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Call id → the critic's value of the call, before the update. Empty without a critic."""
    entropies: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Call id → [C] entropy in nats of the distribution of each sampled token, at its temperature, before the update.
    """
    logprobs_after: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """Call id → [C] log-probability in nats of each sampled token, at its temperature, after all updates of the step.
    """


def taught_file(folder: Path, *, step: int, policy: str) -> Path:
    """The file of a step, which counts from 0, and a policy in the run's `folder`."""
    return folder / "taught" / f"step-{step:05d}-{policy}.npz"


def keep_taught(taught: Taught, folder: Path, *, step: int, policy: str) -> None:
    """Save it in the run's `folder`, unless it is empty. Training does not need it, and goes on if the disk refuses."""
    if not (taught.values or taught.logprobs_after):
        return
    try:
        save_taught(taught_file(folder, step=step, policy=policy), taught)
    except OSError as error:
        log.warning("step %d: what it taught was not saved: %s", step + 1, error)


def save_taught(path: Path, taught: Taught) -> None:
    """Write the file, complete or absent. The same content gives the same bytes.

    Of V calls with a value: `value_ids` and `values` [V]. Of K measured calls: `entropy_ids` [K], and their tokens one
    after another in `entropies`; those of call k are `entropies[entropy_starts[k]:entropy_starts[k + 1]]`. Likewise
    `after_ids`, `after_starts` and `after`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        np.savez_compressed(
            file,
            value_ids=np.array(list(taught.values), np.str_),
            values=np.array(list(taught.values.values()), np.float64),
            entropy_ids=np.array(list(taught.entropies), np.str_),
            entropy_starts=_starts(taught.entropies),
            entropies=_joined(taught.entropies),
            after_ids=np.array(list(taught.logprobs_after), np.str_),
            after_starts=_starts(taught.logprobs_after),
            after=_joined(taught.logprobs_after),
        )
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load_taught(path: Path) -> Taught | None:
    """The content of the file; None if there is none. Raises `UserError` if it is damaged or cannot be read."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return Taught(
                values=dict(zip(arrays["value_ids"].tolist(), arrays["values"].tolist(), strict=True)),
                entropies=_split(arrays["entropy_ids"], arrays["entropy_starts"], arrays["entropies"]),
                logprobs_after=_split(arrays["after_ids"], arrays["after_starts"], arrays["after"]),
            )
    except FileNotFoundError:
        return None
    except DAMAGE as error:
        hint = "delete it: the run does not need it, and shows everything else without it"
        raise UserError(f"`{path}` is damaged or cannot be read", hint=hint) from error


def _joined(tokens: Mapping[str, Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *tokens.values()]).astype(np.float32)


def _starts(tokens: Mapping[str, Floats]) -> np.ndarray:
    return np.cumsum([0, *map(len, tokens.values())], dtype=np.int64)


def _split(call_ids: np.ndarray, starts: np.ndarray, tokens: Floats) -> dict[str, Floats]:
    parts = [tokens[first:end] for first, end in pairwise(starts)]
    return dict(zip(call_ids.tolist(), parts, strict=True))
