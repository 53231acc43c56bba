"""Find stop strings in a completion. Its text is decoded only if the newest token may have completed a stop string."""

from collections.abc import Callable, Sequence


class StopFinder:
    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def found(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the text of `token_ids` contains one of `stops`. Call it after each token."""
        piece = self._piece(token_ids[-1])
        if not any(_may_complete(piece, stop) for stop in stops):
            return False
        text = self._decode(list(token_ids))
        return any(stop in text for stop in stops)

    def _piece(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._decode([token_id])
        return piece


def _may_complete(piece: str, stop: str) -> bool:
    """Whether a token with the text `piece` may end `stop`. Its text shows the last character of `stop`, unless that is
    part of a multi-byte character, or a space that some decoders strip at the start.
    """
    last = stop[-1]
    return last in piece or last == " " or not last.isascii()
