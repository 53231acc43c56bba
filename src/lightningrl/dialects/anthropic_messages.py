"""Anthropic's `messages` and `messages/count_tokens`. https://docs.anthropic.com/en/api/messages

content blocks ⇄ messages: a user turn may hold several tool results and a text, each of which becomes a `Message`.
A thread (`thread`, which the SDK's tool runner uses) is a conversation that the gateway remembers: its later requests
have new turns only. `usage` counts as Anthropic does: `cache_read_input_tokens` is what an earlier call of the
conversation has read or sampled, `input_tokens` is the rest of the prompt; `count_tokens` gives their sum.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from lightningrl.arguments import from_object, to_object
from lightningrl.dialects.anthropic_tools import BUILT_IN
from lightningrl.dialects.base import (
    ChatRequest,
    Choice,
    EventStream,
    MediaType,
    Past,
    Refused,
    Reply,
    Stops,
    Temperature,
    TokenLogprob,
    ToolChoice,
    function_tool,
    invalid,
)
from lightningrl.messages import Message, ToolCall, joined
from lightningrl.types import FinishReason

COUNT_ONLY = "count_only"
"""The field that a POST to `/messages/count_tokens` adds to its body."""

BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
"""Claude Code begins its system prompt with this line. Its hash differs in every request, so no call would continue
another one; to a model it means nothing (https://github.com/anthropics/claude-code/issues/68900).
"""

MEDIA = ("image", "document", "audio", "video", "file", "container_upload")
"""Blocks that are refused unless they contain text."""

ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""https://docs.anthropic.com/en/api/errors; any other status: `api_error` from 500 on, else `invalid_request_error`."""

CREATED_WITH = ("system", "tools")
"""Fields of a thread's first request that later requests leave out."""

STOPS: Mapping[FinishReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

FINISHED: Mapping[str, FinishReason] = {"stop_sequence": "stop", **{stop: reason for reason, stop in STOPS.items()}}
"""Stop reason → finish reason."""

OPENED: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Kind → the block with which its stream begins."""

DELTAS: Mapping[str, bytes] = {
    "text": b'{"type":"text_delta","text":',
    "thinking": b'{"type":"thinking_delta","thinking":',
    "tool_use": b'{"type":"input_json_delta","partial_json":',
}
"""Kind → the start of its deltas."""


class _Block(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    content: Any = None
    source: Any = None
    title: str | None = None


_Content = str | list[_Block] | None


class _Source(msgspec.Struct):
    data: str | None = None
    content: Any = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Content = None


class _Tool(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _Output(msgspec.Struct):
    format: _Format | None = None


class _Body(msgspec.Struct):
    model: str
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    system: _Content = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    output_config: _Output | None = None
    output_format: _Format | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stop_sequences: Stops | None = None


class AnthropicMessages:
    """See `Dialect`."""

    name = "anthropic.messages"
    id_prefix = "msg_"

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        if path == "/messages":
            return {}
        return {COUNT_ONLY: True} if path == "/messages/count_tokens" else None

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        try:
            parsed = msgspec.convert(_continued(body, past), _Body)
            messages = (*_turns("system", parsed.system), *_history(parsed.messages))
        except (msgspec.ValidationError, RecursionError) as error:
            raise invalid(f"bad request: {error}") from error
        tools = tuple(tool for given in parsed.tools or () if (tool := _tool(given)) is not None)
        tool_choice, tool_name = _tool_choice(parsed.tool_choice, tools)
        output = parsed.output_format or (parsed.output_config.format if parsed.output_config else None)
        return ChatRequest(
            body=body,
            model=parsed.model,
            messages=messages,
            tools=tools,
            tool_choice=tool_choice,
            tool_name=tool_name,
            parallel_tool_calls=not (parsed.tool_choice and parsed.tool_choice.disable_parallel_tool_use),
            json_schema=output.schema if output else None,
            stream=bool(parsed.stream),
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=None if parsed.top_k is None else max(0, parsed.top_k),
            # 0 only fills Anthropic's prefix cache
            max_tokens=None if parsed.max_tokens is None else max(1, parsed.max_tokens),
            stop=tuple(stop for stop in parsed.stop_sequences or () if stop),
            counted=_counted if body.get(COUNT_ONLY) else None,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        [choice] = reply.choices
        return {
            **_empty(reply.id, reply.request),
            "content": _content(choice, reply.request),
            **_stop(choice),
            "usage": _usage(reply),
        }

    def stream(self, begun: Reply) -> EventStream:
        return _Stream(begun)

    def answer(self, response: Mapping[str, Any]) -> Message:
        return _assistant(msgspec.convert(response["content"], list[_Block]))

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        message, counts = self.answer(response), response["usage"]
        read = counts["cache_read_input_tokens"]
        choice = Choice(
            index=0,
            message=replace(message, reply_id=response["id"]),
            finish_reason=FINISHED[response["stop_reason"]],
            stopped_by=response["stop_sequence"],
            completion_tokens=counts["output_tokens"],
            reasoning_tokens=counts["output_tokens_details"]["thinking_tokens"],
            tokens=None,
        )
        return Reply(
            id=response["id"],
            request=request,
            created=0,
            prompt_tokens=read + counts["input_tokens"],
            reused_tokens=read,
            choices=(choice,),
        )

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Of a thread: later requests refer to it."""
        if request.body.get("thread"):
            whole = _continued(request.body, past)
            answer = {"role": "assistant", "content": response["content"]}
            past.conversations[response["id"]] = (*whole["messages"], answer)
            past.items[response["id"]] = {name: whole[name] for name in CREATED_WITH if name in whole}

    def error(self, refused: Refused) -> dict[str, Any]:
        kind = ERRORS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": refused.message}
        if refused.code is not None:
            error["details"] = {"error_code": refused.code}
        return {"type": "error", "error": error, "request_id": None}


class _Stream:
    """`message_start`; start, deltas and stop of each block; `message_delta` (stop reason, usage); `message_stop`."""

    media_type: MediaType = "text/event-stream"

    def __init__(self, begun: Reply) -> None:
        self._begun = begun
        self._thinks = _shows_thinking(begun.request)
        self._began = False
        self._block = -1
        self._kind = ""
        """The kind of the open block; "" if none is open."""
        self._head = b""
        """The start of a delta of the open block."""
        self._has_text = False
        self._stop: dict[str, Any] = {}

    def reasoning(self, index: int, text: str) -> bytes:
        if not text or not self._thinks:
            return self._begin()
        return self._within("thinking") + self._delta(text)

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        if not text:
            return self._begin()
        return self._delta(text) if self._kind == "text" else self._within("text") + self._delta(text)

    def finish(self, choice: Choice) -> bytes:
        self._stop = _stop(choice)
        events = b"" if self._has_text or choice.message.tool_calls else self._within("text")
        for call in choice.message.tool_calls:
            start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            events += self._start("tool_use", start) + self._delta(call.arguments)
        return events + self._end()

    def close(self, reply: Reply) -> bytes:
        return _event("message_delta", {"delta": self._stop, "usage": _usage(reply)}) + _event("message_stop", {})

    def error(self, refused: Refused) -> bytes:
        body = AnthropicMessages().error(refused)
        return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def _begin(self) -> bytes:
        if self._began:
            return b""
        self._began = True
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**_empty(self._begun.id, self._begun.request), "content": [], **stop, "usage": _usage(self._begun)}
        return _event("message_start", {"message": message}) + _event("ping", {})

    def _within(self, kind: Literal["text", "thinking"]) -> bytes:
        """Open a block of that kind, unless it is open."""
        if self._kind == kind:
            return b""
        self._has_text = self._has_text or kind == "text"
        return self._start(kind, OPENED[kind])

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        events = self._begin() + self._end()
        self._block += 1
        self._kind = kind
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % self._block
        self._head = head + DELTAS[kind]
        return events + _event("content_block_start", {"index": self._block, "content_block": block})

    def _delta(self, text: str) -> bytes:
        return self._head + msgspec.json.encode(text) + b"}}\n\n"

    def _end(self) -> bytes:
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": self._begun.id}
            signed = _event("content_block_delta", {"index": self._block, "delta": delta})
        self._kind = ""
        return signed + _event("content_block_stop", {"index": self._block})


def _continued(body: Mapping[str, Any], past: Past) -> Mapping[str, Any]:
    """The request with the earlier turns of its thread. If the thread is not found, the SDK sends all turns again."""
    thread = body.get("thread")
    if not isinstance(thread, Mapping) or thread.get("type") != "continue":
        return body
    previous, turns = str(thread.get("previous_message_id")), body.get("messages")
    if previous not in past.conversations:
        message, hint = f"no thread continues `{previous}`", "send the whole conversation"
        raise Refused(404, message, code="thread_not_found", param="thread", hint=hint)
    messages = [*past.conversations[previous], *(turns if isinstance(turns, list) else ())]
    return {**body, **past.items[previous], "messages": messages}


def _history(messages: Iterable[_Message]) -> list[Message]:
    """One `Message` for each turn. If a client has split an answer into several messages, they are joined."""
    turns: list[Message] = []
    for message in messages:
        if message.role != "assistant":
            turns.extend(_turns(message.role, message.content) or [Message(role=message.role, content="")])
            continue
        answer = _assistant(_blocks(message.content))
        if turns and turns[-1].role == "assistant" and _continues(answer, turns[-1]):
            answer = joined(turns.pop(), answer)
        turns.append(answer)
    return turns


def _continues(answer: Message, before: Message) -> bool:
    return not answer.content or not (before.content or before.tool_calls)


def _turns(role: str, content: _Content) -> list[Message]:
    """Each tool result is a message; the text between two of them is one message."""
    turns: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        text = "\n".join(texts)
        text = BILLING.sub("", text) if role == "system" else text
        if texts and (text or role != "system"):
            turns.append(Message(role=role, content=text))
        texts.clear()

    for block in _blocks(content):
        if block.type != "tool_result":
            texts.extend(_texts(block))
            continue
        end_text()
        result = _text(block.content) or ("error" if block.is_error else "")
        failed = block.is_error is True
        turns.append(Message(role="tool", content=result, tool_call_id=block.tool_use_id, failed=failed))
    end_text()
    return turns


def _assistant(blocks: Iterable[_Block]) -> Message:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    reply_id = None
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
            reply_id = block.signature or reply_id
        elif block.type == "tool_use":
            if not block.id or not block.name:
                raise invalid("a `tool_use` block without `id` or `name`", hint="send it back as it came")
            calls.append(ToolCall(id=block.id, name=block.name, arguments=from_object(block.input)))
        else:
            texts.extend(_texts(block))
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
        reply_id=reply_id if reply_id and reply_id.startswith(AnthropicMessages.id_prefix) else None,
    )


