"""Do two messages mean the same? What a client may do to a message on its way back, and what proves that it is still
ours.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from lightningrl.messages import Message, ToolCall

Step: TypeAlias = Hashable
"""One move from a conversation to a longer one; equal for messages that mean the same."""

ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles."""

RESULTS = frozenset(("tool", "function"))

EXACT = 2**53
"""Integers beyond it are not exact where all numbers are doubles, as in JavaScript (RFC 8259, section 6)."""


def step(message: Message) -> Step:
    """White space at the ends makes no difference, nor how a client spaces or orders JSON."""
    role = ROLES.get(message.role, message.role)
    if message.tool_calls:
        return role, message.content.strip(), _signatures(message.tool_calls), message.name
    return role, message.content.strip(), message.tool_call_id, message.name


def gist(message: Message) -> Step:
    """As `step`, but of tool calls only what comes back verbatim. Enough to see what has become of a history, not to
    prove that it is the same.
    """
    return tuple(sorted(call.id for call in message.tool_calls)) if message.tool_calls else step(message)


def gists(messages: Sequence[Message]) -> list[Step]:
    """One for each message, or for the results of parallel tool calls together."""
    made: list[Step] = []
    run: list[Step] = []
    for message in messages:
        if is_result(message):
            run.append(step(message))
            continue
        if run:
            made.append(results(run))
            run = []
        made.append(gist(message))
    return [*made, results(run)] if run else made


def is_result(message: Message) -> bool:
    return message.role in RESULTS


def results(run: Sequence[Step]) -> Step:
    """The step that tool results in a row make; they may come in any order."""
    return run[0] if len(run) == 1 else frozenset(run) if len(set(run)) == len(run) else tuple(run)


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for tools that mean the same."""
    return msgspec.json.encode(tools, order="sorted")


def repeats(message: Message, answer: Message) -> bool:
    """Is `message` provably our `answer`, sent back? Clients may drop reasoning and the text beside tool calls, and
    write arguments anew.
    """
    calls = answer.tool_calls
    if (
        message.content == answer.content
        and message.reasoning == answer.reasoning
        and (not calls or _verbatim(message.tool_calls, calls))
    ):
        return bool(calls) or not message.tool_calls  # as almost always
    said, ours = message.content.strip(), answer.content.strip()
    if not same_thoughts(message, answer):
        return False
    if not calls:
        return not message.tool_calls and said == ours
    return said in ("", ours) and _same_calls(message.tool_calls, calls)


def same_thoughts(message: Message, answer: Message) -> bool:
    """Does `message` have the thoughts of our `answer`, or is one of the two without?"""
    return not message.reasoning or not answer.reasoning or message.reasoning.strip() == answer.reasoning.strip()


def is_subsequence(few: Sequence[Step], many: Sequence[Step]) -> bool:
    """Are `few` what is left of `many` when some are dropped?"""
    rest = iter(many)
    return all(one in rest for one in few)


def _verbatim(theirs: Sequence[ToolCall], ours: Sequence[ToolCall]) -> bool:
    if len(theirs) != len(ours):
        return False
    for a, b in zip(theirs, ours, strict=True):
        if a.id != b.id or a.arguments != b.arguments or a.name != b.name:
            return False
    return True


def _same_calls(theirs: Sequence[ToolCall], ours: Sequence[ToolCall]) -> bool:
    """Ids come back verbatim; where the wire has none (""), order decides. Arguments are compared by meaning."""
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
    """JSON in one spelling: keys sorted, numbers as the doubles that many clients make of them."""
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
