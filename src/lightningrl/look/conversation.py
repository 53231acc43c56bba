"""What was said in an attempt? For each call the messages that are new in it, and the answer, whichever dialect they
came in.

call   request                       messages             answer
c1     [system, user]                system, user         a1
c2     [system, user, a1, tool]      tool                 a2
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightningrl.dialects.recorded import Reader
from lightningrl.messages import Message
from lightningrl.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One call's part of the conversation."""

    earlier: int
    """How many messages the request repeats from the call that it continues."""
    messages: tuple[Message, ...]
    """The messages after those."""
    answer: Message | None
    """None where the answer broke, or where the dialect cannot be read here."""

    def as_json(self) -> dict[str, Any]:
        answer = None if self.answer is None else _plain(self.answer)
        return {
            "earlier_messages": self.earlier,
            "messages": [_plain(message) for message in self.messages],
            "answer": answer,
        }


def conversation(calls: Sequence[Call]) -> list[Said]:
    """Of the calls of one attempt, in their order."""
    reader = Reader()
    known: dict[str, tuple[Message, ...]] = {}
    found: list[Said] = []
    for call in calls:
        request = reader.request(call)
        messages = (
            ()
            if request is None
            else request.messages or tuple(Message(role="prompt", content=str(p)) for p in request.prompts)
        )
        answer = None if call.capture == "incomplete" else reader.answer(call)
        before = known.get(call.parent_call_id or "", ())
        earlier = _common(before, messages)
        found.append(Said(earlier=earlier, messages=tuple(messages[earlier:]), answer=answer))
        known[call.id] = (*messages, answer) if answer is not None else tuple(messages)
    return found


def _common(before: Sequence[Message], messages: Sequence[Message]) -> int:
    """Leading messages that both have. An assistant's message counts as the answer before it although the client has
    dropped its reasoning.
    """
    pairs = zip(before, messages, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if _key(one) != _key(other)), min(len(before), len(messages))
    )


def _key(message: Message) -> tuple[object, ...]:
    return (
        message.role,
        message.content.strip(),
        [(call.name, call.arguments) for call in message.tool_calls],
        message.tool_call_id,
    )


def _plain(message: Message) -> dict[str, Any]:
    """Without fields that say nothing."""
    fields: Mapping[str, Any] = asdict(message)
    kept = {name: value for name, value in fields.items() if value and name not in ("reply_id", "ended", "failed")}
    return {"role": message.role, "content": message.content, **kept}
