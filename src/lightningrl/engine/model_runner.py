"""One forward pass: tokens of a batch → keys and values in the cache, and the logits of each running sequence.

Legend: A running sequences · N tokens of the batch · T tokens that fit in a row · R rows · H query heads · K key/value
heads · G = H / K · E head size · V vocabulary.
"""

import torch
from torch import Tensor

from lightningrl.engine.attention import attend_prompt, attend_rows, causal_mask
from lightningrl.engine.cache import PrefixCache, rounded
from lightningrl.engine.scheduler import Batch
from lightningrl.models.base import PLAIN, Attend, Decoder, Style

PAD = 16
"""A pass has a multiple of this many tokens. With fewer, a matrix product sums in another order (see `attention`)."""


class ModelRunner:
    def __init__(self, model: Decoder, cache: PrefixCache) -> None:
        self.model = model
        self.cache = cache

    def forward(self, batch: Batch) -> Tensor:
        """[A V] logits (float32) after the last token of each running sequence."""
        count = len(batch.token_ids)
        hidden = self.model.hidden(
            _padded(torch.from_numpy(batch.token_ids)),
            _padded(torch.from_numpy(batch.positions)),
            self._attention(batch),
        )
        if not batch.spans:  # `hidden` is padded already
            return self.model.logits(hidden)[:count].float()
        lengths = torch.tensor([1] * batch.singles + [s.stop - s.start for s in batch.spans])
        last = lengths.cumsum(0) - 1
        return self.model.logits(hidden[_padded(last)])[: len(last)].float()

    def _attention(self, batch: Batch) -> Attend:
        """An `Attend` over the cache for the tokens of `batch`. Padding gets zeros."""
        cache, singles, dtype = self.cache, batch.singles, self.model.dtype
        K, G, E = self.model.kv_heads, self.model.heads // self.model.kv_heads, self.model.head_size
        positions = torch.from_numpy(batch.positions).long()
        N, T = len(positions), cache.tokens.shape[1]
        rows = torch.arange(singles)
        if batch.spans:
            rows = torch.cat([rows, *(torch.full((s.stop - s.start,), s.row) for s in batch.spans)])
        places = ((rows[:, None] * K + torch.arange(K)) * T + positions[:, None]).view(-1)  # in [R·K·T]
        reach = rounded(int(batch.positions[:singles].max(initial=0)) + 1)
        mask = (
            causal_mask(positions[:singles], reach, dtype=dtype)
            .expand(singles, K, reach)
            .reshape(singles * K, 1, reach)
        )
        starts, offset = [], singles
        for span in batch.spans:
            starts.append(offset)
            offset += span.stop - span.start
        masks = [causal_mask(torch.arange(s.start, s.stop), rounded(s.stop), dtype=dtype) for s in batch.spans]

        out = torch.zeros(N + -N % PAD, K * G, E, dtype=dtype)  # reused by every layer; padding stays zero

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style = PLAIN) -> Tensor:
            keys, values = cache.keys(layer), cache.values(layer)
            keys.view(-1, E).index_copy_(0, places, k[:N].reshape(N * K, E))
            values.view(-1, E).index_copy_(0, places, v[:N].reshape(N * K, E))
            if singles:
                attend_rows(q[:singles], keys[:singles, :, :reach], values[:singles, :, :reach], mask, out[:singles])
            for span, start, span_mask in zip(batch.spans, starts, masks, strict=True):
                here, length = slice(start, start + span.stop - span.start), span_mask.shape[-1]
                attend_prompt(q[here], keys[span.row, :, :length], values[span.row, :, :length], span_mask, out[here])
            return out

        return attend


def _padded(x: Tensor) -> Tensor:
    """[N] followed by zeros, up to a multiple of `PAD`."""
    return torch.nn.functional.pad(x.long(), (0, -len(x) % PAD))
