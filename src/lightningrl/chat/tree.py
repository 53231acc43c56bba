r"""Which earlier call does this request continue? One tree per attempt keeps history token-exact.

A model samples ids, an agent sends text back, and one text has many spellings in ids. So history is never tokenised
again. Each request takes four steps:

1. Walk: find the longest served call whose conversation this request continues. The answers in the request are compared
   with the served answers by tool-call ids, text and arguments (`recognition`).
2. Splice: take the ids that this call read and sampled, exactly.
3. Render only the suffix: the template's text from the end of that answer on (`suffix`).
4. When in any doubt, render everything afresh (fork), and keep the reason (`departure`, `reasons`).

An example with ChatML and a small tokenizer (`_` is a space). The model spells its first answer letter by letter:

    call c1   messages   user: say a word
              prompt     <|im_start|> u s e r \n say _a _word <|im_end|> \n <|im_start|> a s s is t a n t \n
              capture    `rendered`, 21 ids
              sampled    b l u e <|im_end|>                         65 75 84 68 315

The agent sends the answer back as text, with a second question. The tokenizer itself would spell `blue` as 260 257:

    call c2   messages   user: say a word · assistant: blue · user: another one
              walk       the second message repeats the answer of c1
              splice     the 21 ids that c1 read, and its 5 sampled ids 65 75 84 68 315
              suffix     \n <|im_start|> u s e r \n a n othe r _one <|im_end|> \n <|im_start|> a s s is t a n t \n
              capture    `bridged`, parent c1, shared 26

Had the agent sent `assistant: red`, call c2 would be `forked` with parent c1, shared 21: rendered afresh, because "the
answer in the history is not the one that was given". docs/token-exact.md has the whole table of decisions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from lightningrl.chat import reasons
from lightningrl.chat.departure import departure, replaced
from lightningrl.chat.matching import gist, in_steps, step, tools_key
from lightningrl.chat.prompt import Place, Prompt, PromptCapture
from lightningrl.chat.raw import RawHistory
from lightningrl.chat.recognition import Answers
from lightningrl.chat.served import Node, Served
from lightningrl.chat.suffix import Doubt
from lightningrl.chat.template import ChatTemplate
from lightningrl.chat.walk import Match, Walk, begins_an_answer, prefilled
from lightningrl.messages import Message
from lightningrl.prefix import common_prefix
from lightningrl.types import Ints

Tools: TypeAlias = Sequence[Mapping[str, Any]]


class ConversationTree:
    """The conversations of one attempt."""

    def __init__(self, template: ChatTemplate, *, history: Literal["exact", "template"] = "exact") -> None:
        """`exact`: sampled ids stay in the prompt. `template`: the template renders every prompt, as in deployment."""
        self._template = template
        self._history = history
        self._roots: dict[bytes, Node] = {}
        self._answers = Answers(template)
        self._raw = RawHistory(template)

    def prompt(self, messages: Sequence[Message], *, tools: Tools = ()) -> Prompt:
        """The ids to read for these messages. Raises `BadConversation` if the template refuses them."""
        walk = self._walk(messages, tools)
        begun = walk.place.begun is not None
        start = 0 if walk.match is None else walk.match.index + 1
        departed = departure(messages, start=start, asked=walk.place.asked, answers=self._answers) or walk.replaced
        if walk.match is None:
            return _afresh(self._template.render(messages, tools=tools, begun=begun), walk, departed)
        parent, reason = walk.match.served, None if departed is None else departed[1]
        if self._history == "template":
            return _as_deployed(self._template.render(messages, tools=tools, begun=begun), walk, parent, reason)
        try:
            suffix = self._suffix(walk.match, messages, tools, begun=begun)
        except Doubt as doubt:
            ids = self._template.render(messages, tools=tools, begun=begun)
            return _afresh(ids, walk, (parent, str(doubt)))
        before = parent.ids()
        ids = np.concatenate((before, np.array(suffix, np.int32)))
        return _prompt(ids, walk, _bridged(reason), parent=parent, reason=reason, shared=len(before))

    def key(self, messages: Sequence[Message], *, tools: Tools = ()) -> Place:
        """Where the answer to these messages belongs, for a call whose prompt an earlier process made."""
        walk = self._walk(messages, tools)
        return walk.place if walk.match is None else replace(walk.place, base=walk.match.served)

    def add(self, call_id: str, *, key: Place | None, prompt_ids: Ints, completion_ids: Ints, answer: Message) -> None:
        """Remember the answer that was given at `key`. Add only calls that were answered in full."""
        assert key is not None, "answers to raw prompts are added with `add_raw`"
        base, shared = key.base, key.shared
        if base is None and key.node.answers:  # another answer to the same prompt
            base, shared = key.node.answers[0][1], None
        if shared is None:
            shared = 0 if base is None else common_prefix(prompt_ids, base.ids())
        begun = "" if key.begun is None else key.begun.content
        whole = answer if key.begun is None else replace(answer, content=begun + answer.content)
        served = Served(
            call_id=call_id,
            asked=key.asked,
            after=Node(key.asked, gist(whole)),
            answer=whole,
            base=base,
            shared=shared,
            delta=np.concatenate((prompt_ids[shared:], completion_ids)),
            sampled=len(completion_ids),
            open_text=self._answers.open_text(whole, completion_ids.tolist(), begun=begun),
        )
        key.asked.answers.append((whole, served))
        if key.begun is not None:  # a client may also send the two parts back as two messages
            key.node.answers.append((answer, served))
        self._answers.add(served)

    def asked_for(self, tool_call_id: str) -> bool:
        """Does an answer of this attempt contain this tool call?"""
        return tool_call_id in self._answers.by_tool_call

    def prompt_raw(self, prompt: str | tuple[int, ...]) -> Prompt:
        """The ids to read for a prompt that no template is applied to."""
        return self._raw.prompt(prompt)

    def add_raw(self, call_id: str, *, prompt_ids: Ints, completion_ids: Ints) -> None:
        """Remember the completion of a raw prompt."""
        self._raw.add(call_id, prompt_ids=prompt_ids, completion_ids=completion_ids)

    def _root(self, tools: Tools) -> Node:
        """The empty conversation. There is one for each set of tools, if the template shows tools at all."""
        if not tools or not self._template.traits.shows_tools:
            return self._roots.setdefault(b"", Node())
        sent = msgspec.json.encode(tools)
        found = self._roots.get(sent)
        if found is None:
            found = self._roots[sent] = self._roots.setdefault(tools_key(tools), Node())
        return found

    def _walk(self, messages: Sequence[Message], tools: Tools) -> Walk:
        """Follow the messages through the tree as far as they are known, and add nodes for those that are new."""
        node = self._root(tools)
        match: tuple[Served, int, str] | None = None
        instead: tuple[Served, str] | None = None
        begins = begins_an_answer(messages, self._answers)
        index = -1
        for group in in_steps(messages[:-1] if begins else messages):
            index += len(group)
            message = group[-1]
            if message.role == "assistant" and node.answers:
                if served := self._answers.repeated(node, message):
                    match, instead, node = (served, index, ""), None, served.after
                    continue
                if extended := self._answers.extended(node, message):
                    match, instead = (extended[0], index, extended[1]), None
                else:
                    instead = replaced(node, message)
            node = node.to(step(group))
        last = None if match is None else Match(served=match[0], index=match[1], behind=match[2])
        place = Place(asked=node, node=node, begun=None, base=None, shared=None)
        walk = Walk(place=place, match=last, replaced=instead)
        if not begins:
            return walk
        think = self._template.traits.think
        return prefilled(walk, messages[-1], index=index + 1, answers=self._answers, think=think)

    def _suffix(self, match: Match, messages: Sequence[Message], tools: Tools, *, begun: bool) -> list[int]:
        """The ids to read after the answer. If its end of turn was not sampled, it is among them and never trained."""
        if begun and match.index == len(messages) - 1:  # the model continues that turn
            return self._template.encode(match.behind)
        head, tail = messages[: match.index], messages[match.index + 1 :]
        answer = match.served.answer
        if match.behind:
            answer = replace(answer, content=messages[match.index].content)
        suffix = self._template.suffixes.after(answer, tail, head=head, tools=tools, begun=begun, rest=match.behind)
        last = match.served.last()
        if last == suffix[0] and not match.behind:
            return suffix[1:]
        if last in self._template.stop_token_ids:
            raise Doubt(reasons.FOREIGN_END)
        return suffix


def _afresh(rendered: list[int], walk: Walk, departed: tuple[Served, str] | None) -> Prompt:
    """What the template makes of all messages. `departed`: the call that is not continued, and why not."""
    ids = np.array(rendered, np.int32)
    if departed is None:
        return _prompt(ids, walk, "rendered", parent=None, reason=None, shared=0)
    parent, reason = departed
    return _prompt(ids, walk, "forked", parent=parent, reason=reason, shared=common_prefix(ids, parent.ids()))


def _as_deployed(rendered: list[int], walk: Walk, parent: Served, reason: str | None) -> Prompt:
    """What the template makes of all messages: `bridged` all the same if it begins with the parent's ids."""
    ids, before = np.array(rendered, np.int32), parent.ids()
    shared = common_prefix(ids, before)
    if shared == len(before):
        return _prompt(ids, walk, _bridged(reason), parent=parent, reason=reason, shared=shared)
    return _prompt(ids, walk, "forked", parent=parent, reason=reasons.TEMPLATE_POLICY, shared=shared)


def _bridged(reason: str | None) -> PromptCapture:
    return "bridged" if reason is None else "partly"


def _prompt(
    ids: Ints, walk: Walk, capture: PromptCapture, *, parent: Served | None, reason: str | None, shared: int
) -> Prompt:
    return Prompt(
        ids=ids,
        capture=capture,
        reason=reason,
        parent_call_id=None if parent is None else parent.call_id,
        shared=shared,
        reasoning=walk.reasoning,
        key=replace(walk.place, base=parent, shared=shared),
    )
