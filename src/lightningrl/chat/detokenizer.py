"""Which text do these ids add? Ids in, text out, never half a character, however the ids are split."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""The replacement character, which a decoder gives for bytes that are no character (yet)."""


class Detokenizer:
    """The joined pieces equal `decode` of all ids.

    The exception are invalid bytes: tokenizers with byte fallback change the text of a whole run of bytes once it turns
    out to be invalid.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, looks_back: bool = True) -> None:
        """`looks_back`: the text of a token depends on the token before it, e.g. if the first space is dropped."""
        self._decode = decode
        self._looks_back = looks_back
        self.ids: list[int] = []
        """All ids so far."""
        self._start = 0
        """Start of the ids that are decoded again. They include the piece before: some decoders look back."""
        self._known = 0
        """All text of the ids before this one has been returned."""
        self._out: int | None = 0
        """Characters of the window that have been returned; None: not counted yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these ids add, up to the last whole character."""
        self.ids.extend(token_ids)
        out = self._count()
        text = self._decode(self.ids[self._start :])
        whole = text.rstrip(UNFINISHED)
        piece = whole[out:]
        self._out = out + len(piece)
        if len(whole) == len(text) and piece:
            known = len(self.ids)
            self._start, self._known, self._out = (self._known, known, None) if self._looks_back else (known, known, 0)
        return piece

    def flush(self) -> str:
        """The rest at the end: characters that were never finished."""
        out = self._count()
        piece = self._decode(self.ids[self._start :])[out:]
        self._out = out + len(piece)
        return piece

    def _count(self) -> int:
        """Counted when the window is decoded again; an answer that arrives at once never needs it."""
        if self._out is None:
            self._out = len(self._decode(self.ids[self._start : self._known]))
        return self._out