def _blocks(content: _Content) -> list[_Block]:
    return [_Block(text=content)] if isinstance(content, str) else content or []


def _texts(block: _Block) -> list[str]:
    """The readable text of a block. A block that only Anthropic's servers understand has none."""
    if block.type == "text" or block.text:
        return [block.text or ""]
    if block.type == "tool_reference":
        return [block.tool_name or ""]
    source = msgspec.convert(block.source, _Source) if isinstance(block.source, Mapping) else None
    if block.type == "document" and source is not None and block.source.get("type") != "base64":
        found = [source.data] if source.data else [_text(source.content)]
    else:
        found = [_text(block.content)] if isinstance(block.content, str | list) else []
    if block.type in MEDIA and not any(found):
        raise invalid(f"content of type `{block.type}` is not supported", code="unsupported_content", hint="send text")
    return [text for text in (block.title if found else None, *found) if text]


def _text(content: Any) -> str:
    """The text of a tool result, a document, or a newer kind of block."""
    return "\n".join(text for block in _blocks(msgspec.convert(content, _Content)) for text in _texts(block))


def _tool(tool: _Tool) -> dict[str, Any] | None:
    """None for a tool that Anthropic's servers would run: this server cannot."""
    if not tool.name:
        return None
    description, parameters = tool.description, tool.input_schema
    if parameters is None:
        built_in = next((BUILT_IN[name] for name in BUILT_IN if (tool.type or "").startswith(f"{name}_")), None)
        if built_in is None:
            return None
        description, properties, required = built_in
        parameters = {"type": "object", "properties": properties, "required": required}
    return function_tool(tool.name, description=description or "", parameters=parameters, strict=tool.strict or None)


