"""Which earlier call does this request continue? One tree per attempt keeps history token-exact.

messages → the longest served call whose conversation they repeat → its exact ids + newly rendered suffix → `Prompt`.
What came back from the agent is compared with what *we* answered (reply ids, tool-call ids, content, arguments by
meaning), never tokenised
again: sampled tokens are seldom the ones a tokenizer would choose for their text. When in any doubt, everything is
rendered afresh, and why is kept. docs/token-exact.md has the whole table of decisions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from lightningrl.chat import reasons
from lightningrl.chat.matching import (
    Step,
    gist,
    gists,
    is_result,
    is_subsequence,
    repeats,
    results,
    same_thoughts,
    step,
    tools_key,
)
from lightningrl.chat.raw import RawHistory
from lightningrl.chat.served import Node, Served
from lightningrl.chat.suffix import Doubt
from lightningrl.chat.template import ChatTemplate, may_be_begun
from lightningrl.messages import Message
from lightningrl.prefix import common_prefix
from lightningrl.types import Ints

Tools: TypeAlias = Sequence[Mapping[str, Any]]
PromptCapture: TypeAlias = Literal["rendered", "bridged", "partly", "forked"]
"""As `types.Capture`, for what a prompt can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where among the conversations of an attempt an answer belongs."""

    root: Node
    node: Node
    """The conversation it is given in."""
    begun: tuple[Node, Message] | None
    """Set if the answer goes on with a message that the client has begun: the conversation before that message, and the
    message.
    """
    within: bool | None
    """As `Prompt.reasoning`."""
    base: Served | None
    """The call whose ids the prompt begins with; None: not known."""
    shared: int | None
    """How many; None: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is to read, and how it came about.

    A second turn, where c1 read `[1 2 3]` and sampled `[7 8 9]` (9 ends the turn):

        ids [1 2 3 7 8 9 | 4 5]   capture `bridged`   parent_call_id `c1`   shared 6
    """

    ids: Ints
    """[P]"""
    capture: PromptCapture
    reason: str | None
    """Why it is forked, or bridged only partly; one of `reasons`, None otherwise."""
    parent_call_id: str | None
    """The call it continues (bridged, partly) or departs from (forked)."""
    shared: int
    """Leading ids that the parent has read or said; 0 without a parent."""
    reasoning: bool | None
    """Does it end within a thought? None: as the template's prompts do. `AnswerStream` wants to know."""
    key: Place | None
    """`ConversationTree.add` wants it back; None for raw prompts, which have no messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """What was found on the way through a request's messages."""

    place: Place
    found: Served | None
    """The last of our answers in them."""
    at: int
    """Its index; -1: there is none."""
    rest: str
    """Text that the client has put behind it, in the same turn."""
    rewritten: tuple[Served, str] | None
    """An answer of ours that another message of the assistant has replaced since, and the reason to give."""


