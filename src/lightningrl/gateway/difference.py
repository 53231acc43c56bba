"""How does a request differ from what was recorded? An example that shows the cause.

It is compared with the recorded call that has not been answered yet and shares the longest beginning of messages.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lightningrl.dialects.base import ChatRequest
from lightningrl.dialects.recorded import Reader
from lightningrl.messages import Message, ToolCall
from lightningrl.types import Call

BEFORE, BEHIND = 20, 40
"""Characters that are shown before the first difference, and from it on."""


def example(request: ChatRequest, *, dialect: str, trunk: Sequence[Call], unused: Collection[str]) -> str:
    """One line. `trunk`: all recorded calls. `unused`: the ids of those whose answers have not been given."""
    readers: dict[str, Reader] = {}
    recorded: list[tuple[Call, ChatRequest]] = []
    for call in trunk:
        known = readers.setdefault(call.attempt_id, Reader(lenient=True)).request(call)
        if known is not None:
            recorded.append((call, known))
    several = len(readers) > 1
    same = [call for call, known in recorded if call.dialect == dialect and first_difference(request, known) is None]
    if found := [call for call in same if call.id in unused]:
        return f"the same messages as in {_named(found[0], several)}, but its prompt has other tokens"
    if found := [call for call in same if call.capture != "incomplete"]:
        times = "once" if len(found) == 1 else f"{len(found)} times"
        return f"it asks {_named(found[0], several)} once more; the record has it {times}"
    if same:
        broken = same[0]
        return f"the answer to {_named(broken, several)} broke, so it cannot be given again: {broken.capture_reason}"
    left = [(call, known) for call, known in recorded if call.id in unused]
    if not left:
        return f"it calls once more; all {len(trunk)} recorded calls have been answered"
    call, known = max(left, key=lambda pair: _likeness(request, pair[1]))
    if call.dialect != dialect:
        return f"it asks in `{dialect}`; {_named(call, several)} is in `{call.dialect}`"
    return f"{first_difference(request, known)} ({_named(call, several)})"


def first_difference(asked: ChatRequest, recorded: ChatRequest) -> str | None:
    """Where one conversation parts from another, without the ids of tool calls; None: they are the same."""
    messages, known = _messages(asked), _messages(recorded)
    for number, (message, before) in enumerate(zip(messages, known, strict=False), start=1):
        if message != before:
            return _message_difference(number, message, before)
    if len(messages) > len(known):
        more = messages[len(known)]
        return f"{_count(len(messages))} instead of {len(known)}; message {len(known) + 1} ({more.role}) is new: " + (
            _excerpt(_text(more), 0)
        )
    if len(messages) < len(known):
        less = known[len(messages)]
        return f"{_count(len(messages))} instead of {len(known)}; message {len(messages) + 1} ({less.role}) lacks: " + (
            _excerpt(_text(less), 0)
        )
    if asked.tools != recorded.tools:
        return _tools_difference(asked.tools, recorded.tools)
    if asked.model != recorded.model:
        return f"it asks the model `{asked.model}` instead of `{recorded.model}`"
    if asked.n > recorded.n:
        return f"it asks for `{asked.n}` answers instead of `{recorded.n}`"
    return None


def _message_difference(number: int, message: Message, before: Message) -> str:
    if message.role != before.role:
        return f"message {number} is of `{message.role}` instead of `{before.role}`: {_excerpt(_text(message), 0)}"
    fields = (
        ("", message.content, before.content),
        ("tool calls of ", _calls(message), _calls(before)),
        ("reasoning of ", message.reasoning, before.reasoning),
    )
    for name, text, old in fields:
        if text != old:
            at = _shared(text, old)
            return f"{name}message {number} ({message.role}) has {_excerpt(text, at)} instead of {_excerpt(old, at)}"
    return f"message {number} ({message.role}) has the same text, but another name or state"


def _tools_difference(tools: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    named, known = [{tool["function"]["name"]: tool for tool in found} for found in (tools, before)]
    if more := [name for name in named if name not in known]:
        return f"it has another tool: `{more[0]}`"
    if less := [name for name in known if name not in named]:
        return f"it lacks the tool `{less[0]}`"
    for name in named:
        if named[name] != known[name]:
            text, old = (msgspec.json.encode(tool).decode() for tool in (named[name], known[name]))
            at = _shared(text, old)
            return f"the tool `{name}` has {_excerpt(text, at)} instead of {_excerpt(old, at)}"
    return f"its tools have another order: `{', '.join(named)}` instead of `{', '.join(known)}`"


def _likeness(asked: ChatRequest, recorded: ChatRequest) -> tuple[int, int]:
    """Messages that are the same at the beginning, then characters of the first that differs."""
    messages, known = _messages(asked), _messages(recorded)
    for place, (message, before) in enumerate(zip(messages, known, strict=False)):
        if message != before:
            return place, _shared(_text(message), _text(before))
    return min(len(messages), len(known)), 0


def _messages(request: ChatRequest) -> list[Message]:
    """The messages without ids; raw prompts as messages of the role `prompt`."""
    raw = [Message(role="prompt", content=text if isinstance(text, str) else str(text)) for text in request.prompts]
    return raw or [without_ids(message) for message in request.messages]


def without_ids(message: Message) -> Message:
    """A message without the ids of its tool calls and of its answer."""
    calls = tuple(ToolCall(id="", name=call.name, arguments=call.arguments) for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id=None, reply_id=None)


def _text(message: Message) -> str:
    return "\n".join(part for part in (message.content, _calls(message), message.reasoning) if part)


def _calls(message: Message) -> str:
    return "\n".join(f"{call.name}({call.arguments})" for call in message.tool_calls)


def _shared(text: str, other: str) -> int:
    """Number of first characters that two texts share."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (one, another) in pairs if one != another), min(len(text), len(other)))


def _excerpt(text: str, at: int) -> str:
    """The text around its character `at`, in quotes and on one line."""
    start, end = max(0, at - BEFORE), at + BEHIND
    shown = "…" * (start > 0) + text[start:end] + "…" * (end < len(text))
    return msgspec.json.encode(shown).decode()


def _count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def _named(call: Call, several: bool) -> str:
    return f"call {call.index + 1} of `{call.attempt_id}`" if several else f"call {call.index + 1}"
