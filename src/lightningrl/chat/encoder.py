"""How does text become token ids? A long text takes seconds. An event loop must not wait for it, so it has the text
tokenized on a thread first.

    with beforehand(known): ids = encode(text)      raises `LongText`, unless `known` has the ids of the text
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from tokenizers import Tokenizer

LONG = 50_000
"""Characters from which on a text is long. Tokenizing so many takes 25 to 100 ms."""
PIECE = 100_000
"""Characters whose tokens are counted at once."""
MARGIN = 2
"""A text surely has too many tokens if its pieces have `MARGIN` times as many as fit. Each cut adds a token or two."""
STARTS = 64
"""Beginnings of prompts whose ids are remembered: the system message and tools that all rollouts share."""

_known: ContextVar[Mapping[str, list[int]] | None] = ContextVar("lightningrl_known", default=None)


class LongText(Exception):
    """A text to tokenize on a thread, with `Encoder.encode_long`."""

    def __init__(self, text: str) -> None:
        super().__init__(f"`{len(text)}` characters")
        self.text = text


class TooManyTokens(Exception):
    """A text has far more tokens than fit."""


@contextmanager
def beforehand(known: Mapping[str, list[int]]) -> Iterator[None]:
    """In this context, long texts are not tokenized but looked up in `known`. One that is missing raises `LongText`."""
    token = _known.set(known)
    try:
        yield
    finally:
        _known.reset(token)


class Encoder:
    """Encodes with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._short_start = lru_cache(STARTS)(lambda text: tuple(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        if len(text) <= LONG:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        known = _known.get()
        if known is None:
            return self.encode_long(text)
        if text not in known:
            raise LongText(text)
        return known[text]

    def encode_start(self, text: str) -> list[int]:
        """As `encode`, for the beginning of a prompt. Its ids are remembered, unless it is long."""
        return [*self._short_start(text)] if len(text) <= LONG else self.encode(text)

    def encode_long(self, text: str, *, most: int | None = None) -> list[int]:
        """As `encode`, on any thread: others run meanwhile. Raises `TooManyTokens` as soon as there are certainly more
        than `most` tokens; None: no limit.
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
        """The batch methods release the GIL. The fast one skips offsets, which take more than half of the time."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
