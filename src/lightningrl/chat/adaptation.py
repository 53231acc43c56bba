"""Which messages does a template refuse, and what does it get instead? Messages + traits → the dicts to render.

refused or hidden              becomes
system messages                part of the next question
questions in a row             one question
results of tools               text in a question, and the tool calls text in an answer
the role `developer`           `system`
tool call ids of any length    ids of nine characters
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from lightningrl.chat.matching import ROLES, is_result
from lightningrl.chat.traits import SHORT_ID, Traits, Turn
from lightningrl.chat.turns import for_template
from lightningrl.messages import Message


def turns_of(messages: Sequence[Message], traits: Traits) -> list[Turn]:
    """The messages as dicts that a template with these traits accepts."""
    if not traits.shows_results:
        messages = [_as_text(message, traits) for message in messages]
    late = messages[1:] if traits.system == "first" else messages
    if traits.system != "anywhere" and any(message.role in ("system", "developer") for message in late):
        messages = _folded([adapted(message, traits) for message in messages], keep_first=traits.system == "first")
    if not traits.users_in_a_row:
        messages = _merged(messages)
    return [for_template(adapted(message, traits)) for message in messages]


def adapted(message: Message, traits: Traits) -> Message:
    """One message with a role and with tool call ids that the template knows."""
    if message.role in ROLES and not (message.role == "developer" and traits.developer):
        message = replace(message, role=ROLES[message.role])
    if traits.short_ids and (message.tool_calls or message.tool_call_id is not None):
        calls = tuple(replace(call, id=_short(call.id)) for call in message.tool_calls)
        answered = message.tool_call_id
        message = replace(message, tool_calls=calls, tool_call_id=None if answered is None else _short(answered))
    return message


def spelled(message: Message, traits: Traits) -> str:
    """The content and the tool calls of a message as text, in the spelling of `traits.tool_format`."""
    if not message.tool_calls:
        return message.content
    form = traits.tool_format
    between = f"{form.end}; {form.begin}" if form.between is None else form.between
    calls = between.join(f"{call.name}{form.middle}{call.arguments or '{}'}" for call in message.tool_calls)
    written = form.begin + calls + form.end
    return f"{message.content}\n{written}" if message.content else written


def _as_text(message: Message, traits: Traits) -> Message:
    """Tool calls and results as text, for a template that hides results."""
    if message.tool_calls:
        return replace(message, content=spelled(message, traits), tool_calls=())
    if is_result(message):
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    return message


def _folded(messages: Sequence[Message], *, keep_first: bool) -> list[Message]:
    """System messages as part of the next user message. With `keep_first`, all but the very first message."""
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


def _merged(messages: Sequence[Message]) -> list[Message]:
    """User messages in a row as one."""
    turns: list[Message] = []
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return turns


def _short(call_id: str) -> str:
    return call_id if len(call_id) == SHORT_ID else blake2b(call_id.encode(), digest_size=8).hexdigest()[:SHORT_ID]
