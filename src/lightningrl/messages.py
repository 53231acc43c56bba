"""One message of a conversation, in a shape that all dialects, templates and readers share."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model asks for a function to be called."""

    id: str
    """"" where the wire format has no ids."""
    name: str
    arguments: str
    """JSON text, byte for byte as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or another role that the template knows."""
    content: str
    """"" for a message without text."""
    reasoning: str = ""
    """The reasoning that precedes `content`; "" without any, or if the client has dropped it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The tool call that a tool's message answers."""
    name: str | None = None
    failed: bool = False
    """A tool's result that the wire format marks as an error."""
    reply_id: str | None = None
    """The recorded call whose answer this message is; None: not stated in the request."""
    ended: bool = False
    """True for a final assistant message that is complete: the answer is a new turn and does not continue it."""


def joined(first: Message, then: Message) -> Message:
    """Two messages of the assistant as one."""
    return Message(
        role=first.role,
        content=first.content + then.content,
        reasoning=first.reasoning + then.reasoning,
        tool_calls=(*first.tool_calls, *then.tool_calls),
        reply_id=then.reply_id or first.reply_id,
    )
