"""What does the template write after an answer? The text from the end of that turn to where the model speaks again.

The suffix is cut out of a rendering that has a mark in place of the answer. So it does not matter how the template
writes answers into a history (trimmed, without reasoning).

    answer of c1, then `another one`    …<|im_start|>assistant\n MARK <|im_end|>\n<|im_start|>user\nanother one…
    suffix                                                            <|im_end|>\n<|im_start|>user\nanother one…

For most templates the suffix is the same whatever came before. This is tried out once for each shape of tail (the
messages after the answer). From then on only the tail is rendered, so the cost of a request does not grow with its
history.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol, TypeAlias

from lightningrl.chat import reasons
from lightningrl.chat.rendering import MARK, BadConversation
from lightningrl.messages import Message, ToolCall

Tools: TypeAlias = Sequence[Mapping[str, Any]]
Shape: TypeAlias = tuple[Any, ...]

LONGEST_TAIL = 16
"""Messages. Longer tails are rendered with their history."""
MOST_SHAPES = 512
"""Shapes of tails that are remembered. Real agents have a handful."""

USER = Message(role="user", content="x")
SYSTEM = Message(role="system", content="s")
REPLY = Message(role="assistant", content="y")
CALL = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="call_0123456789", name="look", arguments='{"at": 1}'),)
)
RESULT = Message(role="tool", content="z", tool_call_id="call_0123456789", name="look")


class Doubt(Exception):
    """The ids cannot be spliced. The reason is one of `reasons`."""


class Renderer(Protocol):
    """The part of `ChatTemplate` that suffixes need."""

    def text(self, messages: Sequence[Message], *, tools: Tools = (), open_turn: bool = True) -> str: ...

    def opened(self, messages: Sequence[Message], *, tools: Tools = (), begun: bool = False) -> str: ...

    def after(self, marked: str) -> tuple[str, str] | None: ...

    def encode(self, text: str) -> list[int]: ...

    def is_added(self, token_id: int) -> bool: ...


class _Needs(Enum):
    """What the suffix depends on besides the tail."""

    NOTHING = "nothing"
    TOOLS = "tools"
    HISTORY = "history"


class Suffixes:
    """The suffixes of one template, and what each shape of tail depends on."""

    def __init__(self, template: Renderer) -> None:
        self._template = template
        self._needs: dict[Shape, _Needs] = {}

    def after(
        self,
        answer: Message,
        tail: Sequence[Message],
        *,
        head: Sequence[Message],
        tools: Tools,
        begun: bool,
        rest: str = "",
    ) -> list[int]:
        """The ids from the end of the turn of `answer` on. `head` are the messages before it, `tail` those after it.

        `rest` is text of the answer that was not sampled: its ids come first. `begun` as in `ChatTemplate.opened`.
        Raises `Doubt` or `BadConversation`.
        """
        needs = self._needs_of(answer, tail, tools)
        found = None
        if needs is not _Needs.HISTORY:
            given = tools if needs is _Needs.TOOLS else ()
            found = self._cut([USER], _stand_in(answer, rest), tail, given, rest=rest)
        if found is None:
            found = self._in_full(head, answer, tail, tools, begun=begun, rest=rest)
        between, text = found
        ids = self._template.encode(text)
        if not ids or not self._template.is_added(ids[0]):
            raise Doubt(reasons.END_JOINED)
        return [*self._template.encode(between), *ids] if between else ids

    def _in_full(
        self, head: Sequence[Message], answer: Message, tail: Sequence[Message], tools: Tools, *, begun: bool, rest: str
    ) -> tuple[str, str]:
        """Render the whole conversation, and check that its rendering ends with the suffix."""
        whole = self._template.opened([*head, answer, *tail], tools=tools, begun=begun)
        marked = _stand_in(answer, rest)
        cut = self._template.after(self._template.opened([*head, marked, *tail], tools=tools, begun=begun))
        if cut is None:
            raise Doubt(reasons.NO_TURN_END)
        found = _behind(marked, cut, rest)
        if found is None:
            raise Doubt(reasons.TEXT_BEFORE_END)
        if not whole.endswith("".join(found)):
            raise Doubt(reasons.SUFFIX_DEPENDS)
        return found

    def _needs_of(self, answer: Message, tail: Sequence[Message], tools: Tools) -> _Needs:
        if len(tail) > LONGEST_TAIL or any(message.role == "assistant" for message in tail):
            return _Needs.HISTORY
        shape = _shape(answer, tail, tools)
        found = self._needs.get(shape)
        if found is None:
            found = self._tried(answer, tail, tools)
            if len(self._needs) < MOST_SHAPES:
                self._needs[shape] = found
        return found

    def _tried(self, answer: Message, tail: Sequence[Message], tools: Tools) -> _Needs:
        """Try out what the suffix depends on: render the tail after histories and answers of many kinds. Histories that
        the template refuses are left out.
        """
        echo = replace(tail[0], role="user", tool_call_id=None) if tail else USER
        histories = [
            [USER],
            [SYSTEM, USER],
            [USER, REPLY, echo],
            [SYSTEM, echo, REPLY, USER, REPLY, USER],
            [USER, CALL, RESULT],
            [SYSTEM, USER, CALL, RESULT, REPLY, USER, replace(REPLY, reasoning="r"), echo],
        ]
        marked = _stand_in(answer)
        longer = replace(answer, content=f"{answer.content} y {MARK}", reasoning=answer.reasoning or "r")
        texts: list[set[tuple[str, str] | None]] = []
        for given in ((), tools) if tools else ((),):
            accepted = [history for history in histories if self._accepts(history, given)]
            found = {self._cut(history, marked, tail, given) for history in accepted}
            texts.append(found | {self._cut(history, longer, tail, given) for history in accepted[:1]})
        if any(len(found) != 1 or None in found for found in texts):
            return _Needs.HISTORY
        return _Needs.NOTHING if texts[0] == texts[-1] else _Needs.TOOLS

    def _accepts(self, history: Sequence[Message], tools: Tools) -> bool:
        try:
            self._template.text([*history, REPLY], tools=tools)
        except BadConversation:
            return False
        return True

    def _cut(
        self, history: Sequence[Message], marked: Message, tail: Sequence[Message], tools: Tools, *, rest: str = ""
    ) -> tuple[str, str] | None:
        """Cut the suffix out of a short history, a marked answer and the tail. None: it needs the whole history."""
        try:
            cut = self._template.after(self._template.text([*history, marked, *tail], tools=tools))
        except BadConversation:
            return None
        return None if cut is None else _behind(marked, cut, rest)


def _behind(marked: Message, cut: tuple[str, str], rest: str) -> tuple[str, str] | None:
    """What `Renderer.after` has cut: `rest` as the template writes it, and the text from the end of the turn on. None
    if the template writes other text in place of `rest`.
    """
    between, text = cut
    if marked.tool_calls:
        return "", text
    if between.rstrip() != rest.rstrip():
        return None
    return between if rest else "", text


def _stand_in(answer: Message, rest: str = "") -> Message:
    """An answer of marks and `rest`. It keeps the tool calls of `answer`, since templates match results to them."""
    if not answer.tool_calls:
        return Message(role="assistant", content=MARK + rest)
    *others, last = answer.tool_calls
    marked = replace(last, arguments=f'{{"{MARK}": "{MARK}"}}')
    return Message(role="assistant", content=MARK, tool_calls=(*others, marked))


def _shape(answer: Message, tail: Sequence[Message], tools: Tools) -> Shape:
    """All that a template may tell apart in a tail, besides its texts."""
    called = {call.id for call in answer.tool_calls}
    kinds = [
        (message.role, message.name is None, message.tool_call_id is None, message.tool_call_id in called)
        for message in tail
    ]
    return (min(len(called), 2), bool(answer.content), bool(tools), *kinds)
