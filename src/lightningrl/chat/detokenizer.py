"""Which text do these ids add? Ids in, text out, never half a character, however they arrive."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder makes of bytes that are not a character (yet)."""


class Detokenizer:
    """The pieces joined are `decode` of all ids.

    (Except for bytes that are no text, where tokenizers with byte fallback spell a whole run anew once it has turned
    out invalid.)
    """

    def __init__(self, decode: Callable[[list[int]], str], *, looks_back: bool = True) -> None:
        """`looks_back`: the text of a token depends on the one before it, as where the first space of a text is
        dropped.
        """
        self._decode = decode
        self._looks_back = looks_back
        self.ids: list[int] = []
        """All of them."""
        self._known = 0
        """Ids before this one are out; the window begins where the piece before them did, for decoders that look back.
        """
        self._start = 0
        self._out: int | None = 0
        """Characters of the window that are out; None: not counted yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
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
        """What is left at the end: characters that were never finished."""
        out = self._count()
        piece = self._decode(self.ids[self._start :])[out:]
        self._out = out + len(piece)
        return piece

    def _count(self) -> int:
        """Counted only when the window is used again: an answer in one piece never needs it."""
        if self._out is None:
            self._out = len(self._decode(self.ids[self._start : self._known]))
        return self._out
