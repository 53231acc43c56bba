"""How do messages look to a chat template?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from lightningrl.messages import Message


class Arguments(dict[str, Any]):
    """Arguments as an object, for templates that walk through them, and as text, for templates that join strings."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def for_template(message: Message) -> dict[str, Any]:
    """The dict that chat templates expect. Arguments that are a JSON object are handed on parsed, as templates apply
    `tojson`.
    """
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning  # the name that templates read
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def folded(messages: Sequence[Message], *, keep_first: bool) -> list[Message]:
    """System messages said by the user who speaks next, for templates that refuse them; with `keep_first` all but the
    very first.
    """
    turns: list[Message] = []
    held: list[str] = []
    for place, message in enumerate(messages):
        if message.role == "system" and not (keep_first and place == 0):
            held.append(message.content)
        elif held and message.role == "user":
            turns.append(replace(message, content="\n\n".join([*held, message.content])))
            held = []
        elif held and message.role == "assistant":
            turns += [Message(role="user", content="\n\n".join(held)), message]
            held = []
        else:
            turns.append(message)
    return [*turns, Message(role="user", content="\n\n".join(held))] if held else turns


def merged(messages: Sequence[Message]) -> list[Message]:
    """User messages in a row as one, for templates that want roles to alternate."""
    turns: list[Message] = []
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return turns


def _arguments(text: str) -> object:
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return Arguments(value, text if text.strip() else "{}") if isinstance(value, dict) else text
