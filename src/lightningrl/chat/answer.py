"""What text has the model sampled so far, and how much of it may be streamed? Ids → pieces of text → `Answer`.

    <think> reasoning </think> content, then perhaps tool calls

Text is held back while it is uncertain: half a character, a possible beginning of a stop string or of a tag, white
space at the edges of reasoning, and (with tools) a possible tool call. Streamed or not, every answer goes through here,
so both have the same text.
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
"""What comes next.

    start    reasoning or content, not known yet      content  text, and perhaps tool calls
    thought  reasoning                                text     text, and certainly no tool calls
    gap      white space behind the reasoning         calls    tool calls
"""


class Piece(NamedTuple):
    """Text that may be shown now. A tuple: there is one for each token, and a frozen dataclass costs twice as much."""

    reasoning: str = ""
    content: str = ""


NOTHING = Piece()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer."""

    message: Message
    rest: Piece
    """Text that has not been shown yet."""
    stopped_by: str | None
    """The stop string that ended it; None: no stop string."""
    reasoning_tokens: int
    """Number of reasoning tokens, their tags included."""


class AnswerStream:
    """One answer while it is sampled. The ids of its tool calls follow from `seed`.

    The cost of a token does not grow with the answer: only text that is uncertain is looked at again.
    """

    def __init__(
        self, template: ChatTemplate, *, stop: Sequence[str], tools: bool, reasoning: bool | None = None, seed: bytes
    ) -> None:
        """`reasoning`: as `Prompt.reasoning`. True: the prompt ends within reasoning. False: the answer has none. None:
        it may have some, if the template has tags for it.
        """
        self._template = template
        self._detokenizer = template.detokenizer()
        self._stop = tuple(text for text in stop if text)
        self._spelling: Spelling | None = template.traits.tool_format.spelling if tools else None
        self._seed = seed
        begun = template.traits.opens_thought if reasoning is None else reasoning
        thinks = reasoning is not False and (begun or template.thinking != "none")
        self._tags = template.traits.think if thinks else None
        self._begun = begun
        markers = [*self._stop, *([OPEN] if self._spelling else []), *(self._tags or ())]
        self._firsts = tuple({marker[0] for marker in markers})
        """Text without these characters cannot contain a marker, or the beginning of one."""
        self._speech: Part = "text" if self._spelling is None else "content"
        self._part: Part = "start" if self._tags is not None else self._speech
        self._held = ""
        """Text that is uncertain."""
        self._thought: list[str] = []
        """Reasoning that has been shown."""
        self._said: list[str] = []
        """Content that has been shown."""
        self._calls: list[str] = []
        """All text from the first tool call on."""
        self._closed = False
        """The reasoning has ended."""
        self._stopped_by: str | None = None

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """The text that may now be shown."""
        new = self._detokenizer.feed(token_ids)
        if not new:
            return NOTHING
        if self._held or any(first in new for first in self._firsts) or (self._part != "text" and new[-1].isspace()):
            return self._take(new, final=False)
        if self._stopped_by is not None:
            return NOTHING
        plain = self._part == "text" or (self._part == "content" and self._spelling == "hermes")
        if plain:  # most tokens
            self._said.append(new)
            return Piece("", new)
        if self._part == "thought" and self._thought:
            self._thought.append(new)
            return Piece(new, "")
        return self._take(new, final=False)

    def finish(self) -> Answer:
        """Call it once, after the last token."""
        rest = self._take(self._detokenizer.flush(), final=True)
        shown = "".join(self._said)
        said = shown if self._part in ("thought", "gap") else shown + "".join(self._calls) + self._held
        content, wishes = (said, []) if self._spelling is None else parse(said, self._spelling)
        calls = [ToolCall(id=self._id(place), name=name, arguments=text) for place, (name, text) in enumerate(wishes)]
        message = Message(role="assistant", content=content, reasoning="".join(self._thought), tool_calls=tuple(calls))
        rest = Piece(reasoning=rest.reasoning, content=content[len(shown) - len(rest.content) :])
        count = self._reasoning_tokens()
        return Answer(message=message, rest=rest, stopped_by=self._stopped_by, reasoning_tokens=count)

    def _take(self, new: str, *, final: bool) -> Piece:
        """Go through the parts of the answer as far as they are certain."""
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
        """Has a stop string appeared? The first one to be complete counts, and the text ends before it."""
        if self._stopped_by is None:
            found = [(place + len(stop), place, stop) for stop in self._stop if (place := self._held.find(stop)) >= 0]
            if found:
                _, place, self._stopped_by = min(found)
                self._held = self._held[:place]
        return self._stopped_by is not None

    def _start(self, loose: int, *, final: bool) -> None:
        """Does the answer begin with reasoning?"""
        assert self._tags is not None
        lead = self._held.lstrip()
        if lead.startswith(self._tags[0]):
            if len(lead) - loose >= len(self._tags[0]):
                self._pop(len(self._held) - len(lead) + len(self._tags[0]))
                self._part = "thought"
        elif final or not self._tags[0].startswith(lead):
            self._part = "thought" if self._begun else self._speech

    def _think(self, loose: int, *, final: bool) -> str:
        """The reasoning that is certain, without the white space around it."""
        assert self._tags is not None
        certain = len(self._held) - loose
        if not self._thought:
            self._pop(_blank(self._held[:certain]))
            certain = len(self._held) - loose
        close = end = self._held.find(self._tags[1])
        if close < 0:
            end = len(self._held) - (0 if final else overlap(self._held, self._tags[1]))
        piece = self._pop(len(self._held[: min(end, certain)].rstrip()))
        if piece:
            self._thought.append(piece)
        if 0 <= close <= certain - len(self._tags[1]):
            self._pop(close - len(piece) + len(self._tags[1]))
            self._part, self._closed = "gap", True
        return piece

    def _skip(self, loose: int) -> None:
        """Drop the line breaks between reasoning and content."""
        self._pop(_blank(self._held[: len(self._held) - loose], "\n"))
        if len(self._held) > loose:
            self._part = self._speech

    def _say(self, loose: int, *, final: bool) -> str:
        """The content that no later token can change."""
        certain = len(self._held) - loose
        if self._part == "text":
            end = certain
        elif self._spelling == "hermes":
            start = self._held.find(OPEN)
            end = min(certain, start if start >= 0 else len(self._held) - overlap(self._held, OPEN))
            if 0 <= start <= certain - len(OPEN):
                self._part = "calls"
            end = len(self._held[:end].rstrip())  # white space before a tool call is not part of the content
        else:  # calls without tags are the whole answer
            end, lead = 0, self._held[:certain].lstrip()
            if lead:
                self._part = "calls" if may_be_bare(lead) else "text"
                end = certain if self._part == "text" else 0
        if final:
            return ""  # `finish` parses the rest as a whole
        piece = self._pop(end)
        if piece:
            self._said.append(piece)
        return piece

    def _pop(self, length: int) -> str:
        popped, self._held = self._held[:length], self._held[length:]
        return popped

    def _reasoning_tokens(self) -> int:
        """The tokens up to the closing tag, and those of the tag."""
        ids = self._detokenizer.ids
        if self._tags is None or not self._closed:
            return len(ids) if self._part == "thought" else 0
        tag = self._tags[1]
        last = bisect_left(range(len(ids)), True, key=lambda place: tag in self._template.decode(ids[: place + 1]))
        return min(len(ids), last + 1)

    def _id(self, place: int) -> str:
        return f"call_{blake2b(self._seed + place.to_bytes(4, 'little'), digest_size=12).hexdigest()}"


def _blank(text: str, what: str | None = None) -> int:
    """Number of leading characters that are in `what`; None: white space."""
    return len(text) - len(text.lstrip(what))
