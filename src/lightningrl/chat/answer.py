"""What has the model said so far, and how much of it may be shown already? Sampled ids in, text and at the end an
`Answer` out.

    <think> thoughts </think> content, then perhaps tool calls

Held back until it is certain: half a character, what may be the beginning of a stop string or of a tag, white space at
the edges of a thought, and (with tools) what may be a tool call. Streamed or not, every answer goes through here, so
both say the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias

from lightningrl.chat.template import ChatTemplate
from lightningrl.chat.tools import OPEN, Spelling, may_be_bare, overlap, parse
from lightningrl.messages import Message, ToolCall

Part: TypeAlias = Literal["start", "thought", "gap", "content", "text", "calls"]
"""What comes next: perhaps a thought; the thought; what separates it; content, perhaps tool calls; surely text; surely
tool calls.
"""


class Piece(NamedTuple):
    """What may be shown now. (One is made for each token of a stream: a tuple costs half of what a frozen dataclass
    does.)
    """

    reasoning: str = ""
    content: str = ""


NOTHING = Piece()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer."""

    message: Message
    rest: Piece
    """What has not been shown yet."""
    stopped_by: str | None
    """The stop string that was found; None: there was none."""
    reasoning_tokens: int
    """How many of the tokens were thoughts, their tags included."""


