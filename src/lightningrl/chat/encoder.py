"""How does text become token ids? Long texts take seconds, so a caller who may not wait has them tokenized elsewhere,
beforehand.

found = {}
with beforehand(found): ids = encode(text)      raises `LongText`, unless `found` has the text's ids
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from tokenizers import Tokenizer

LONG = 50_000
"""Characters of a long text. Tokenizing as many takes 25 to 100 ms."""
PIECE = 100_000
"""Characters that are counted at once."""
MARGIN = 2
"""A text has too many tokens for certain if its pieces have this many times as many as fit: where a text is cut, a
token or two are added.
"""
STARTS = 64
"""Beginnings of prompts whose ids are remembered: system messages with their tools, which all rollouts have in common.
"""

_found: ContextVar[Mapping[str, list[int]] | None] = ContextVar("lightningrl_found", default=None)


class LongText(Exception):
    """A text to tokenize elsewhere, with `Encoder.encode_long`."""

    def __init__(self, text: str) -> None:
        super().__init__(f"`{len(text)}` characters")
        self.text = text


class TooManyTokens(Exception):
    """A text has far more tokens than fit."""


@contextmanager
def beforehand(found: Mapping[str, list[int]]) -> Iterator[None]:
    """Within, long texts are not tokenized, but looked up. One that is not in `found` raises `LongText`."""
    token = _found.set(found)
    try:
        yield
    finally:
        _found.reset(token)


class Encoder:
    """One tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short_start = lru_cache(STARTS)(lambda text: tuple(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        if len(text) <= LONG:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        found = _found.get()
        if found is None:
            return self.encode_long(text)
        if text not in found:
            raise LongText(text)
        return found[text]

    def encode_start(self, text: str) -> list[int]:
        """As `encode`, for the beginning of a prompt: it is remembered, unless it is long."""
        return [*self._short_start(text)] if len(text) <= LONG else self.encode(text)

    def encode_long(self, text: str, *, most: int | None = None) -> list[int]:
        """For any thread: others run meanwhile. Raises `TooManyTokens` if there are far more than `most` (None: any
        number), having tokenized no more than shows that.
        """
        if most is not None and len(text) > MARGIN * most:
            self._count(text, most=most)
        return self._encode(text)

    def _count(self, text: str, *, most: int) -> None:
        count = 0
        for start in range(0, len(text), PIECE):
            count += len(self._encode(text[start : start + PIECE]))
            if count > MARGIN * most:
                raise TooManyTokens

    def _encode(self, text: str) -> list[int]:
        """The verbs for batches let other threads run, and the fast one does without offsets, which take half the time
        and more.
        """
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
