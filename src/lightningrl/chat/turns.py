"""How does a message look to a chat template? As the dict that templates of the Hugging Face hub read."""

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
    """The dict that chat templates read. Arguments that are a JSON object come parsed: templates apply `tojson`."""
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


def _arguments(text: str) -> object:
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return Arguments(value, text if text.strip() else "{}") if isinstance(value, dict) else text
