"""OpenAI's `chat/completions`. https://platform.openai.com/docs/api-reference/chat

It also has fields that servers of open models have added: `top_k`, and the reasoning as `reasoning_content`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from lightningrl.dialects import openai_wire as wire
from lightningrl.dialects.base import (
    ChatRequest,
    Choice,
    EventStream,
    MediaType,
    Past,
    Refused,
    Reply,
    TokenLogprob,
    invalid,
)
from lightningrl.dialects.openai_wire import encode
from lightningrl.messages import Message, ToolCall

Count = Annotated[int, msgspec.Meta(ge=1)]


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[wire.Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prefix: bool | None = None
    """Mistral's and DeepSeek's way to request that the answer continues this message."""


class _Signature(msgspec.Struct):
    name: str
    description: str | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Signature | None = None
    custom: _Signature | None = None


class _Schema(msgspec.Struct):
    schema: dict[str, Any] = {}


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class _Body(wire.SharedFields, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    continue_final_message: bool | None = None
    """vLLM's way: the answer continues the last message."""
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    functions: list[_Signature] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    response_format: _Format | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=wire.MOST_TOP_LOGPROBS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None


class OpenAIChat:
    """See `Dialect`."""

    name = "openai.chat"
    id_prefix = "chatcmpl-"

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        return wire.matched(path, "/chat/completions")

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        parsed = wire.convert(body, _Body)
        tools, choice, name = wire.choose_tools(*_tools(body, parsed))
        messages = tuple(_message(message) for message in parsed.messages)
        continues = parsed.continue_final_message or parsed.messages[-1].prefix
        return ChatRequest(
            body=body,
            **parsed.common(),
            messages=messages if continues else wire.ended(messages),
            tools=tools,
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=parsed.parallel_tool_calls is not False and not parsed.functions,
            json_schema=_json_schema(parsed.response_format),
            logprobs=bool(parsed.logprobs or parsed.top_logprobs),
            top_logprobs=parsed.top_logprobs or 0,
            max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        return {
            **wire.envelope(reply, kind="chat.completion"),
            "choices": [_choice(choice, reply.request) for choice in reply.choices],
            "usage": wire.usage(reply),
        }

    def stream(self, begun: Reply) -> EventStream:
        return _Stream(begun)

    def answer(self, response: Mapping[str, Any]) -> Message:
        return _message(msgspec.convert(response["choices"][0]["message"], _Message))

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        scores = response["choices"][0]["logprobs"]
        tokens = None if scores is None else wire.tokens_of(scores["content"])
        return wire.reply(request, response, self.answer(response), tokens)

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Nothing: every request has its whole conversation."""

    def error(self, refused: Refused) -> dict[str, Any]:
        return wire.error_body(refused)


class _Stream:
    """Server-sent events: role, text, tool calls, finish reason, usage if requested, `[DONE]`.

    Most events are pieces of text, so all of such an event but its text is encoded once for each choice.
    """

    media_type: MediaType = "text/event-stream"

    def __init__(self, begun: Reply) -> None:
        self._chunks = wire.Chunks(begun, kind="chat.completion.chunk")
        self.close, self.error = self._chunks.close, self._chunks.error
        self._text_end = b'},"logprobs":null,"finish_reason":null}]' + self._chunks.tail
        self._text_begin: dict[int, bytes] = {}
        self._request = begun.request

    def reasoning(self, index: int, text: str) -> bytes:
        opening = self._open(index)
        return opening + self._chunk(index, {"content": None, "reasoning_content": text}) if text else opening

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        begin = self._text_begin.get(index)
        if begin is not None and text and tokens is None:
            return begin + encode(text) + self._text_end
        opening = self._open(index)
        return opening + self._chunk(index, {"content": text}, tokens=tokens) if text or tokens else opening

    def finish(self, choice: Choice) -> bytes:
        events = self._open(choice.index)
        message = _message_body(choice, self._request)
        if legacy := message.get("function_call"):
            events += self._chunk(choice.index, {"function_call": legacy})
        for place, call in enumerate(message.get("tool_calls", ())):
            events += self._chunk(choice.index, {"tool_calls": [{"index": place, **call}]})
        return events + self._chunk(choice.index, {}, finish_reason=_finish_reason(choice, self._request))

    def _open(self, index: int) -> bytes:
        if index in self._text_begin:
            return b""
        self._text_begin[index] = self._chunks.head + f',"choices":[{{"index":{index},"delta":{{"content":'.encode()
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        tokens: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": _logprobs(tokens), "finish_reason": finish_reason}
        return self._chunks.event(choice)


def _tools(body: Mapping[str, Any], parsed: _Body) -> tuple[Any, list[Mapping[str, Any]]]:
    """(`tool_choice`, tools). The fields of a function stay as sent, because templates render all of them."""
    if parsed.functions and not parsed.tools:
        choice = parsed.function_call
        if isinstance(choice, Mapping):
            choice = {"type": "function", **choice}
        return choice, [{"type": "function", "function": given} for given in body["functions"]]
    tools: list[Mapping[str, Any]] = []
    for tool, given in zip(parsed.tools or (), body.get("tools") or (), strict=True):
        if tool.type not in ("function", "custom"):
            wire.leave_out(tool.type)
        elif tool.type == "custom" and tool.custom is not None:
            tools.append(wire.custom_tool(tool.custom.name, tool.custom.description))
        elif tool.type == "function" and tool.function is not None:
            tools.append(given)
        else:
            raise invalid(f"a tool of type `{tool.type}` needs `{tool.type}`", param="tools", hint="name it there")
    return parsed.tool_choice, tools


def _json_schema(wanted: _Format | None) -> Mapping[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise invalid(
            "`response_format` has no `json_schema`", param="response_format", hint="or ask for `json_object`"
        )
    return wanted.json_schema.schema


def _message(message: _Message) -> Message:
    calls = [_tool_call(call) for call in message.tool_calls or ()]
    if message.function_call is not None and not calls:
        calls = [ToolCall(id="", name=message.function_call.name, arguments=message.function_call.arguments)]
    return Message(
        role=message.role,
        content=wire.text_of(message.content, param="messages") or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _tool_call(call: _ToolCall) -> ToolCall:
    if call.function is not None:
        return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
    if call.custom is not None:
        return ToolCall(id=call.id, name=call.custom.name, arguments=wire.custom_arguments(call.custom.input))
    raise invalid(f"tool call `{call.id}` calls no function", param="messages", hint="give it `function`")


def _choice(choice: Choice, request: ChatRequest) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": _message_body(choice, request),
        "logprobs": _logprobs(choice.tokens),
        "finish_reason": _finish_reason(choice, request),
    }


def _message_body(choice: Choice, request: ChatRequest) -> dict[str, Any]:
    answer = choice.message
    body: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        body["reasoning_content"] = answer.reasoning
    if not answer.tool_calls:
        return body
    body["content"] = answer.content or None
    if _is_legacy(request):
        call = answer.tool_calls[0]
        return {**body, "function_call": {"name": call.name, "arguments": call.arguments}}
    custom = {tool["custom"]["name"] for tool in request.body.get("tools") or () if tool["type"] == "custom"}
    return {**body, "tool_calls": [_tool_call_body(call, custom=call.name in custom) for call in answer.tool_calls]}


def _tool_call_body(call: ToolCall, *, custom: bool) -> dict[str, Any]:
    if custom:
        return {
            "id": call.id,
            "type": "custom",
            "custom": {"name": call.name, "input": wire.custom_input(call.arguments)},
        }
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(choice: Choice, request: ChatRequest) -> str:
    """OpenAI's name. `cancelled` and `error` are only recorded, never sent."""
    return "function_call" if choice.finish_reason == "tool_calls" and _is_legacy(request) else choice.finish_reason


def _is_legacy(request: ChatRequest) -> bool:
    """Whether the request has `functions`, the predecessor of `tools`."""
    return bool(request.body.get("functions")) and not request.body.get("tools")


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": wire.shown(tokens), "refusal": None}
