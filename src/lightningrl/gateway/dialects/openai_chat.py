"""OpenAI `chat/completions`: the single home of this wire format. https://platform.openai.com/docs/api-reference/chat"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from lightningrl.chat import Message, ToolCall
from lightningrl.gateway.dialects.base import ChatRequest, Choice, EventStream, Refused, Reply, TokenLogprob

MOST_CHOICES = 128
"""OpenAI's own limit of `n`."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Signature(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Signature


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: str | list[str] | None = None
    seed: int | None = None


class OpenAIChat:
    """See `Dialect`."""

    name = "openai.chat"
    paths = ("/chat/completions",)

    def parse(self, body: object) -> ChatRequest:
        try:
            asked = msgspec.convert(body, _Body)
        except msgspec.ValidationError as error:
            raise Refused(400, f"bad request: {error}", code="invalid_request", param=_param(str(error))) from error
        given = body["tools"] if isinstance(body, Mapping) and asked.tools else ()  # as sent: templates render every field of a tool
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
        return ChatRequest(
            model=asked.model,
            messages=tuple(_message(message) for message in asked.messages),
            tools=() if asked.tool_choice == "none" else tuple(given),
            n=asked.n or 1,
            stream=bool(asked.stream),
            include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
            logprobs=bool(asked.logprobs),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=None if asked.top_k is None else max(0, asked.top_k),  # -1 is how vLLM's clients say: all
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            stop=tuple(stop for stop in stops if stop),
            seed=asked.seed,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        return {
            "id": reply.id,
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [_choice(choice) for choice in reply.choices],
            "usage": _usage(reply),
            "system_fingerprint": None,
        }

    def stream(self, request: ChatRequest, *, reply_id: str, created: int) -> EventStream:
        return _Stream(request, reply_id=reply_id, created=created)

    def answer(self, response: Mapping[str, Any]) -> Message:
        message = msgspec.convert(response["choices"][0]["message"], _Message)
        return _message(message)

    def error(self, refused: Refused) -> dict[str, Any]:
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


class _Stream:
    """Server-sent events: role, pieces, finish reason, usage if asked for, `[DONE]`."""

    def __init__(self, request: ChatRequest, *, reply_id: str, created: int) -> None:
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": request.model, "system_fingerprint": None}
        self._include_usage = request.include_usage
        self._opened: set[int] = set()

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        opening = self._open(index)
        return opening + self._chunk(index, {"content": text}, tokens=tokens) if text or tokens else opening

    def finish(self, choice: Choice, rest: str) -> bytes:
        events = self.text(choice.index, rest, None)
        if choice.message.tool_calls:
            calls = [{"index": place, **call} for place, call in enumerate(_tool_calls(choice.message))]
            events += self._chunk(choice.index, {"tool_calls": calls})
        return events + self._chunk(choice.index, {}, finish_reason=choice.finish_reason)

    def close(self, reply: Reply) -> bytes:
        usage = _event({**self._head, "choices": [], "usage": _usage(reply)}) if self._include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def error(self, refused: Refused) -> bytes:
        return _event(OpenAIChat().error(refused))

    def _open(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def _chunk(self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, tokens: Sequence[TokenLogprob] | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": _logprobs(tokens), "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        return _event({**chunk, "usage": None} if self._include_usage else chunk)


def _message(message: _Message) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    calls = message.tool_calls or ()
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=content or "",
        tool_calls=tuple(ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _part(part: _Part) -> str:
    if part.type not in ("text", "refusal"):
        raise Refused(400, f"content of type `{part.type}` is not supported", code="unsupported_content", param="messages", hint="send text")
    return part.text or part.refusal


def _choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content, "refusal": None}
    if choice.message.tool_calls:
        message["content"] = choice.message.content or None
        message["tool_calls"] = _tool_calls(choice.message)
    return {"index": choice.index, "message": message, "logprobs": _logprobs(choice.tokens), "finish_reason": choice.finish_reason}


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    return [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls]


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Of the sampled tokens. `top_logprobs` stays empty: engines report no others."""
    if tokens is None:
        return None
    shown = [{"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []} for t in tokens]
    return {"content": shown, "refusal": None}


def _usage(reply: Reply) -> dict[str, int]:
    completion = sum(choice.completion_tokens for choice in reply.choices)
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": completion, "total_tokens": reply.prompt_tokens + completion}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _param(message: str) -> str | None:
    """`messages` from "Expected `str`, got `int` - at `$.messages[0].content`"."""
    _, found, path = message.partition("`$.")
    return path.rstrip("`").split("[")[0].split(".")[0] if found else None