def _tool_choice(choice: _Choice | None, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolChoice, str | None]:
    if choice is None or choice.type == "auto" or (choice.type == "any" and not tools):
        return "auto", None
    if choice.type == "none":
        return "none", None
    if choice.type == "any":
        return "required", None
    if choice.name not in {tool["function"]["name"] for tool in tools}:
        raise invalid(f"`tool_choice` names `{choice.name}`, which is not in `tools`", param="tool_choice")
    return "required", choice.name


def _counted(tokens: int) -> dict[str, Any]:
    return {"input_tokens": tokens}


def _shows_thinking(request: ChatRequest) -> bool:
    """Only on request: an agent that reads `content[0].text` would fail on a thinking block."""
    thinking = request.body.get("thinking")
    if not isinstance(thinking, Mapping):
        return False
    return thinking.get("type") != "disabled" and thinking.get("display") != "omitted"


def _empty(reply_id: str, request: ChatRequest) -> dict[str, Any]:
    return {"id": reply_id, "type": "message", "role": "assistant", "model": request.model}


def _content(choice: Choice, request: ChatRequest) -> list[dict[str, Any]]:
    message = choice.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning and _shows_thinking(request):
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": message.reply_id or ""})
    if message.content or not message.tool_calls:  # also empty text: agents read `content[0].text`
        blocks.append({"type": "text", "text": message.content})
    blocks.extend(
        {"type": "tool_use", "id": call.id, "name": call.name, "input": to_object(call.arguments)}
        for call in message.tool_calls
    )
    return blocks


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.stopped_by is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stopped_by}
    return {"stop_reason": STOPS.get(choice.finish_reason), "stop_sequence": None}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens - reply.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.reused_tokens,
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"thinking_tokens": reply.reasoning_tokens},
    }


def _event(name: str, fields: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **fields}) + b"\n\n"
