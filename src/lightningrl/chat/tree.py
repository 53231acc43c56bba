"""Which earlier call does this request continue? One tree per attempt keeps history token-exact.

messages → the longest served call whose conversation they repeat → its exact ids + newly rendered suffix → `Prompt`.
What came back from the agent is compared with what *we* answered (tool-call ids, content, arguments by meaning), never tokenised again:
sampled tokens are seldom the ones a tokenizer would choose for their text. When in any doubt, everything is rendered afresh, and why is kept.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightningrl.chat.messages import Message, canonical, canonical_tools, repeats
from lightningrl.chat.template import ChatTemplate
from lightningrl.types import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is to read, and how it came about.

    A second turn, where c1 read `[1 2 3]` and sampled `[7 8 9]` (9 ends the turn):

        ids [1 2 3 7 8 9 | 4 5]   capture `bridged`   parent_call_id `c1`
    """

    ids: Ints
    """[P]"""
    capture: Literal["rendered", "bridged", "forked"]
    reason: str | None
    """Why it was forked; None otherwise."""
    parent_call_id: str | None
    """The call it continues (bridged) or departs from (forked)."""
    key: bytes
    """The name of the conversation; `ConversationTree.add` wants it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """A call whose answer the agent has."""

    call_id: str
    tools: bytes
    ids: Ints
    """[P + C] what the engine read and sampled."""
    prompt_length: int
    answer: Message


class _Doubt(Exception):
    """The ids cannot be spliced."""


class ConversationTree:
    """The conversations of one attempt."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._by_conversation: dict[bytes, list[_Served]] = {}
        self._by_tool_call: dict[str, _Served] = {}
        self._by_content: dict[str, _Served] = {}

    def prompt(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """The ids to read for these messages. Raises `BadConversation` if the template refuses them."""
        key, found, rewritten = self._walk(messages, tools)
        if found is None:
            parent, reason = rewritten or self._departs_from(messages, tools)
            return self._rendered(messages, tools, key=key, parent=parent, reason=reason)
        served, place = found
        try:
            ids = self._spliced(served, messages, place, tools)
        except _Doubt as doubt:
            return self._rendered(messages, tools, key=key, parent=served, reason=str(doubt))
        return Prompt(ids=ids, capture="bridged", reason=None, parent_call_id=served.call_id, key=key)

    def key(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> bytes:
        """The name of a conversation, for a call that was prompted by an earlier process."""
        return self._walk(messages, tools)[0]

    def add(self, call_id: str, *, key: bytes, tools: Sequence[Mapping[str, Any]], prompt_ids: Ints, completion_ids: Ints, answer: Message) -> None:
        """Remember what was answered in the conversation `key`. Only calls that were answered in full belong here."""
        ids = np.concatenate((prompt_ids, completion_ids))
        served = _Served(call_id=call_id, tools=canonical_tools(tuple(tools)), ids=ids, prompt_length=len(prompt_ids), answer=answer)
        self._by_conversation.setdefault(key, []).append(served)
        self._by_tool_call.update((call.id, served) for call in answer.tool_calls)
        if answer.content.strip():
            self._by_content[answer.content.strip()] = served

    def _walk(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[bytes, tuple[_Served, int] | None, tuple[_Served, str] | None]:
        """Name the conversation, message by message, and find the last of our answers in it (with its place); or the first one rewritten."""
        key = _extend(b"", canonical_tools(tuple(tools)))
        found: tuple[_Served, int] | None = None
        rewritten: tuple[_Served, str] | None = None
        for place, message in enumerate(messages):
            step = message
            siblings = self._by_conversation.get(key, []) if message.role == "assistant" else []
            if same := [served for served in siblings if repeats(message, served.answer)]:
                best = min(same, key=lambda served: served.ids[served.prompt_length :].tobytes())  # equal texts: any would do, but always the same
                found, step = (best, place), best.answer
            elif siblings and rewritten is None:
                rewritten = (siblings[-1], "the answer in the history is not the one that was given")
            key = _extend(key, canonical(step))
        return key, found, rewritten

    def _departs_from(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[_Served | None, str | None]:
        """The last of our answers that appears in a conversation which is not the one it was given in."""
        for message in reversed(messages):
            if message.role != "assistant":
                continue
            known = [self._by_tool_call[call.id] for call in message.tool_calls if call.id in self._by_tool_call]
            served = known[0] if known else self._by_content.get(message.content.strip())
            if served is not None:
                changed = served.tools != canonical_tools(tuple(tools))
                return served, "the tools have changed" if changed else "the history before the answer has changed"
        return None, None

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, key: bytes, parent: _Served | None, reason: str | None
    ) -> Prompt:
        ids = np.array(self._template.render(messages, tools=tools), np.int32)
        if parent is None:
            return Prompt(ids=ids, capture="rendered", reason=None, parent_call_id=None, key=key)
        return Prompt(ids=ids, capture="forked", reason=reason, parent_call_id=parent.call_id, key=key)

    def _spliced(self, served: _Served, messages: Sequence[Message], place: int, tools: Sequence[Mapping[str, Any]]) -> Ints:
        """Exact ids of `served`, then what the template says after its answer. The seam is the token that ends the turn."""
        end, end_id = self._template.turn_end, self._template.turn_end_id
        if end_id is None:
            raise _Doubt("the template has no token that ends a turn")
        head = [*messages[:place], served.answer]
        base = self._template.text(head, tools=tools, open_turn=False)
        whole = self._template.text([*head, *messages[place + 1 :]], tools=tools)
        if not whole.startswith(base):
            raise _Doubt("the template renders the history differently once it goes on")
        _, seam, filler = base.rpartition(end)
        if not seam or filler.strip():
            raise _Doubt("the template does not end the turn right after the answer")
        suffix = self._template.encode(end + filler + whole[len(base) :])
        if suffix[0] != end_id:
            raise _Doubt("the tokenizer joins the end of the turn with what follows")
        last = int(served.ids[-1]) if len(served.ids) > served.prompt_length else None
        if last == end_id:
            suffix = suffix[1:]
        elif last in self._template.stop_token_ids:
            raise _Doubt("the answer ended with another token than the template's")
        return np.concatenate((served.ids, np.array(suffix, np.int32)))  # a missing end of turn is part of the prompt: never trained


def _extend(key: bytes, step: bytes) -> bytes:
    return hashlib.blake2b(key + step, digest_size=16).digest()
