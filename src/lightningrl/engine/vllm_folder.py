"""Prepare a model folder so that a running vLLM reloads all of it.

Where input and output embeddings are one tensor, Hugging Face folders hold it once, as the input's. On CPUs vLLM keeps
a packed copy for the output, and `reload_weights` refreshes it only if the folder has `lm_head.weight`. Without it vLLM
mixes old and new weights without an error (vLLM 0.32, measured by tests_vllm). So `lm_head.weight` is added.
"""

import asyncio
import json
import shutil
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lightningrl.models.folder import safetensors_header

INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"
HEAD = "lm_head.safetensors"


@asynccontextmanager
async def with_output_head(folder: Path) -> AsyncIterator[Path]:
    """`folder`; or, while the block runs, a folder beside it with the same files and the output embeddings."""
    beside = folder.with_name(f".{folder.name}.vllm")
    file = await asyncio.to_thread(_needs_head, folder)
    if file is None:
        yield folder
        return
    try:
        await asyncio.to_thread(_write, beside, folder, file)
        yield beside
    finally:
        await asyncio.to_thread(shutil.rmtree, beside, ignore_errors=True)


def _needs_head(folder: Path) -> Path | None:
    """The file with the input embeddings, if the output's are tied to them and absent; else None."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return None
    names = {name: file for file in sorted(folder.glob("*.safetensors")) for name in safetensors_header(file)[0]}
    return None if OUTPUT in names else names.get(INPUT)


def _write(beside: Path, folder: Path, file: Path) -> None:
    shutil.rmtree(beside, ignore_errors=True)  # left by a process that was killed
    beside.mkdir()
    for entry in folder.iterdir():
        if entry.is_file() and entry.name != INDEX:
            (beside / entry.name).symlink_to(entry)
    _write_head(beside / HEAD, file)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index["weight_map"][OUTPUT] = HEAD
        (beside / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _write_head(path: Path, source: Path) -> None:
    """Write a safetensors file with the output embeddings, copied byte for byte from `source`."""
    header, start = safetensors_header(source)
    entry = header[INPUT]
    first, last = entry["data_offsets"]
    head = json.dumps({OUTPUT: {**entry, "data_offsets": [0, last - first]}}).encode()
    with source.open("rb") as reading, path.open("wb") as writing:
        writing.write(struct.pack("<Q", len(head)) + head)
        reading.seek(start + first)
        left = last - first
        while left:
            block = reading.read(min(left, 2**24))
            if not block:
                raise EOFError(f"`{source}` is shorter than its header says")
            writing.write(block)
            left -= len(block)
