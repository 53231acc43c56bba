"""May the text of tasks, prompts and answers leave the machine? Only if the user says so.

The variable is that of OpenTelemetry's instrumentations of generative AI. It holds for all loggers that send text to
another machine.
"""

import os
from collections.abc import Sequence
from typing import Any

from lightningrl.dialects.base import ChatRequest
from lightningrl.dialects.recorded import Reader
from lightningrl.loggers.base import Ended
from lightningrl.messages import Message
from lightningrl.types import Call

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ALLOWED = ("true", "1", "span_only", "span_and_event")


def content_allowed() -> bool:
    """Whether `VARIABLE` allows it; by default it does not."""
    return os.environ.get(VARIABLE, "").strip().lower() in ALLOWED


def error_type(error: str | None) -> str:
    """The name of the exception in the first line of an attempt's error; "" without an error."""
    name = (error or "").partition("\n")[0].partition(":")[0].strip()
    if not name:
        return ""
    return name if name.replace(".", "").replace("_", "").isalnum() else "_OTHER"


def shown_attempt(ended: Ended) -> str | None:
    """Id of the accepted attempt, or else of the latest one; None: no attempt has begun."""
    latest = ended.attempts[-1].id if ended.attempts else None
    return ended.rollout.accepted_attempt_id or latest


def said(calls: Sequence[Call]) -> list[tuple[Call, tuple[Message, ...], Message | None]]:
    """(call, messages of its request, its answer) of one attempt, in order; the answer is None if it broke."""
    reader = Reader(lenient=True)
    return [(call, _messages(reader.request(call)), reader.answer(call)) for call in calls]


def plain(message: Message) -> dict[str, Any]:
    """A message in the form of OpenAI's chat API."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
            for made in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _messages(request: ChatRequest | None) -> tuple[Message, ...]:
    """The messages of a request. A raw prompt becomes a message with the role `prompt`."""
    if request is None:
        return ()
    return request.messages or tuple(Message(role="prompt", content=str(prompt)) for prompt in request.prompts)
