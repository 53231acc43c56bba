"""Which tensors does a folder hold, and what are they? Read safetensors files tensor by tensor.

A file is mapped into memory, so a tensor costs memory once it is copied. No second model is built beside the first.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from lightningrl.models.folder import safetensors_header

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model folder has its weights in one file, or in several that an index lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]


def stored_in(*files: Path) -> dict[str, Stored]:
    """Name → tensor in these safetensors files, read from their headers. Raises `ValueError` for other files."""
    return {
        name: Stored(file=file, shape=tuple(entry["shape"]))
        for file in files
        for name, entry in safetensors_header(file)[0].items()
        if name != "__metadata__"
    }


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files with the weights of a model folder, as transformers chooses them; () if it has no safetensors."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if (folder / INDEX).is_file():
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return tuple(folder / shard for shard in sorted(set(shards)))
    return ()


def read(stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with its name, file by file. It lives in the mapped file: copy it to keep or to change it."""
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        with safe_open(file, framework="pt") as mapped:
            for name, tensor in stored.items():
                if tensor.file == file:
                    yield name, mapped.get_tensor(name)
