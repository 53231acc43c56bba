"""Does a vLLM server load every tensor? Asked once a server, at the first two loads of whole models.

    first load     load → hash → zero all tensors → load again → hash: equal, or a tensor is not written
    second load    hash: each tensor that has changed in the folder must have changed on the server

The server's `/weight_checker` hashes and zeroes its tensors (vLLM 0.32 and newer, with `VLLM_SERVER_DEV_MODE=1`). Of
those, tensors are compared that have bytes of their own and a name of the folder's, or are joined from such: queries,
keys and values; gate and up projections. vLLM for CPUs packs most matrices, and then hashes nothing of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from lightningrl.engine.base import Unanswerable
from lightningrl.engine.http import Pool, Server, decoded
from lightningrl.models.folder import safetensors_header

PATH = "/weight_checker"
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""vLLM's name for a matrix → the folder's names for its parts."""
NOTHING = sha256(b"").hexdigest()
"""Hash of a tensor without bytes: vLLM for CPUs keeps the values elsewhere."""
SHOWN = 3
"""Most names in an error."""


class _Checksums(msgspec.Struct):
    checksums: dict[str, str] | None = None


class _Compared(msgspec.Struct):
    match: bool
    mismatches: list[str]


_checksums = msgspec.json.Decoder(_Checksums)
_compared = msgspec.json.Decoder(_Compared)


class WeightCheck:
    """The check of one server."""

    def __init__(self, pool: Pool, server: Server) -> None:
        self._pool, self._server = pool, server
        self._folder: Path | None = None
        """Of the load before; None before the first."""
        self._hashes: dict[str, str] = {}
        self._done = False

    async def load(self, folder: Path, load: Callable[[], Awaitable[None]]) -> None:
        """Load `folder` by calling `load`, and check it. Raises `Unanswerable` if a tensor is not loaded."""
        await load()
        if self._done:
            return
        hashes = await self._ask()
        if hashes is None:
            self._done = True
        elif self._folder is None:
            await self._pool.post(self._server, PATH, {"action": "reset"})
            await load()
            await self._refuse_unwritten(hashes)
            self._hashes, self._folder = hashes, folder
        else:
            expected = await asyncio.to_thread(changed_tensors, self._folder, folder)
            unchanged, rest = kept(self._hashes, hashes, changed=expected)
            if unchanged:
                what = "a mixture of old and new weights" if rest else "the old weights, or a part of them"
                raise self._error(f"still serves {what}: nothing has changed in", unchanged)
            self._done = bool(expected)  # else nothing has changed: ask again at the next load
            self._hashes, self._folder = hashes, folder

    async def _ask(self) -> dict[str, str] | None:
        """Tensor → hash; None: the server has no such endpoint."""
        answer = await self._pool.post(self._server, PATH, {"action": "checksum"}, absent=b"{}")
        return decoded(self._server, answer, _checksums).checksums

    async def _refuse_unwritten(self, baseline: Mapping[str, str]) -> None:
        answer = await self._pool.post(self._server, PATH, {"action": "compare", "baseline": dict(baseline)})
        compared = decoded(self._server, answer, _compared)
        if not compared.match:
            raise self._error("does not load all tensors: zeros stay in", compared.mismatches)

    def _error(self, what: str, names: list[str]) -> Unanswerable:
        shown = ", ".join(f"`{_plain(name)}`" for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return Unanswerable(f"`{self._server.url}` {what} {shown}{more}", hint="see docs/engines.md; try another vLLM")


def kept(before: Mapping[str, str], after: Mapping[str, str], *, changed: Set[str]) -> tuple[list[str], list[str]]:
    """The server's tensors that should have changed: those that have not, and those that have. `changed`: the folder's
    names of the tensors that have changed in it. Of a tensor that several GPUs share, one part may stay as it was: an
    update changes the embeddings of the tokens that it has seen, and no others.
    """
    shards: dict[str, list[str]] = {}
    for name, digest in after.items():
        if digest != NOTHING and changed & parts_of(_plain(name)):
            shards.setdefault(_plain(name), []).append(name)
    still = {plain for plain, names in shards.items() if all(after[name] == before.get(name) for name in names)}
    return [name for name in shards if name in still], [name for name in shards if name not in still]


def parts_of(name: str) -> set[str]:
    """The folder's names for the tensors that are joined in one of the server's.

    `layers.0.mlp.gate_up_proj.weight` → `layers.0.mlp.gate_proj.weight` and `layers.0.mlp.up_proj.weight`
    """
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            return {name.replace(f".{joined}.", f".{part}.") for part in parts}
    return {name}


def changed_tensors(old: Path, new: Path) -> set[str]:
    """Names of the tensors whose bytes differ between two folders."""
    before, after = _tensors(old), _tensors(new)
    return {name for name in before.keys() & after.keys() if not np.array_equal(before[name], after[name])}


def _tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Name → bytes, read from disk when they are used."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header, start = safetensors_header(file)
        data = np.memmap(file, np.uint8, mode="r")
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            found[name] = data[start + first : start + last]
    return found


def _plain(name: str) -> str:
    """A tensor's name without the worker's, and without what servers with adapters add:
    `dp0:pp0:pcp0:tp0:model.layers.0.mlp.down_proj.base_layer.weight` → `model.layers.0.mlp.down_proj.weight`
    """
    return name.rpartition(":")[2].replace(".base_layer.", ".")
