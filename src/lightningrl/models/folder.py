"""How does a folder appear all at once? It is written beside its final place, flushed to disk, and renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write into; at the end of the block it becomes `path`, in place of one of that name.

    The folder is complete or absent, never half there: a kill at any instant leaves the old one, or none, or the new one.
    """
    draft, old = path.with_name(f".{path.name}.draft"), path.with_name(f".{path.name}.old")
    for leftover in (draft, old):  # of an earlier process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
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
    """Have a file or a folder survive a power cut: files first, then the folder that names them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
