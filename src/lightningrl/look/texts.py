"""What is the text of each token? Ids in, one text for each id out; joined, they are the decoded ids."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders

from lightningrl.chat.detokenizer import UNFINISHED, Detokenizer
from lightningrl.look.columns import Mask
from lightningrl.types import Ints

TOKENIZERS = 4
"""Tokenizers that are kept in memory. To read one with 150,000 tokens takes half a second."""


class Texts:
    """The texts of one tokenizer's tokens. Control tokens have a text, too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone = isinstance(tokenizer.decoder, decoders.ByteLevel)
        """Whether a token's text does not depend on the tokens around it, but for halves of characters."""
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    def is_added(self, token_id: int) -> bool:
        """Whether it is a control token, or another that is never merged with its neighbours."""
        return token_id in self._added

    def of(self, token_ids: Ints) -> tuple[str, ...]:
        """[C] text of each token. A character that spans several tokens belongs to the last of them."""
        ids: list[int] = token_ids.tolist()
        if not self._alone:
            return tuple(self._in_order(ids))
        known, places = np.unique(token_ids, return_inverse=True)
        alone = self._decoded([[token_id] for token_id in known.tolist()])
        texts: list[str] = np.array(alone, dtype=object)[places].tolist()
        unfinished = np.array([UNFINISHED in text for text in alone], np.bool_)[places]
        for start, end in _runs(unfinished):
            texts[start:end] = self._in_order(ids[start:end])
        return tuple(texts)

    def _decoded(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.decode_batch([list(one) for one in ids], skip_special_tokens=False)

    def _in_order(self, ids: Sequence[int]) -> list[str]:
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        detokenizer = Detokenizer(decode, looks_back=not self._alone)
        pieces = [detokenizer.feed([token_id]) for token_id in ids]
        if pieces:
            pieces[-1] += detokenizer.flush()
        return pieces


def texts_from(file: Path) -> Texts:
    """Read a tokenizer.json. One that has not changed is read once."""
    return _texts(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=TOKENIZERS)
def _texts(file: Path, changed_at: int) -> Texts:
    return Texts(Tokenizer.from_file(str(file)))


def _runs(holds: Mask) -> Iterator[tuple[int, int]]:
    """(start, end) of each longest run of True: `[0 1 1 0 1]` has (1, 3) and (4, 5)."""
    edges = np.flatnonzero(np.diff(holds, prepend=False, append=False)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
