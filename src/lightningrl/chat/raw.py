"""Which earlier raw prompt does this one go on with? Completions have no messages: their history is text, or ids, that
begins alike.
"""

from dataclasses import dataclass, field

import numpy as np

from lightningrl.chat import reasons
from lightningrl.chat.template import ChatTemplate
from lightningrl.types import Ints


@dataclass(slots=True, kw_only=True)
class Raw:
    """A prompt and its answer."""

    call_id: str
    before: "Raw | None"
    """What it goes on with; None: nothing."""
    delta: Ints
    """The ids that come after those of `before`."""
    text: str
    """Of `delta`, control tokens included."""
    end: str
    """Text of the token that ended the answer, the end of `text`; "" if none did."""
    after: "list[Raw]" = field(default_factory=list["Raw"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A prompt that goes on with `raw`, or departs from it."""

    raw: Raw
    place: int
    """Characters (or ids) of the prompt that `raw` covers."""
    reason: str | None
    """Why its ids cannot be used; None: they can."""


class RawHistory:
    """The raw prompts of one attempt. A tree, each node holding only what it adds."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roots: list[Raw] = []

    def find(self, prompt: str | tuple[int, ...]) -> Continued | None:
        """The longest earlier prompt that, with its answer, `prompt` begins with."""
        given = prompt if isinstance(prompt, str) else np.array(prompt, np.int32)
        whole: list[Continued] = []
        ended: list[Continued] = []
        left = [(raw, 0) for raw in self._roots]
        while left:
            raw, start = left.pop()
            size = _begins(given, start, raw)
            if size is not None:
                whole.append(Continued(raw=raw, place=start + size, reason=None))
                left += [(child, start + size) for child in raw.after]
            elif isinstance(given, str) and raw.end and given.startswith(raw.text.removesuffix(raw.end), start):
                ended.append(
                    Continued(raw=raw, place=start + len(raw.text) - len(raw.end), reason=reasons.RAW_END_LEFT_OUT)
                )
        return max(whole or ended, key=lambda found: found.place, default=None)

    def add(self, call_id: str, *, prompt_ids: Ints, completion_ids: Ints) -> None:
        ids = np.concatenate((prompt_ids, completion_ids))
        found = self.find(tuple(prompt_ids.tolist()))
        before = None if found is None else found.raw
        start = 0 if found is None else found.place
        ended = len(completion_ids) > 0 and int(completion_ids[-1]) in self._template.stop_token_ids
        cut = len(prompt_ids) - start
        delta = ids[start:].copy()
        text = self._template.decode(delta[:cut].tolist(), control=True) + self._template.decode(
            completion_ids.tolist(), control=True
        )
        end = self._template.token_text(int(completion_ids[-1])) if ended else ""
        raw = Raw(call_id=call_id, before=before, delta=delta, text=text, end=end)
        (self._roots if before is None else before.after).append(raw)

    def ids(self, raw: Raw) -> Ints:
        """[P + C] all that was read and sampled."""
        parts: list[Ints] = []
        node: Raw | None = raw
        while node is not None:
            parts.append(node.delta)
            node = node.before
        return np.concatenate(parts[::-1])


def _begins(given: "str | Ints", start: int, raw: Raw) -> int | None:
    """How many characters (or ids) of `given`, from `start` on, are those of `raw`; None: they are not."""
    if isinstance(given, str):
        return len(raw.text) if given.startswith(raw.text, start) else None
    size = len(raw.delta)
    return size if np.array_equal(given[start : start + size], raw.delta) else None
