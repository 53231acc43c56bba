"""Model folders on disk: write one atomically (beside its place, flush, rename), and check that one is complete."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightningrl.errors import UserError

LFS_POINTER = b"version https://git-lfs"
"""First bytes of a git-LFS pointer, which stands for a file that git has not fetched."""


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write into. At the end of the block it becomes `path` and replaces a folder of that name.

    The folder is complete or absent: a kill at any instant leaves the old one, none, or the new one. Its files get the
    permissions that the umask gives, whatever the library that wrote them sets.
    """
    draft, old = path.with_name(f".{path.name}.draft"), path.with_name(f".{path.name}.old")
    for leftover in (draft, old):  # left by a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        readable = draft.stat().st_mode & 0o666
        for file in draft.iterdir():
            if file.is_file():
                file.chmod(readable)
        for file in (*draft.iterdir(), draft):
            flush(file)
        if path.exists():
            path.rename(old)
        draft.rename(path)
        shutil.rmtree(old, ignore_errors=True)
        flush(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync a file or a folder, to survive a power cut. Flush files first, then the folder that names them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(folder: Path) -> None:
    """Raises `UserError` for a git-LFS pointer in place of a file, and for weights that their header contradicts."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors") or not path.is_file():
            continue
        with path.open("rb") as file:
            pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if pointer:
            raise UserError(
                f"`{path}` is a git-LFS pointer, not the file itself",
                hint=f"`git lfs pull` in `{folder}`, or download the model again",
            )
        if path.suffix == ".safetensors":
            _check_length(path)


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Name → dtype, shape and offsets of each tensor, and the byte where the data begins. Raises `ValueError`.

    Layout: 8 bytes with the length of the header, the header in JSON, the tensors
    (https://github.com/huggingface/safetensors#format).
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header does not fit")
        return json.loads(file.read(length)), 8 + length


def _check_length(path: Path) -> None:
    size, hint = path.stat().st_size, "copy or download the model again"
    try:
        tensors, begin = safetensors_header(path)
        ends = (tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__")
        expected = begin + max(ends, default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"`{path}` is no safetensors file, or the beginning of one: {size:,} bytes", hint=hint
        ) from error
    if size != expected:
        raise UserError(f"`{path}` has {size:,} bytes, its header says {expected:,}", hint=hint)
