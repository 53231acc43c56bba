"""The conversation of an attempt: the messages that each call adds, and its answer. It is the same for all dialects.

call   request                       messages             answer
c1     [system, user]                system, user         a1
c2     [system, user, a1, tool]      tool                 a2
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from lightningrl.chat.matching import step
from lightningrl.dialects.base import ChatRequest
from lightningrl.dialects.recorded import Reader
from lightningrl.messages import Message
from lightningrl.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One call's part of the conversation."""

    earlier: int
    """Number of messages that the request repeats from its parent call."""
    messages: tuple[Message, ...]
    """The messages after those."""
    answer: Message | None
    """None if the answer broke off, or if the dialect is not installed here."""

    def as_json(self) -> dict[str, Any]:
        return {
            "earlier_messages": self.earlier,
            "messages": [plain(message) for message in self.messages],
            "answer": None if self.answer is None else plain(self.answer),
        }


def conversation(calls: Sequence[Call]) -> list[Said]:
    """One entry for each call of an attempt; `calls` are in order."""
    reader = Reader()
    known: dict[str, tuple[Message, ...]] = {}
    found: list[Said] = []
    for call in calls:
        messages = _messages(reader.request(call))
        answer = None if call.capture == "incomplete" else reader.answer(call)
        earlier = _repeated(known.get(call.parent_call_id or "", ()), messages)
        found.append(Said(earlier=earlier, messages=messages[earlier:], answer=answer))
        known[call.id] = messages if answer is None else (*messages, answer)
    return found


def _messages(request: ChatRequest | None) -> tuple[Message, ...]:
    """The messages of a request. A raw prompt becomes a message with the role `prompt`."""
    if request is None:
        return ()
    return request.messages or tuple(Message(role="prompt", content=str(prompt)) for prompt in request.prompts)


def _repeated(before: Sequence[Message], messages: Sequence[Message]) -> int:
    """Number of leading messages with the same meaning; a dropped reasoning makes no difference."""
    pairs = zip(before, messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: step(pair[:1]) == step(pair[1:]), pairs))


def plain(message: Message) -> dict[str, Any]:
    """The message without its empty fields."""
    fields: Mapping[str, Any] = asdict(message)
    kept = {name: value for name, value in fields.items() if value and name not in ("reply_id", "ended", "failed")}
    return {"role": message.role, "content": message.content, **kept}
