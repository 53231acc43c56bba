"""Do two messages mean the same? Clients change white space, the order of JSON keys, and drop parts of an answer."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from lightningrl.messages import Message, ToolCall

Step: TypeAlias = Hashable
"""One move from a conversation to a longer one; equal for messages that mean the same."""

ROLES = {"developer": "system", "function": "tool"}
"""Other names of the same roles."""

RESULTS = frozenset(("tool", "function"))

EXACT = 2**53
"""Larger integers are not exact where all numbers are doubles, as in JavaScript (RFC 8259, section 6)."""


def in_steps(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """One message at a time, but the results of parallel tool calls together."""
    together: list[Message] = []
    for message in messages:
        if message.role in RESULTS:
            together.append(message)
            continue
        if together:
            yield together
            together = []
        yield (message,)
    if together:
        yield together


def step(messages: Sequence[Message]) -> Step:
    """The step that one message makes, or that the results of parallel tool calls make together, in any order."""
    if len(messages) == 1:
        return _step(messages[0])
    made = [_step(message) for message in messages]
    return frozenset(made) if len(set(made)) == len(made) else tuple(made)


def gist(message: Message) -> Step:
    """As `step`, but a message with tool calls counts by their ids alone, which come back verbatim.

    That is enough to see how a history was changed. It does not prove that two histories are the same.
    """
    if message.tool_calls:
        return tuple(sorted(call.id for call in message.tool_calls))
    return _step(message)


def gists(messages: Sequence[Message]) -> list[Step]:
    """A gist for each message, and one step for the results of parallel tool calls."""
    return [step(group) if is_result(group[0]) else gist(group[0]) for group in in_steps(messages)]


def is_result(message: Message) -> bool:
    """Is this the result of a tool call?"""
    return message.role in RESULTS


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for tools that mean the same."""
    return msgspec.json.encode(tools, order="sorted")


def repeats(message: Message, answer: Message) -> bool:
    """Is `message` provably `answer`, sent back? Clients may drop the reasoning and the text beside tool calls, and
    write the arguments anew.
    """
    said, ours = message.content.strip(), answer.content.strip()
    if not same_thoughts(message, answer):
        return False
    if not answer.tool_calls:
        return not message.tool_calls and said == ours
    if said not in ("", ours):
        return False
    return message.tool_calls == answer.tool_calls or _same_calls(message.tool_calls, answer.tool_calls)


def same_thoughts(message: Message, answer: Message) -> bool:
    """Do both have the same reasoning, or does one of them have none?"""
    return not message.reasoning or not answer.reasoning or message.reasoning.strip() == answer.reasoning.strip()


def is_subsequence(few: Sequence[Step], many: Sequence[Step]) -> bool:
    """True if `few` is `many` with some steps removed."""
    rest = iter(many)
    return all(one in rest for one in few)


def _step(message: Message) -> Step:
    """Ignores white space at the ends, and the spaces and the key order of JSON."""
    role = ROLES.get(message.role, message.role)
    if message.tool_calls:
        return role, message.content.strip(), _signatures(message.tool_calls), message.name
    return role, message.content.strip(), message.tool_call_id, message.name


def _same_calls(theirs: Sequence[ToolCall], ours: Sequence[ToolCall]) -> bool:
    """Ids come back verbatim. Without ids (""), order counts. Arguments are compared by meaning."""
    if len(theirs) != len(ours):
        return False
    if all(call.id for call in theirs):
        theirs, ours = sorted(theirs, key=lambda call: call.id), sorted(ours, key=lambda call: call.id)
    return all(
        a.id in ("", b.id)
        and a.name == b.name
        and (a.arguments == b.arguments or _meaning(a.arguments) == _meaning(b.arguments))
        for a, b in zip(theirs, ours, strict=True)
    )


def _signatures(calls: Sequence[ToolCall]) -> Step:
    return tuple(sorted((call.id, call.name, _meaning(call.arguments)) for call in calls))


def _meaning(text: str) -> str:
    """JSON in one spelling: keys sorted, and numbers as doubles, since many clients convert them."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
        return msgspec.json.encode(_number(value), order="sorted").decode()
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        double = float(value)
    except OverflowError:  # beyond all doubles
        return value
    return int(double) if math.isfinite(double) and double.is_integer() and abs(double) <= EXACT else double
