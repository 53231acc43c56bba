"""Which earlier call does a raw prompt continue? One whose text or ids the prompt begins with; it has no messages."""

from dataclasses import dataclass, field

import numpy as np

from lightningrl.chat import reasons
from lightningrl.chat.prompt import Prompt, PromptCapture
from lightningrl.chat.template import ChatTemplate
from lightningrl.prefix import common_prefix
from lightningrl.types import Ints


@dataclass(slots=True, kw_only=True)
class Raw:
    """A raw prompt and its completion."""

    call_id: str
    before: "Raw | None"
    """The one that it continues; None: it continues none."""
    delta: Ints
    """The ids that come after those of `before`."""
    text: str
    """The text of `delta`, control tokens included."""
    end: str
    """The text of the token that ended the completion, the end of `text`; "" if no token did."""
    after: "list[Raw]" = field(default_factory=list["Raw"])
    """Those that continue this one."""

    def ids(self) -> Ints:
        """[P + C] the ids that the engine read and sampled."""
        parts: list[Ints] = []
        raw: Raw | None = self
        while raw is not None:
            parts.append(raw.delta)
            raw = raw.before
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A prompt that continues `raw`, or departs from it."""

    raw: Raw
    length: int
    """Characters (or ids) of the prompt that `raw` covers."""
    reason: str | None
    """Why the ids of `raw` cannot be used; None: they can."""


class RawHistory:
    """The raw prompts of one attempt. A tree, each node holding only what it adds."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._roots: list[Raw] = []

    def prompt(self, prompt: str | tuple[int, ...]) -> Prompt:
        """The ids to read. If the prompt begins with an earlier one and its completion, these keep their exact ids."""
        found = self._find(prompt)
        start = 0 if found is None or found.reason is not None else found.length
        rest = np.array(self._template.encode(prompt[start:]) if isinstance(prompt, str) else prompt[start:], np.int32)
        if found is None:
            return _prompt(rest, "rendered", parent=None, shared=0)
        before = found.raw.ids()
        if found.reason is not None:
            return _prompt(rest, "forked", parent=found, shared=common_prefix(rest, before))
        return _prompt(np.concatenate((before, rest)), "bridged", parent=found, shared=len(before))

    def add(self, call_id: str, *, prompt_ids: Ints, completion_ids: Ints) -> None:
        """Remember the completion of a raw prompt."""
        found = self._find(tuple(prompt_ids.tolist()))
        before, start = (None, 0) if found is None else (found.raw, found.length)
        prompt_text = self._template.decode(prompt_ids[start:].tolist(), control=True)
        text = prompt_text + self._template.decode(completion_ids.tolist(), control=True)
        ended = len(completion_ids) > 0 and int(completion_ids[-1]) in self._template.stop_token_ids
        end = self._template.token_text(int(completion_ids[-1])) if ended else ""
        delta = np.concatenate((prompt_ids[start:], completion_ids))
        raw = Raw(call_id=call_id, before=before, delta=delta, text=text, end=end)
        (self._roots if before is None else before.after).append(raw)

    def _find(self, prompt: str | tuple[int, ...]) -> Continued | None:
        """The longest earlier prompt that, with its completion, `prompt` begins with."""
        given = prompt if isinstance(prompt, str) else np.array(prompt, np.int32)
        whole: list[Continued] = []
        ended: list[Continued] = []
        left = [(raw, 0) for raw in self._roots]
        while left:
            raw, start = left.pop()
            size = _begins(given, start, raw)
            if size is not None:
                whole.append(Continued(raw=raw, length=start + size, reason=None))
                left += [(child, start + size) for child in raw.after]
            elif isinstance(given, str) and raw.end and given.startswith(raw.text.removesuffix(raw.end), start):
                length = start + len(raw.text) - len(raw.end)
                ended.append(Continued(raw=raw, length=length, reason=reasons.RAW_END_LEFT_OUT))
        return max(whole or ended, key=lambda found: found.length, default=None)


def _begins(given: str | Ints, start: int, raw: Raw) -> int | None:
    """How many characters (or ids) of `given`, from `start` on, are those of `raw`; None: they are not."""
    if isinstance(given, str):
        return len(raw.text) if given.startswith(raw.text, start) else None
    size = len(raw.delta)
    return size if np.array_equal(given[start : start + size], raw.delta) else None


def _prompt(ids: Ints, capture: PromptCapture, *, parent: Continued | None, shared: int) -> Prompt:
    reason, call_id = (None, None) if parent is None else (parent.reason, parent.raw.call_id)
    return Prompt(
        ids=ids, capture=capture, reason=reason, parent_call_id=call_id, shared=shared, reasoning=False, key=None
    )