class ConversationTree:
    """The conversations of one attempt."""

    def __init__(self, template: ChatTemplate, *, history: Literal["exact", "template"] = "exact") -> None:
        """`exact`: what was sampled stays in the prompt. `template`: prompts are what the template makes of the
        messages, as in deployment.
        """
        self._template = template
        self._history = history
        self._raw = RawHistory(template)
        self._roots: dict[bytes, Node] = {}
        self._by_tool_call: dict[str, Served] = {}
        self._by_content: dict[str, Served] = {}
        self._stopped: list[Served] = []
        """Answers that a stop string has ended."""

    def prompt(self, messages: Sequence[Message], *, tools: Tools = ()) -> Prompt:
        """The ids to read for these messages. Raises `BadConversation` if the template refuses them."""
        walk = self._walk(messages, tools)
        parent, reason = self._departs_from(messages, walk)
        if walk.found is None:
            return self._rendered(messages, tools, place=walk.place, parent=parent, reason=reason)
        if self._history == "template":
            return self._as_deployed(messages, tools, place=walk.place, parent=walk.found, reason=reason)
        try:
            suffix = self._suffix(walk.found, walk, messages, tools)
        except Doubt as doubt:
            return self._rendered(messages, tools, place=walk.place, parent=walk.found, reason=str(doubt))
        before = walk.found.ids()
        ids = np.concatenate((before, np.array(suffix, np.int32)))
        return _prompt(ids, _bridged(reason), reason, place=walk.place, parent=walk.found, shared=len(before))

    def key(self, messages: Sequence[Message], *, tools: Tools = ()) -> Place:
        """The name of a conversation, for a call that was prompted by an earlier process."""
        walk = self._walk(messages, tools)
        return replace(walk.place, base=walk.found, shared=None)

    def add(self, call_id: str, *, key: Place | None, prompt_ids: Ints, completion_ids: Ints, answer: Message) -> None:
        """Remember what was answered in the conversation `key`. Only calls that were answered in full belong here."""
        assert key is not None, "answers to raw prompts are added with `add_raw`"
        base, shared = key.base, key.shared
        if base is None and key.node.answers:  # another answer to the same prompt
            base, shared = key.node.answers[0][1], None
        if shared is None:
            shared = 0 if base is None else common_prefix(prompt_ids, base.ids())
        asked, whole = (key.node, answer) if key.begun is None else (key.begun[0], _joined(key.begun[1], answer))
        begun = "" if key.begun is None else key.begun[1].content
        served = Served(
            call_id=call_id,
            root=key.root,
            asked=asked,
            after=Node(asked, gist(whole)),
            answer=whole,
            base=base,
            shared=shared,
            delta=np.concatenate((prompt_ids[shared:], completion_ids)),
            sampled=len(completion_ids),
            open_text=self._open_text(whole, completion_ids.tolist(), begun=begun),
        )
        asked.answers.append((whole, served))
        if key.begun is not None:  # a client may also send the two parts back as two messages
            key.node.answers.append((answer, served))
        self._by_tool_call.update((call.id, served) for call in answer.tool_calls)
        if whole.content.strip():
            self._by_content[whole.content.strip()] = served
        if served.open_text is not None and self._ended(served):
            self._stopped.append(served)

    def asked_for(self, tool_call_id: str) -> bool:
        """Whether an answer in here asks for this tool call."""
        return tool_call_id in self._by_tool_call

    def prompt_raw(self, prompt: str | tuple[int, ...]) -> Prompt:
        """The ids to read for a prompt that no template is applied to: those of an earlier one and its answer, if it
        begins with both.
        """
        found = self._raw.find(prompt)
        start = 0 if found is None or found.reason is not None else found.place
        rest = np.array(self._template.encode(prompt[start:]) if isinstance(prompt, str) else prompt[start:], np.int32)
        if found is None:
            return _raw_prompt(rest, "rendered")
        before, parent = self._raw.ids(found.raw), found.raw.call_id
        if found.reason is not None:
            return _raw_prompt(rest, "forked", reason=found.reason, parent=parent, shared=common_prefix(rest, before))
        return _raw_prompt(np.concatenate((before, rest)), "bridged", parent=parent, shared=len(before))

    def add_raw(self, call_id: str, *, prompt_ids: Ints, completion_ids: Ints) -> None:
        """Remember what was answered to a raw prompt."""
        self._raw.add(call_id, prompt_ids=prompt_ids, completion_ids=completion_ids)

    def _root(self, tools: Tools) -> Node:
        """The empty conversation: one for each set of tools, as far as the template shows tools at all."""
        if not tools or not self._template.traits.shows_tools:
            return self._roots.setdefault(b"", Node())
        sent = msgspec.json.encode(tools)
        found = self._roots.get(sent)
        if found is None:
            found = self._roots[sent] = self._roots.setdefault(tools_key(tools), Node())
        return found

    def _walk(self, messages: Sequence[Message], tools: Tools) -> _Walk:
        """Follow the messages through what has been said, as far as it goes, and open what is new."""
        root = node = self._root(tools)
        found, at, rest, rewritten = None, -1, "", None
        run: list[Step] = []
        closed = messages[:-1] if self._begins_an_answer(messages) else messages
        for place, message in enumerate(closed):
            if is_result(message):
                run.append(step(message))
                continue
            if run:
                node = node.to(results(run))
                run = []
            if message.role == "assistant" and node.answers:
                if same := self._match(node, message):
                    found, at, rest, rewritten, node = same, place, "", None, same.after
                    continue
                if longer := self._continued(node, message):
                    found, at, rest, rewritten = longer[0], place, longer[1], None
                else:
                    rewritten = _replaced(node, message)
            node = node.to(step(message))
        if run:
            node = node.to(results(run))
        place = Place(root=root, node=node, begun=None, within=None, base=None, shared=0)
        walk = _Walk(place=place, found=found, at=at, rest=rest, rewritten=rewritten)
        return walk if closed is messages else self._begun(walk, messages[-1], at=len(closed))

    def _begins_an_answer(self, messages: Sequence[Message]) -> bool:
        """Is the model to go on with the last message? Not with what it has said to the end, wherever in this attempt
        that was.
        """
        if not may_be_begun(messages):
            return False
        known = self._by_content.get(messages[-1].content.strip())
        return known is None or not self._ended(known)

    def _begun(self, walk: _Walk, last: Message, *, at: int) -> _Walk:
        """The last message is the assistant's: an answer of ours that has ended, one that is to go on, or the client's
        beginning of one.
        """
        node = walk.place.node
        same = self._match(node, last)
        if same is not None:
            walk = replace(walk, found=same, at=at, rest="", rewritten=None)
            if self._ended(same):
                return replace(walk, place=replace(walk.place, node=same.after))
            within = bool(same.answer.reasoning) and not same.answer.content
            return replace(walk, place=replace(walk.place, node=same.after, begun=(node, last), within=within))
        place = replace(walk.place, node=node.to(step(last)), begun=(node, last), within=self._thinks(last.content))
        if longer := self._continued(node, last):
            return replace(walk, place=place, found=longer[0], at=at, rest=longer[1], rewritten=None)
        return replace(walk, place=place, rewritten=_replaced(node, last) or walk.rewritten)

    def _thinks(self, begun: str) -> bool:
        """Does the beginning of an answer end within a thought?"""
        tags = self._template.traits.think
        return tags is not None and begun.rfind(tags[0]) > begun.rfind(tags[1])

    def _match(self, node: Node, message: Message) -> Served | None:
        """The answer that `message` repeats. Of several that read alike: the one the client names, or else the one with
        the smallest ids, so that it is always the same one.
        """
        if len(node.answers) == 1 and repeats(message, node.answers[0][0]):
            return node.answers[0][1]
        same = [served for said, served in node.answers if repeats(message, said)]
        if not same and not message.tool_calls:  # a client may know no fields for thoughts and tool calls
            same = [served for _, served in node.answers if self._raw_text(served) == message.content.strip()]
        return min(same, key=_preference(message), default=None)

    def _continued(self, node: Node, message: Message) -> tuple[Served, str] | None:
        """The longest answer with which `message` provably begins although its turn had not ended, and the text that
        the client has put behind it.
        """
        whole = [
            served for said, served in node.answers if said is served.answer
        ]  # no parts of answers that a client has begun
        found = [(served, rest) for served in whole if (rest := self._behind(served, message)) is not None]
        prefer = _preference(message)
        return min(found, key=lambda pair: (len(pair[1]), *prefer(pair[0])), default=None)

    def _behind(self, served: Served, message: Message) -> str | None:
        """The text of `message` behind all that was sampled, a stop string included; None: it does not begin with that."""
        said = message.content.lstrip()
        if (
            served.open_text is None
            or message.tool_calls
            or not said.startswith(served.open_text)
            or not same_thoughts(message, served.answer)
        ):
            return None
        return said[len(served.open_text) :]

    def _raw_text(self, served: Served) -> str | None:
        """All the text of an answer, thoughts and tool calls spelled out; None if it has neither."""
        if not served.answer.reasoning and not served.answer.tool_calls:
            return None
        return self._template.decode(served.completion().tolist()).strip()

    def _open_text(self, answer: Message, sampled: list[int], *, begun: str) -> str | None:
        """`Served.open_text` of an answer, of which the client had `begun` the text."""
        if (
            answer.tool_calls
            or not answer.content.strip()
            or (sampled and sampled[-1] in self._template.stop_token_ids)
        ):
            return None
        text = begun + self._template.decode(sampled)
        tags = self._template.traits.think
        parts = [] if answer.reasoning else [text]
        if tags is not None:  # behind the thoughts, which may be empty
            parts.append(text.partition(tags[1])[2])
        said = (part.lstrip() for part in parts)
        return next((part for part in said if part.startswith(answer.content.lstrip())), None)

    def _ended(self, served: Served) -> bool:
        """Has the turn ended, with its token or with a stop string? (Otherwise the answer was cut off.)"""
        if served.last() in self._template.stop_token_ids:
            return True
        return served.open_text is not None and served.open_text.strip() != served.answer.content.strip()

    def _ours(self, message: Message) -> Served | None:
        """The answer that `message` seems to be, wherever in this attempt it was given: told by a tool call's id, or by
        the text.
        """
        known = next(
            (self._by_tool_call[call.id] for call in message.tool_calls if call.id in self._by_tool_call), None
        )
        known = known or self._by_content.get(message.content.strip())
        return known or next(
            (served for served in reversed(self._stopped) if self._behind(served, message) is not None), None
        )

    def _departs_from(self, messages: Sequence[Message], walk: _Walk) -> tuple[Served | None, str | None]:
        """The last of our answers that stands in the messages after those that are spliced, and why it is not spliced:
        how the conversation that it was given in differs.
        """
        for place in range(len(messages) - 1, walk.at, -1):
            message = messages[place]
            if message.role != "assistant":
                continue
            served = self._ours(message)
            if served is None:
                continue
            if not repeats(message, served.answer) and self._behind(served, message) is None:
                return served, reasons.ANSWER_REWRITTEN
            if served.root is not walk.place.root:
                return served, reasons.TOOLS_CHANGED
            return served, _difference(served.asked.path(), gists(messages[:place]))
        return walk.rewritten or (None, None)

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, *, place: Place, parent: Served | None, reason: str | None
    ) -> Prompt:
        ids = np.array(self._template.render(messages, tools=tools, begun=place.begun is not None), np.int32)
        if parent is None:
            return _prompt(ids, "rendered", None, place=place, parent=None, shared=0)
        return _prompt(ids, "forked", reason, place=place, parent=parent, shared=common_prefix(ids, parent.ids()))

    def _as_deployed(
        self, messages: Sequence[Message], tools: Tools, *, place: Place, parent: Served, reason: str | None
    ) -> Prompt:
        ids, before = (
            np.array(self._template.render(messages, tools=tools, begun=place.begun is not None), np.int32),
            parent.ids(),
        )
        shared = common_prefix(ids, before)
        if shared == len(before):
            return _prompt(ids, _bridged(reason), reason, place=place, parent=parent, shared=shared)
        return _prompt(ids, "forked", reasons.TEMPLATE_POLICY, place=place, parent=parent, shared=shared)

    def _suffix(self, served: Served, walk: _Walk, messages: Sequence[Message], tools: Tools) -> list[int]:
        """What is to be read after the answer. A missing end of turn is part of it: never trained."""
        begun = walk.place.begun is not None
        if begun and walk.at == len(messages) - 1:  # the model goes on in that turn
            return self._template.encode(walk.rest)
        head, tail = messages[: walk.at], messages[walk.at + 1 :]
        answer = replace(served.answer, content=messages[walk.at].content) if walk.rest else served.answer
        suffix = self._template.suffixes.after(answer, tail, head=head, tools=tools, begun=begun, rest=walk.rest)
        last = served.last()
        if last == suffix[0] and not walk.rest:
            return suffix[1:]
        if last in self._template.stop_token_ids:
            raise Doubt(reasons.FOREIGN_END)
        return suffix


