"""The checkpoints of a run. `save` writes and seals one; `restore` loads the newest that is undamaged.

    checkpoints/step-00004/      one version; with several policies, a folder for each of them in here
        config.json, …           the model, as a Hugging Face folder
        trainer/                 state that only the trainer needs
        manifest.json            size and SHA-256 of every file above; written last

Files are read and written in threads, so that the gateway keeps answering and leases are renewed.
"""

import asyncio
import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lightningrl.errors import UserError
from lightningrl.learner import Learner
from lightningrl.models.folder import flush
from lightningrl.store import Store

KEPT = 2
"""Number of versions on disk: if the newest is damaged, the run continues from the one before."""
MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


class File(msgspec.Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a checkpoint."""

    policy: str
    version: int
    files: dict[str, File]
    """Path relative to the folder → file."""


class Checkpoints:
    """The checkpoints in the folder of a run. All learners are saved and restored together."""

    def __init__(self, folder: Path, *, store: Store, learners: Sequence[Learner]) -> None:
        self._folder = folder
        self._store = store
        self._learners = learners
        self._newest: int | None = None
        self.published = -1
        """The newest version in the store at the start. It is later than `newest` if checkpoints are damaged."""

    async def newest(self) -> int:
        """The newest version that all policies have published and that is undamaged; -1 for a new run.

        Files are checked once, at the start.
        """
        if self._newest is None:
            latest = [await self._store.weights(learner.name) for learner in self._learners]
            self.published = min((weights.version if weights else -1 for weights in latest), default=-1)
            self._newest = await asyncio.to_thread(self._find, self.published)
        return self._newest

    async def restore(self) -> int:
        """Load the newest version into every trainer. Returns the version; -1 for a new run."""
        version = await self.newest()
        if version >= 0:
            for learner in self._learners:
                await learner.load(learner.weights(version))
        return version

    async def save(self, version: int) -> None:
        """Write a version, then publish it in the store: a crash in between repeats work, but loses none."""
        for learner in self._learners:
            weights = learner.weights(version)
            await learner.save(weights)
            await asyncio.to_thread(seal, self._folder / weights.uri, policy=learner.name, version=version)
            await self._store.publish(weights)
        self._newest = version
        for stale in self._versions()[KEPT:]:
            await asyncio.to_thread(shutil.rmtree, self._path(stale))

    def _find(self, published: int) -> int:
        found = self._versions()
        if found and found[0] > published + 1:
            raise UserError(
                f"`{self._folder}` has checkpoints up to version {found[0]}, "
                f"but its store has none after version {max(published, 0)}",
                hint="restore the run's `store.sqlite`, or start a new run with another `--run-dir`",
            )
        if published < 0:
            return -1
        damaged: list[str] = []
        for version in (version for version in found if version <= published):
            damages = [
                damage(self._folder / learner.weights(version).uri, policy=learner.name, version=version)
                for learner in self._learners
            ]
            if not any(damages):
                for text in damaged:
                    log.warning("%s; continuing from version %d, and training again on later records", text, version)
                return version
            damaged += [f"checkpoint {version} is damaged: {text}" for text in damages if text]
        if found and not any(path.is_file() for path in (self._folder / "checkpoints").rglob(MANIFEST)):
            damaged = ["they have no manifest, so they are from an older version of LightningRL"]
        raise UserError(
            f"no checkpoint to continue from: {'; '.join(damaged) or f'there is none in `{self._folder}`'}",
            hint="restore the run's `checkpoints` from a copy, or start a new run with another `--run-dir`",
        )

    def _versions(self) -> list[int]:
        """Versions on disk, newest first."""
        names = [path.name.removeprefix("step-") for path in (self._folder / "checkpoints").glob("step-*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"checkpoints/step-{version:05d}"


def seal(folder: Path, *, policy: str, version: int) -> None:
    """Write the manifest of a complete checkpoint."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {
        path.relative_to(folder).as_posix(): File(bytes=path.stat().st_size, sha256=_sha256(path)) for path in paths
    }
    draft = folder / f".{MANIFEST}.draft"
    draft.write_bytes(msgspec.json.encode(Manifest(policy=policy, version=version, files=files)))
    flush(draft)
    os.replace(draft, folder / MANIFEST)
    flush(folder)


def damage(folder: Path, *, policy: str, version: int) -> str | None:
    """What is wrong with a checkpoint; None if every byte is as it was written."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return f"`{path}` is missing"
    except (OSError, ValueError):
        return f"`{path}` cannot be read"
    if (manifest.policy, manifest.version) != (policy, version):
        return f"`{folder}` holds version {manifest.version} of `{manifest.policy}`"
    return next((text for name, file in manifest.files.items() if (text := _damage(folder / name, file))), None)


def _damage(path: Path, expected: File) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"`{path}` has {size:,} bytes instead of {expected.bytes:,}"
        return None if _sha256(path) == expected.sha256 else f"`{path}` has changed since it was written"
    except FileNotFoundError:
        return f"`{path}` is missing"
    except (OSError, ValueError) as error:
        return f"`{path}` cannot be read: {error}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
