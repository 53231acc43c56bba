"""One forward pass: tokens of a batch → keys and values in the cache, and the logits of each running sequence.

Legend: A running sequences · N tokens of the batch · T tokens that fit in a row · R rows · H query heads · K key/value
heads · G = H / K · E head size · V vocabulary.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from lightningrl.engine.attention import attend_prompt, attend_rows, causal_mask
from lightningrl.engine.cache import PrefixCache, rounded
from lightningrl.engine.scheduler import Batch
from lightningrl.models.base import PLAIN, Attend, Decoder, Style
from lightningrl.types import Ints

PAD = 16
"""A pass has a multiple of this many tokens. With fewer, a matrix product sums in another order (see `attention`)."""


class ModelRunner:
    def __init__(self, model: Decoder, cache: PrefixCache) -> None:
        self.model = model
        self.cache = cache

    def forward(self, batch: Batch) -> Tensor:
        """[A V] logits (float32) after the last token of each running sequence."""
        count = len(batch.token_ids)
        positions = self._on_device(batch.positions)
        hidden = self.model.hidden(self._on_device(batch.token_ids), positions, self._attention(batch, positions))
        if not batch.spans:  # `hidden` is padded already
            return self.model.logits(hidden)[:count].float()
        last = np.cumsum([1] * batch.singles + [s.stop - s.start for s in batch.spans]) - 1
        return self.model.logits(hidden[self._on_device(last)])[: len(last)].float()

    def _attention(self, batch: Batch, positions: Tensor) -> Attend:
        """An `Attend` over the cache for the tokens of `batch`, at padded `positions`. Padding gets zeros."""
        cache, singles, dtype = self.cache, batch.singles, self.model.dtype
        K, G, E = self.model.kv_heads, self.model.heads // self.model.kv_heads, self.model.head_size
        N, T = len(batch.positions), cache.tokens.shape[1]
        rows = np.concatenate([np.arange(singles), *(np.full(s.stop - s.start, s.row) for s in batch.spans)])
        numbers = ((rows[:, None] * K + np.arange(K)) * T + batch.positions[:, None]).reshape(-1)  # in [R·K·T]
        places = torch.from_numpy(numbers).to(self.model.device)
        reach = rounded(int(batch.positions[:singles].max(initial=0)) + 1)
        starts, offset = [], singles
        for span in batch.spans:
            starts.append(offset)
            offset += span.stop - span.start

        @functools.cache
        def masks_within(window: int | None) -> tuple[Tensor, list[Tensor]]:
            """Of the decoded sequences, and of each prompt."""
            rows = causal_mask(positions[:singles], reach, dtype=dtype, window=window)
            prompts = [
                causal_mask(positions[start : start + s.stop - s.start], rounded(s.stop), dtype=dtype, window=window)
                for s, start in zip(batch.spans, starts, strict=True)
            ]
            return rows.expand(singles, K, reach).reshape(singles * K, 1, reach), prompts

        # reused by every layer; padding stays zero
        out = torch.zeros(len(positions), K * G, E, dtype=dtype, device=self.model.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
            keys, values = cache.keys(layer), cache.values(layer)
            keys.view(-1, E).index_copy_(0, places, k[:N].reshape(N * K, E))
            values.view(-1, E).index_copy_(0, places, v[:N].reshape(N * K, E))
            mask, masks = masks_within(style.window)
            if singles:
                rows = keys[:singles, :, :reach], values[:singles, :, :reach]
                attend_rows(q[:singles], *rows, mask, out[:singles], style)
            for span, start, span_mask in zip(batch.spans, starts, masks, strict=True):
                here, length = slice(start, start + span.stop - span.start), span_mask.shape[-1]
                row = keys[span.row, :, :length], values[span.row, :, :length]
                attend_prompt(q[here], *row, span_mask, out[here], style)
            return out

        return attend

    def _on_device(self, array: Ints) -> Tensor:
        """[N] followed by zeros, up to a multiple of `PAD`, on the model's device."""
        return torch.from_numpy(np.pad(array.astype(np.int64), (0, -len(array) % PAD))).to(self.model.device)
