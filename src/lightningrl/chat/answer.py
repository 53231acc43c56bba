"""What has the model said so far, and how much of it may be shown already? Sampled ids in, text and at the end an `Answer` out.

Held back until it is certain: half a character, what may be the beginning of a stop string, and (with tools) what may be a tool call.
Streamed or not, every answer goes through here, so both say the same.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightningrl.chat import tools
from lightningrl.chat.messages import Message, ToolCall
from lightningrl.chat.template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer."""

    message: Message
    rest: str
    """The part of the content that has not been shown yet."""


class AnswerStream:
    """One answer as it is being sampled. `seed` names its tool calls: the same answer always gets the same ids."""

    def __init__(self, template: ChatTemplate, *, stop: Sequence[str], parse_tools: bool, seed: bytes) -> None:
        self._detokenizer = template.detokenizer()
        self._stop = tuple(text for text in stop if text)
        self._parse_tools = parse_tools
        self._seed = seed
        self._text = ""
        self._shown = 0
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that may now be shown."""
        self._grow(self._detokenizer.feed(token_ids))
        end = max(self._shown, self._certain())
        shown, self._shown = self._text[self._shown : end], end
        return shown

    def finish(self) -> Answer:
        self._grow(self._detokenizer.flush())
        content, wishes = tools.parse(self._text) if self._parse_tools else (self._text, [])
        calls = tuple(ToolCall(id=self._id(place), name=name, arguments=text) for place, (name, text) in enumerate(wishes))
        return Answer(message=Message(role="assistant", content=content, tool_calls=calls), rest=content[self._shown :])

    def _grow(self, new: str) -> None:
        if self._stopped or not new:
            return
        before = len(self._text)
        self._text += new
        found = [place for stop in self._stop if (place := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self._stopped = True

    def _certain(self) -> int:
        """How much of the text no later token can take back."""
        end = len(self._text)
        if not self._stopped:
            end -= max((_overlap(self._text, stop) for stop in self._stop), default=0)
        if not self._parse_tools:
            return end
        start = self._text.find(tools.OPEN)
        end = min(end, start if start >= 0 else len(self._text) - _overlap(self._text, tools.OPEN))
        return len(self._text[:end].rstrip())  # white space before a tool call is not part of the content

    def _id(self, place: int) -> str:
        return f"call_{hashlib.blake2b(self._seed + place.to_bytes(4, 'little'), digest_size=12).hexdigest()}"


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins, short of all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
