"""What is said in a conversation, whatever wire format it came in: one shape for all dialects, all templates and the tree."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model asks for a function to be called."""

    id: str
    name: str
    arguments: str
    """JSON text, byte for byte as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or what the template knows."""
    content: str
    """"" where there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None


def for_template(message: Message) -> dict[str, Any]:
    """The dict that chat templates expect. Arguments that are a JSON object are handed on parsed, as templates apply `tojson`."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def canonical(message: Message) -> bytes:
    """Equal for messages that mean the same: white space at the ends, and how a client spaces or orders JSON, make no difference."""
    calls = [[call.id, call.name, _sorted(call.arguments)] for call in message.tool_calls]
    return msgspec.json.encode([message.role, message.content.strip(), calls, message.tool_call_id, message.name])


def canonical_tools(tools: tuple[Mapping[str, Any], ...]) -> bytes:
    return msgspec.json.encode(tools, order="sorted")


def repeats(message: Message, answer: Message) -> bool:
    """Is `message` provably our `answer`, sent back? Clients may drop the text beside tool calls, and write arguments anew."""
    said = message.content.strip()
    if not answer.tool_calls:
        return not message.tool_calls and said == answer.content.strip()
    ours = [(call.id, call.name, _sorted(call.arguments)) for call in answer.tool_calls]
    theirs = [(call.id, call.name, _sorted(call.arguments)) for call in message.tool_calls]
    return ours == theirs and said in ("", answer.content.strip())


def _arguments(text: str) -> object:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _sorted(text: str) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted")
    except (msgspec.DecodeError, RecursionError):
        return text.encode()