class AnswerStream:
    """One answer as it is being sampled. `seed` names its tool calls: the same answer always gets the same ids.

    The work of a token does not grow with the answer: only text that is not certain yet is looked at again.
    """

    def __init__(
        self, template: ChatTemplate, *, stop: Sequence[str], tools: bool, reasoning: bool | None = None, seed: bytes
    ) -> None:
        """`reasoning`: whether thoughts are told apart from what is said. None: if the template knows tags for them;
        True: they are, and the prompt has begun one.
        """
        self._template = template
        self._detokenizer = template.detokenizer()
        self._stop = tuple(text for text in stop if text)
        self._spelling: Spelling | None = template.traits.tool_format.spelling if tools else None
        self._seed = seed
        begun = template.traits.opens_thought if reasoning is None else reasoning
        self._tags = (
            template.traits.think if reasoning is not False and (begun or template.thinking != "none") else None
        )
        self._begun = begun
        markers = [*self._stop, *([OPEN] if self._spelling else []), *(self._tags or ())]
        self._firsts = tuple({marker[0] for marker in markers})
        """Text without any of these characters can neither be a marker nor begin one."""
        self._speech: Part = "text" if self._spelling is None else "content"
        self._part: Part = "start" if self._tags is not None else self._speech
        self._held = ""
        """Text that is not certain yet."""
        self._thought: list[str] = []
        self._said: list[str] = []
        """What has been shown."""
        self._calls: list[str] = []
        """All from the first tool call on."""
        self._closed = False
        """A thought has ended."""
        self._stopped_by: str | None = None

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """What may now be shown."""
        new = self._detokenizer.feed(token_ids)
        if not new:
            return NOTHING
        if self._held or any(first in new for first in self._firsts) or (self._part != "text" and new[-1].isspace()):
            return self._take(new, final=False)
        if self._stopped_by is not None:
            return NOTHING
        if self._part == "text" or (
            self._part == "content" and self._spelling == "hermes"
        ):  # most tokens: nothing about them is uncertain
            self._said.append(new)
            return Piece("", new)
        if self._part == "thought" and self._thought:
            self._thought.append(new)
            return Piece(new, "")
        return self._take(new, final=False)

    def finish(self) -> Answer:
        rest = self._take(self._detokenizer.flush(), final=True)
        shown = "".join(self._said)
        said = shown if self._part in ("thought", "gap") else shown + "".join(self._calls) + self._held
        content, wishes = (said, []) if self._spelling is None else parse(said, self._spelling)
        calls = tuple(
            ToolCall(id=self._id(place), name=name, arguments=text) for place, (name, text) in enumerate(wishes)
        )
        message = Message(role="assistant", content=content, reasoning="".join(self._thought), tool_calls=calls)
        rest = Piece(reasoning=rest.reasoning, content=content[len(shown) - len(rest.content) :])
        return Answer(
            message=message, rest=rest, stopped_by=self._stopped_by, reasoning_tokens=self._reasoning_tokens()
        )

    def _take(self, new: str, *, final: bool) -> Piece:
        """Go on through the parts of the answer as far as they are certain."""
        if self._stopped_by is not None:
            new = ""
        self._held += new
        loose = 0 if self._stop_here() or final else max((overlap(self._held, stop) for stop in self._stop), default=0)
        if self._part == "start":
            self._start(loose, final=final)
        reasoning = self._think(loose, final=final) if self._part == "thought" else ""
        if self._part == "gap":
            self._skip(loose)
        content = self._say(loose, final=final) if self._part in ("content", "text") else ""
        if self._part == "calls":
            self._calls.append(self._pop(len(self._held) - loose))
        return Piece(reasoning=reasoning, content=content) if reasoning or content else NOTHING

    def _stop_here(self) -> bool:
        """Has a stop string appeared? The one that is complete first counts; the text ends before it."""
        if self._stopped_by is None:
            found = [(place + len(stop), place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
            if found:
                _, place, self._stopped_by = min(found)
                self._held = self._held[:place]
        return self._stopped_by is not None

    def _start(self, loose: int, *, final: bool) -> None:
        """Does the answer begin with a thought?"""
        assert self._tags is not None
        lead = self._held.lstrip()
        if lead.startswith(self._tags[0]):
            if len(lead) - loose >= len(self._tags[0]):
                self._pop(len(self._held) - len(lead) + len(self._tags[0]))
                self._part = "thought"
        elif final or not self._tags[0].startswith(lead):
            self._part = "thought" if self._begun else self._speech

    def _think(self, loose: int, *, final: bool) -> str:
        """The part of the thought that is certain, without the white space around it."""
        assert self._tags is not None
        certain = len(self._held) - loose
        if not self._thought:
            self._pop(_blank(self._held[:certain]))
            certain = len(self._held) - loose
        close = self._held.find(self._tags[1])
        end = (
            close if close >= 0 else len(self._held) if final else len(self._held) - overlap(self._held, self._tags[1])
        )
        piece = self._pop(len(self._held[: min(end, certain)].rstrip()))
        if piece:
            self._thought.append(piece)
        if 0 <= close <= certain - len(self._tags[1]):
            self._pop(close - len(piece) + len(self._tags[1]))
            self._part, self._closed = "gap", True
        return piece

    def _skip(self, loose: int) -> None:
        """Line breaks between a thought and the content belong to neither."""
        self._pop(_blank(self._held[: len(self._held) - loose], "\n"))
        if len(self._held) > loose:
            self._part = self._speech

    def _say(self, loose: int, *, final: bool) -> str:
        """The part of the content that no later token can take back."""
        certain = len(self._held) - loose
        if self._part == "text":
            end = certain
        elif self._spelling == "hermes":
            start = self._held.find(OPEN)
            end = min(certain, start if start >= 0 else len(self._held) - overlap(self._held, OPEN))
            if 0 <= start <= certain - len(OPEN):
                self._part = "calls"
            end = len(self._held[:end].rstrip())  # white space before a tool call is not part of the content
        else:  # a bare call is all that there is
            end, lead = 0, self._held[:certain].lstrip()
            if lead:
                self._part = "calls" if may_be_bare(lead) else "text"
                end = certain if self._part == "text" else 0
        if final:
            return ""  # what is left is looked at as a whole
        piece = self._pop(end)
        if piece:
            self._said.append(piece)
        return piece

    def _pop(self, length: int) -> str:
        popped, self._held = self._held[:length], self._held[length:]
        return popped

    def _reasoning_tokens(self) -> int:
        """Up to and with the closing tag."""
        ids = self._detokenizer.ids
        if self._tags is None or not self._closed:
            return len(ids) if self._part == "thought" else 0
        close = self._tags[1]
        return min(
            len(ids),
            1 + bisect_left(range(len(ids)), True, key=lambda last: close in self._template.decode(ids[: last + 1])),
        )

    def _id(self, place: int) -> str:
        return f"call_{blake2b(self._seed + place.to_bytes(4, 'little'), digest_size=12).hexdigest()}"


def _blank(text: str, what: str | None = None) -> int:
    """How many characters at the beginning are among `what` (None: white space)."""
    return len(text) - len(text.lstrip(what))
