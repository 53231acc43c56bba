"""The prefix cache: rows of token ids with their keys and values.

Rows `[0, active)` are being decoded. The others keep ended generations, so that a prompt with the same prefix reuses
their keys and values. Running rows are kept together at the front: attention over them is one strided view.

Legend: R rows · T tokens that fit in a row · L layers · K key/value heads · E head size.
"""

import numpy as np
import torch
from torch import Tensor

from lightningrl.models.devices import CPU
from lightningrl.types import Ints

BLOCK = 32
"""Rows are read in multiples of this many tokens, so that vectorised kernels have no odd tail."""

SMALL_LOSS = 4
"""A prompt reuses an idle row, without a copy, if at most shared / 4 of its tokens would be lost. Not tuned."""


ROWS_PER_SLOT = 2
"""Rows for each request that is decoded together with others: one is running, one keeps an ended generation."""


def rounded(length: int, to: int = BLOCK) -> int:
    return -(-length // to) * to


class PrefixCache:
    """Rows of keys and values, and the tokens from which they were computed."""

    def __init__(
        self,
        *,
        rows: int,
        length: int,
        layers: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        shape = (layers, 2, rows, kv_heads, rounded(length), head_size)
        self.keys_values = torch.zeros(shape, dtype=dtype, device=device)
        """[L 2 R K T E]. Never NaN: masked positions are multiplied by zero."""
        self.tokens: Ints = np.zeros((rows, rounded(length)), dtype=np.int32)
        """[R T]"""
        self.known: Ints = np.zeros(rows, dtype=np.int32)
        """[R] number of leading tokens of each row whose keys and values are computed."""
        self.used = np.zeros(rows, dtype=np.int64)
        """[R] counter at the row's last use; the least recently used row is evicted first."""
        self.active = 0
        self._now = 0

    def keys(self, layer: int) -> Tensor:
        """[R K T E]"""
        return self.keys_values[layer, 0]

    def values(self, layer: int) -> Tensor:
        """[R K T E]"""
        return self.keys_values[layer, 1]

    def shared_with(self, prompt: Ints) -> Ints:
        """[R] number of leading tokens of `prompt` that each row holds, computed or scheduled."""
        differs = self.tokens[:, : len(prompt)] != prompt
        first = differs.argmax(axis=1).astype(np.int32)
        first[~differs[np.arange(len(first)), first]] = len(prompt)
        return first

    def admit(self, prompt: Ints, *, source: int, shared: int) -> int:
        """Give `prompt` the next active row, and its first `shared` tokens from row `source`. Returns the row."""
        row = self.active
        self.active += 1
        if shared:
            self._touch(source)
        takes_over = source >= row and (self.known[source] - shared) * SMALL_LOSS <= shared > 0
        if takes_over:
            if source != row:
                self._swap(source, row)
        else:
            self._keep_elsewhere(row, but=source if shared else row)
            if source != row:
                self._copy(source, row, shared)
        self.tokens[row, : len(prompt)] = prompt
        self.known[row] = shared
        return row

    def release(self, row: int) -> int:
        """End the generation in `row` and keep its keys and values. Returns the row that moved into its place, or `row`
        itself if none did.
        """
        self.active -= 1
        self._touch(row)
        if row != self.active:
            self._swap(row, self.active)
        return self.active

    def clear(self) -> None:
        """Forget all idle rows, because the weights have changed."""
        assert self.active == 0
        self.known[:] = 0

    def reset(self) -> None:
        """Forget all rows, running ones too, because a step has failed halfway."""
        self.active = 0
        self.keys_values.zero_()
        self.clear()

    def _touch(self, row: int) -> None:
        self._now += 1
        self.used[row] = self._now

    def _keep_elsewhere(self, row: int, *, but: int) -> None:
        """Before `row` is overwritten, copy it over an empty or less recently used row, if there is one."""
        age = np.where(self.known == 0, -1, self.used)
        age[: self.active] = age[but] = np.iinfo(np.int64).max
        victim = int(age.argmin())
        if self.known[row] and age[victim] < self.used[row]:
            self._copy(row, victim, int(self.known[row]))
            self.used[victim] = self.used[row]

    def _copy(self, source: int, target: int, count: int) -> None:
        self.keys_values[:, :, target, :, :count] = self.keys_values[:, :, source, :, :count]
        self.tokens[target, :count] = self.tokens[source, :count]
        self.known[target] = count

    def _swap(self, a: int, b: int) -> None:
        count = int(max(self.known[a], self.known[b]))
        kept = self.keys_values[:, :, a, :, :count].clone()
        self.keys_values[:, :, a, :, :count] = self.keys_values[:, :, b, :, :count]
        self.keys_values[:, :, b, :, :count] = kept
        for array in (self.tokens, self.known, self.used):
            array[[a, b]] = array[[b, a]]
