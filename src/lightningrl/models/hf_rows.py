"""Flat tokens as rows, one for each path from a root to a leaf, for models whose layers carry state along a row.

Legend: N tokens · R rows of one length · T their length · D hidden size.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightningrl.types import Ints


def rows_of(positions: Ints) -> list[Ints]:
    """The paths, as indices into tokens that lie depth first with their distances from the root [N]. Short ones first.

    Worked example: positions 0 1 2 1 2 0 make the rows [5], [0 1 2] and [0 3 4].
    """
    leaf = np.append(positions[1:] <= positions[:-1], True)  # a deeper token follows every other one
    path: list[int] = []
    rows: list[Ints] = []
    for token, position in enumerate(positions.tolist()):
        path[position:] = [token]
        if leaf[token]:
            rows.append(np.array(path, dtype=np.int32))
    return sorted(rows, key=len)


def run_rows(base: Any, token_ids: Tensor, positions: Tensor, *, checkpointing: bool) -> Tensor:
    """[N D] final hidden states of tokens [N], by a base model of Hugging Face. A token that several rows share has the
    state of the first of them.
    """
    N = len(token_ids)
    run = partial(checkpoint, _run, use_reentrant=False, preserve_rng_state=False) if checkpointing else _run
    states: list[Tensor] = []
    place = np.full(N, -1, dtype=np.int64)  # of each token, in all rows one after the other
    done = 0
    for rows in _batches(rows_of(positions.cpu().numpy()), most=N):
        found: Any = run(base, token_ids[torch.from_numpy(rows).to(token_ids.device)])
        states.append(found.flatten(0, 1))
        flat = rows.reshape(-1)
        first = np.unique(flat, return_index=True)
        new = place[first[0]] < 0
        place[first[0][new]] = done + first[1][new]
        done += len(flat)
    return torch.cat(states).index_select(0, torch.from_numpy(place).to(token_ids.device))


def run_row(base: Any, token_ids: Tensor) -> Tensor:
    """[T D] hidden states of one row [T]."""
    return _run(base, token_ids[None])[0]


def _run(base: Any, token_ids: Tensor) -> Tensor:
    """[R T D] hidden states of rows [R T]."""
    return base(input_ids=token_ids, use_cache=False)[0]


def _batches(rows: list[Ints], *, most: int) -> Iterator[np.ndarray]:
    """Rows of equal length together, [R T], up to `most` tokens or one row: nothing is padded."""
    batch: list[Ints] = []
    for row in rows:
        if batch and (len(row) != len(batch[0]) or (len(batch) + 1) * len(row) > most):
            yield np.stack(batch)
            batch = []
        batch.append(row)
    if batch:
        yield np.stack(batch)
