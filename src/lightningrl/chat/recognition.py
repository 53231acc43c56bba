"""Is this message an answer of ours? Clients change answers on the way back: what still proves that they are ours?"""

from collections.abc import Callable

from lightningrl.chat.matching import repeats, same_thoughts
from lightningrl.chat.served import Node, Served
from lightningrl.chat.template import ChatTemplate
from lightningrl.messages import Message


class Answers:
    """All answers of one attempt, and the tests that a message must pass to count as one of them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.by_tool_call: dict[str, Served] = {}
        """The answers by the ids of their tool calls."""
        self._by_content: dict[str, Served] = {}
        self._stopped: list[Served] = []
        """Answers that a stop string has ended."""

    def add(self, served: Served) -> None:
        self.by_tool_call.update((call.id, served) for call in served.answer.tool_calls)
        if served.answer.content.strip():
            self._by_content[served.answer.content.strip()] = served
        if served.open_text is not None and self.ended(served):
            self._stopped.append(served)

    def with_content(self, message: Message) -> Served | None:
        """The latest answer with the text of `message`."""
        return self._by_content.get(message.content.strip())

    def anywhere(self, message: Message) -> Served | None:
        """The answer that `message` seems to be, wherever in the attempt it was given. It proves nothing."""
        for call in message.tool_calls:
            if call.id in self.by_tool_call:
                return self.by_tool_call[call.id]
        if found := self.with_content(message):
            return found
        extended = (served for served in reversed(self._stopped) if self.text_behind(served, message) is not None)
        return next(extended, None)

    def repeated(self, node: Node, message: Message) -> Served | None:
        """The answer given at `node` that `message` provably repeats.

        Several may read alike. Then the client may name one; otherwise the one with the smallest ids is taken, so that
        the choice never depends on order.
        """
        if len(node.answers) == 1 and repeats(message, node.answers[0][0]):
            return node.answers[0][1]
        same = [served for answer, served in node.answers if repeats(message, answer)]
        if not same and not message.tool_calls:  # a client may put reasoning and tool calls into the text
            same = [served for _, served in node.answers if self._raw_text(served) == message.content.strip()]
        return min(same, key=_preference(message), default=None)

    def extended(self, node: Node, message: Message) -> tuple[Served, str] | None:
        """The longest answer given at `node` that `message` provably begins with, and the text that the client has put
        behind it. The turn of the answer must not have ended.
        """
        found: list[tuple[Served, str]] = []
        for answer, served in node.answers:
            if answer is not served.answer:  # only the end of an answer: the client had sent its beginning
                continue
            text = self.text_behind(served, message)
            if text is not None:
                found.append((served, text))
        prefer = _preference(message)
        return min(found, key=lambda pair: (len(pair[1]), *prefer(pair[0])), default=None)

    def text_behind(self, served: Served, message: Message) -> str | None:
        """The text of `message` behind all sampled text, stop string included. None: it does not begin with that."""
        if served.open_text is None or message.tool_calls or not same_thoughts(message, served.answer):
            return None
        content = message.content.lstrip()
        return content[len(served.open_text) :] if content.startswith(served.open_text) else None

    def ended(self, served: Served) -> bool:
        """Has the turn ended, with its token or with a stop string? Otherwise the answer was cut off."""
        if served.last() in self._template.stop_token_ids:
            return True
        return served.open_text is not None and served.open_text.strip() != served.answer.content.strip()

    def open_text(self, answer: Message, sampled: list[int], *, begun: str) -> str | None:
        """`Served.open_text` of an answer whose text the client had `begun`."""
        if answer.tool_calls or not answer.content.strip():
            return None
        if sampled and sampled[-1] in self._template.stop_token_ids:
            return None
        text = begun + self._template.decode(sampled)
        parts = [] if answer.reasoning else [text]
        if self._template.traits.think is not None:  # the text behind the reasoning, which may be empty
            parts.append(text.partition(self._template.traits.think[1])[2])
        for part in parts:
            if part.lstrip().startswith(answer.content.lstrip()):
                return part.lstrip()
        return None

    def _raw_text(self, served: Served) -> str | None:
        """All text of an answer, reasoning and tool calls spelled out. None if it has neither."""
        if not served.answer.reasoning and not served.answer.tool_calls:
            return None
        return self._template.decode(served.completion().tolist()).strip()


def _preference(message: Message) -> Callable[[Served], tuple[bool, bytes]]:
    """A sort key: first the answer that the client names, then the one with the smallest ids."""
    return lambda served: (
        (served.answer.reply_id or served.call_id) != message.reply_id,
        served.completion().tobytes(),
    )
