"""Items of OpenAI's `responses` ⇄ messages.

One answer has up to three kinds of items: reasoning, a message, function calls. Their ids hold the id of the response.
So items that a client sends back become one message again, also if it sends them by reference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from lightningrl.dialects import openai_wire as wire
from lightningrl.dialects.base import ChatRequest, Choice, Past, Refused, TokenLogprob, invalid
from lightningrl.messages import Message, ToolCall

Item: TypeAlias = Mapping[str, Any]

ID_PREFIX = "resp_"


class _Item(msgspec.Struct):
    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[wire.Part] | None = None
    summary: list[wire.Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[wire.Part] | None = None


class _Input(msgspec.Struct):
    input: list[_Item]


@dataclass(slots=True)
class _Turn:
    """A message under construction, item by item."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    reply_id: str | None = None
    """The recorded response that this message is the answer of; None: not proven."""
    rank: int = -1
    """The rank (see `_RANK`) of the last item."""

    def message(self) -> Message:
        return Message(
            role=self.role,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=tuple(self.calls),
            tool_call_id=self.tool_call_id,
            reply_id=self.reply_id,
        )


_RANK = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
"""The order of the items of one answer."""

_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def conversation(body: Mapping[str, Any], past: Past) -> tuple[Item, ...]:
    """All items of the conversation. References to items stay as they are."""
    previous, given = body.get("previous_response_id"), body.get("input")
    if previous is not None and previous not in past.conversations:
        hint = "an attempt knows its own responses alone"
        message = f"previous response `{previous}` not found"
        raise invalid(message, code="previous_response_not_found", param="previous_response_id", hint=hint)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or ()
    return (*past.conversations.get(previous or "", ()), *items)


