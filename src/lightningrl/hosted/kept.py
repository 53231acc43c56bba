"""Where does a service keep a version of an adapter? The record in a checkpoint's folder."""

from pathlib import Path

import msgspec

from lightningrl.errors import UserError

RECORD = "hosted.json"
"""File of a checkpoint that says where the service keeps it."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service keeps a version of an adapter. Empty strings: it does not keep this part."""

    base: str
    """The service's name for the model below the adapter."""
    rank: int
    state: str
    """`tinker://…` path of weights and optimizer."""
    sampler: str
    """`tinker://…` path of the weights for sampling."""
    steps: int
    """Number of updates made so far."""
    marks: tuple[float, ...] = ()
    """Log-probabilities under these weights, `RemotePolicy.marks`; empty: none were taken."""


def write_saved(folder: Path, saved: Saved) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{RECORD}.draft"
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
    draft.replace(folder / RECORD)


def read_saved(folder: Path) -> Saved | None:
    """None: the folder has no such record."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Saved)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UserError(f"`{folder / RECORD}` cannot be read: {error}", hint="restore it from a copy") from error