def _bridged(reason: str | None) -> PromptCapture:
    return "bridged" if reason is None else "partly"


def _replaced(node: Node, message: Message) -> tuple[Served, str] | None:
    """The answer that `message` stands in place of, and the reason to give."""
    if not node.answers:
        return None
    said = message.content.strip()
    extended = [
        served
        for ours, served in node.answers
        if not ours.tool_calls and (text := ours.content.strip()) and said.startswith(text)
    ]
    return (extended[-1], reasons.ANSWER_EXTENDED) if extended else (node.answers[-1][1], reasons.ANSWER_REWRITTEN)


def _preference(message: Message) -> Callable[[Served], tuple[bool, bytes]]:
    """Of answers that read alike, the one that the client names comes first, then the one with the smallest ids, so
    that it is always the same.
    """
    return lambda served: (served.call_id != message.reply_id, served.completion().tobytes())


def _prompt(
    ids: Ints, capture: PromptCapture, reason: str | None, *, place: Place, parent: Served | None, shared: int
) -> Prompt:
    key = replace(place, base=parent, shared=shared)
    parent_id = None if parent is None else parent.call_id
    return Prompt(
        ids=ids,
        capture=capture,
        reason=reason,
        parent_call_id=parent_id,
        shared=shared,
        reasoning=place.within,
        key=key,
    )


def _raw_prompt(
    ids: Ints, capture: PromptCapture, *, reason: str | None = None, parent: str | None = None, shared: int = 0
) -> Prompt:
    return Prompt(
        ids=ids, capture=capture, reason=reason, parent_call_id=parent, shared=shared, reasoning=False, key=None
    )


def _joined(begun: Message, answer: Message) -> Message:
    return replace(answer, content=begun.content + answer.content)


def _difference(before: Sequence[Step], now: Sequence[Step]) -> str:
    """What has been done to a history."""
    if is_subsequence(now, before):
        return reasons.HISTORY_DROPPED
    return reasons.HISTORY_INSERTED if is_subsequence(before, now) else reasons.HISTORY_REWRITTEN