def remember(past: Past, body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """An upstream's output may have elements that are no items, and items without an id: later requests cannot refer to
    them.
    """
    output = [item for item in response["output"] if isinstance(item, Mapping)]
    past.conversations[response["id"]] = (*conversation(body, past), *output)
    for item in output:
        if isinstance(item.get("id"), str):
            past.items[item["id"]] = item
            if "call_id" in item:
                past.items[item["call_id"]] = item


def messages(items: Iterable[Item], past: Past) -> Iterator[Message]:
    turns: list[_Turn] = []
    for item in wire.convert({"input": [_resolved(item, past) for item in items]}, _Input).input:
        _add(turns, item, past)
    return (turn.message() for turn in turns)


def _resolved(item: Item, past: Past) -> Item:
    if item.get("type") != "item_reference" and (item.get("type") is not None or "role" in item):
        return item
    found = past.items.get(str(item.get("id")))
    if found is None:
        hint = "an attempt knows its own items alone"
        raise Refused(404, f"item `{item.get('id')}` not found", code="item_not_found", param="input", hint=hint)
    return found


def _add(turns: list[_Turn], item: _Item, past: Past) -> None:
    kind = _kind(item)
    if kind in _OUTPUTS:
        turns.append(_Turn("tool", content=wire.text_of(item.output, param="input"), tool_call_id=item.call_id))
        return
    if kind == "message" and item.role != "assistant":
        turns.append(_Turn(str(item.role), content=wire.text_of(item.content, param="input")))
        return
    known = _known(item, past)
    reply_id = None if known is None else _reply_id(known)
    turn = _continued(turns, _RANK[kind], reply_id)
    if turn is None:
        turn = _Turn("assistant")
        turns.append(turn)
    turn.rank, turn.reply_id = _RANK[kind], turn.reply_id or reply_id
    if kind == "reasoning":
        turn.reasoning = _thoughts(item) or ("" if known is None else _thoughts(wire.convert(known, _Item)))
    elif kind == "message":
        turn.content = wire.text_of(item.content, param="input")
    elif all(call.id != item.call_id for call in turn.calls):
        arguments = item.arguments or "{}" if kind == "function_call" else wire.custom_arguments(item.input or "")
        name = joined(item.namespace, item.name or "")
        turn.calls.append(ToolCall(id=str(item.call_id), name=name, arguments=arguments))


def _kind(item: _Item) -> str:
    """Raises `Refused` for an item that is not supported."""
    kind = item.type or "message"
    if kind not in _RANK and kind not in _OUTPUTS:
        hint = "send messages, function calls and their outputs"
        raise invalid(f"items of type `{kind}` are not supported", code="unsupported_content", param="input", hint=hint)
    name, value = ("role", item.role) if kind == "message" else ("call_id", item.call_id)
    if not value and kind != "reasoning":
        raise invalid(f"an item of type `{kind}` has no `{name}`", param="input", hint="give it one")
    return kind


def _continued(turns: Sequence[_Turn], rank: int, reply_id: str | None) -> _Turn | None:
    """The answer that this item belongs to; None: a new one. Outputs may come between the calls of one answer."""
    last = next((turn for turn in reversed(turns) if turn.role != "tool"), None)
    if last is None or last.role != "assistant":
        return None
    if reply_id is not None and last.reply_id is not None:
        return last if reply_id == last.reply_id else None
    foreign = rank == 2 and last.reply_id is not None  # clients send ids of calls back verbatim
    if last is not turns[-1] or foreign:
        return None
    return last if rank > last.rank or rank == 2 else None


def _known(item: _Item, past: Past) -> Item | None:
    """The recorded item that the client has sent back. A stateless client drops the ids of items, but keeps the ids of
    calls and encrypted reasoning.
    """
    found = (past.items.get(key) for key in (item.id, item.call_id, item.encrypted_content) if key is not None)
    return next((known for known in found if known is not None), None)


def _thoughts(item: _Item) -> str:
    return wire.text_of(item.content, param="input") or wire.text_of(item.summary, param="input")


def item_id(kind: str, reply_id: str, place: int = 0) -> str:
    return f"{kind}_{reply_id.removeprefix(ID_PREFIX)}_{place}"


def _reply_id(item: Item) -> str:
    """`resp_a-1` of `fc_a-1_0`."""
    return ID_PREFIX + item["id"].partition("_")[2].rpartition("_")[0]


def summarised(request: ChatRequest) -> bool:
    """Whether a summary of the reasoning is requested; the summary is then the full reasoning."""
    reasoning = request.body.get("reasoning") or {}
    return bool(reasoning.get("summary") or reasoning.get("generate_summary"))


def output(choice: Choice, request: ChatRequest, reply_id: str) -> list[dict[str, Any]]:
    """The items of an answer. Without calls there is always a message: agents retry if there is neither."""
    answer, items = choice.message, list[dict[str, Any]]()
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if answer.reasoning.strip():
        items.append(reasoning_item(answer.reasoning, request, reply_id, status="completed"))
    if answer.content or not answer.tool_calls:
        content = [text_part(answer.content, choice.tokens)]
        message = {"id": item_id("msg", reply_id), "type": "message", "status": status, "role": "assistant"}
        items.append({**message, "content": content})
    odd = _odd_tools(request.body.get("tools") or ()) if answer.tool_calls else {}
    items += [_call_item(call, reply_id, place, odd.get(call.name, {})) for place, call in enumerate(answer.tool_calls)]
    return items


def reasoning_item(text: str, request: ChatRequest, reply_id: str, *, status: str) -> dict[str, Any]:
    """Its "encrypted" content is just its id: a client that keeps nothing else still refers to the reasoning."""
    item: dict[str, Any] = {"id": item_id("rs", reply_id), "type": "reasoning", "status": status}
    if "reasoning.encrypted_content" in (request.body.get("include") or ()):
        item["encrypted_content"] = item["id"]
    if summarised(request):
        return {**item, "summary": [{"type": "summary_text", "text": text}]}
    return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def joined(namespace: str | None, name: str) -> str:
    """The name by which the model calls a tool of a namespace, e.g. of one MCP server."""
    if not namespace:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def _odd_tools(tools: Iterable[Mapping[str, Any]], namespace: str | None = None) -> dict[str, Mapping[str, Any]]:
    """Tools whose calls differ from a plain function's: name → fields of the item of a call."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        if tool["type"] == "namespace":
            found.update(_odd_tools(tool.get("tools") or (), tool["name"]))
        elif tool["type"] == "custom" or namespace is not None:
            place = {} if namespace is None else {"namespace": namespace, "name": tool.get("name")}
            kind = "custom_tool_call" if tool["type"] == "custom" else "function_call"
            found[joined(namespace, str(tool.get("name")))] = {"type": kind, **place}
    return found


def _call_item(call: ToolCall, reply_id: str, place: int, odd: Mapping[str, Any]) -> dict[str, Any]:
    item: dict[str, Any] = {
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        **odd,
    }
    if item["type"] == "custom_tool_call":
        return {"id": item_id("ctc", reply_id, place), "input": wire.custom_input(call.arguments), **item}
    return {"id": item_id("fc", reply_id, place), "arguments": call.arguments, **item}


def text_part(text: str, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "text": text, "logprobs": wire.shown(tokens or ())}
