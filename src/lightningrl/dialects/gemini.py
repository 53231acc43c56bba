"""Google's Gemini API: `generateContent`, `streamGenerateContent` and `countTokens`.
https://ai.google.dev/api/generate-content

Field names may be in camelCase or snake_case, as protocol buffers allow. Ids of function calls are optional: newer
clients echo them, older ones match a result by name and position, and some keep only the opaque signature of a call.
So the gateway's signatures contain the id.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from lightningrl.arguments import from_object, to_object
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
from lightningrl.dialects.gemini_parts import logprobs, signature, signed, tokens_of
from lightningrl.dialects.gemini_schema import camel, json_schema, lower_types
from lightningrl.messages import Message, ToolCall, joined
from lightningrl.types import FinishReason

PATH = re.compile(
    r"^(?:/.+)?/(?:models|tunedModels|endpoints)/(?P<model>.+):(?P<verb>generateContent|streamGenerateContent|countTokens)$"
)
"""`/models/gemini-3:generateContent`, also below `/projects/…/publishers/google`."""

MODEL, VERB, EVENTS = "model", "verb", "sse"
"""The fields that `match` adds to a body: model and verb of the path, and whether the query has `alt=sse`."""

STATUSES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code; any other status: `INTERNAL` from 500 on, else `INVALID_ARGUMENT`."""

FINISHED = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS"}

MOST_CANDIDATES = 8
"""Google's limit of `candidateCount`."""

SCHEMAS = ("parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")
FREE = frozenset(("args", "response", "labels", "partMetadata", *SCHEMAS))
"""Fields whose keys the agent chooses: they keep their case."""


class _Wire(msgspec.Struct, rename="camel"):
    pass


class _FunctionCall(_Wire):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class _FunctionResponse(_Wire):
    name: str = ""
    id: str | None = None
    response: Any = None
    parts: list[dict[str, Any]] | None = None


class _Code(_Wire):
    code: str = ""
    output: str = ""


class _Part(_Wire):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None
    function_response: _FunctionResponse | None = None
    executable_code: _Code | None = None
    code_execution_result: _Code | None = None
    inline_data: Any = None
    file_data: Any = None


class _Content(_Wire):
    role: str | None = None
    parts: list[_Part] | None = None


class _Declaration(_Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class _Tool(_Wire):
    function_declarations: list[_Declaration] | None = None


class _Calling(_Wire):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class _ToolConfig(_Wire):
    function_calling_config: _Calling | None = None


class _Thinking(_Wire):
    include_thoughts: bool | None = None


class _Generation(_Wire):
    temperature: Temperature | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[float, msgspec.Meta(ge=0, lt=2**63)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop_sequences: Stops | None = None
    candidate_count: Annotated[int, msgspec.Meta(ge=1, le=MOST_CANDIDATES)] | None = None
    seed: int | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    thinking_config: _Thinking | None = None


class _Body(_Wire):
    model: str
    contents: list[_Content] | _Content | str
    system_instruction: _Content | str | None = None
    tools: list[_Tool] | None = None
    tool_config: _ToolConfig | None = None
    generation_config: _Generation | None = None


class Gemini:
    """See `Dialect`."""

    name = "google.gemini"
    id_prefix = "gemini_"

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        found = PATH.match(path)
        if found is None:
            return None
        return {MODEL: found["model"], VERB: found["verb"], EVENTS: "alt=sse" in query.lower().split("&")}

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        wrapped = body.get("generateContentRequest") or body.get("generate_content_request")
        # `countTokens` may wrap a whole request
        given = {**wrapped, MODEL: body.get(MODEL)} if isinstance(wrapped, Mapping) else body
        try:
            parsed = msgspec.convert(_camel(given), _Body, strict=False)  # numbers may come as strings
            declared = [one for tool in parsed.tools or () for one in tool.function_declarations or ()]
            tools = tuple(_function(one) for one in declared)
            config = parsed.generation_config or _Generation()
            wanted = _wanted_schema(config)
        except (msgspec.ValidationError, RecursionError) as error:
            raise invalid(f"bad request: {error}") from error
        tools, tool_choice, tool_name = _choose(tools, parsed.tool_config)
        return ChatRequest(
            body=body,
            model=parsed.model,
            messages=_messages(parsed),
            tools=tools,
            tool_choice=tool_choice,
            tool_name=tool_name,
            json_schema=wanted,
            n=config.candidate_count or 1,
            stream=body.get(VERB) == "streamGenerateContent",
            logprobs=bool(config.response_logprobs),
            top_logprobs=(config.logprobs or 0) if config.response_logprobs else 0,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=None if config.top_k is None else int(config.top_k),
            max_tokens=config.max_output_tokens,
            stop=tuple(stop for stop in config.stop_sequences or () if stop),
            seed=config.seed,
            counted=_counted if body.get(VERB) == "countTokens" else None,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        thoughts = _shows_thoughts(reply.request)
        candidates = [
            _candidate(choice, _parts(choice, thoughts=thoughts), tokens=choice.tokens) for choice in reply.choices
        ]
        return {"candidates": candidates, "usageMetadata": _usage(reply), **_origin(reply)}

    def stream(self, begun: Reply) -> EventStream:
        return _Stream(begun)

    def answer(self, response: Mapping[str, Any]) -> Message:
        content = msgspec.convert(response["candidates"][0]["content"], _Content)
        return _assistant(content.parts or ())[0]

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        message, counts = self.answer(response), response["usageMetadata"]
        [candidate], thoughts = response["candidates"], counts["thoughtsTokenCount"]
        stopped: FinishReason = "tool_calls" if message.tool_calls else "stop"
        scores = candidate.get("logprobsResult")
        choice = Choice(
            index=0,
            message=message,
            finish_reason=stopped if candidate["finishReason"] == FINISHED["stop"] else "length",
            stopped_by=None,
            completion_tokens=counts["candidatesTokenCount"] + thoughts,
            reasoning_tokens=thoughts,
            tokens=None if scores is None else tokens_of(scores),
        )
        return Reply(
            id=response["responseId"],
            request=request,
            created=0,
            prompt_tokens=counts["promptTokenCount"],
            reused_tokens=counts["cachedContentTokenCount"],
            choices=(choice,),
        )

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Nothing: every request has its whole conversation."""

    def error(self, refused: Refused) -> dict[str, Any]:
        status = STATUSES.get(refused.status, "INTERNAL" if refused.status >= 500 else "INVALID_ARGUMENT")
        error: dict[str, Any] = {"code": refused.status, "message": refused.message, "status": status}
        if refused.retry_after_s is not None:
            kind = "type.googleapis.com/google.rpc.RetryInfo"
            error["details"] = [{"@type": kind, "retryDelay": f"{refused.retry_after_s:g}s"}]
        return {"error": error}


class _Stream:
    """Responses, each with the next piece of a candidate; the last has finish reasons, function calls and usage.

    With `alt=sse` they are server-sent events, otherwise the elements of one JSON array.
    """

    def __init__(self, begun: Reply) -> None:
        self._sse = bool(begun.request.body.get(EVENTS))
        self.media_type: MediaType = "text/event-stream" if self._sse else "application/json"
        self._between = b"["
        self._thoughts = _shows_thoughts(begun.request)
        self._origin = _origin(begun)
        self._tail = b"}]," + msgspec.json.encode(self._origin)[1:]
        self._ends: list[dict[str, Any]] = []

    def reasoning(self, index: int, text: str) -> bytes:
        return self._piece(index, b',"thought":true', text, None) if text and self._thoughts else b""

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        return self._piece(index, b"", text, tokens) if text or tokens else b""

    def finish(self, choice: Choice) -> bytes:
        self._ends.append(_candidate(choice, _calls(choice) or [{"text": ""}], tokens=None))
        return b""

    def close(self, reply: Reply) -> bytes:
        last = self._whole({"candidates": self._ends, "usageMetadata": _usage(reply), **self._origin})
        return last if self._sse else last + b"]"

    def error(self, refused: Refused) -> bytes:
        last = self._whole(Gemini().error(refused))
        return last if self._sse else last + b"]"

    def _piece(self, index: int, mark: bytes, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        scores = b"" if tokens is None else b',"logprobsResult":' + msgspec.json.encode(logprobs(tokens))
        head = b'{"candidates":[{"content":{"parts":[{"text":' + msgspec.json.encode(text) + mark
        return self._framed(head + b'}],"role":"model"},"index":%d' % index + scores + self._tail)

    def _whole(self, body: Mapping[str, Any]) -> bytes:
        return self._framed(msgspec.json.encode(body))

    def _framed(self, body: bytes) -> bytes:
        if self._sse:
            return b"data: " + body + b"\n\n"
        framed, self._between = self._between + body, b",\n"
        return framed


def _camel(value: Any) -> Any:
    """`value` with the API's keys in camelCase."""
    if isinstance(value, dict):
        return {(name := camel(key)): inner if name in FREE else _camel(inner) for key, inner in value.items()}
    return [_camel(inner) for inner in value] if isinstance(value, list) else value


def _messages(parsed: _Body) -> tuple[Message, ...]:
    contents = _contents(parsed.contents)
    if not contents:
        raise invalid("`contents` is empty", param="contents", hint="send at least one turn")
    turns = [
        Message(role="system", content=_text(content.parts or ())) for content in _contents(parsed.system_instruction)
    ]
    waiting: list[tuple[str | None, ToolCall]] = []
    for content in contents:
        if content.role not in ("model", "assistant"):
            turns.extend(_turns(content, waiting))
            continue
        answer, calls = _assistant(content.parts or ())
        if turns and turns[-1].role == "assistant":  # the SDK's chats keep each streamed piece as a content of its own
            answer = joined(turns.pop(), answer)
        else:
            waiting = []
        waiting.extend(calls)
        turns.append(answer)
    return tuple(turns)


def _contents(given: list[_Content] | _Content | str | None) -> list[_Content]:
    if isinstance(given, str):
        given = _Content(parts=[_Part(text=given)])
    if given is None:
        return []
    return given if isinstance(given, list) else [given]


def _turns(content: _Content, waiting: list[tuple[str | None, ToolCall]]) -> list[Message]:
    """Each function response is one message, as is the text in between. `waiting`: calls without a response yet."""
    role = "system" if content.role == "system" else "user"
    turns: list[Message] = []
    texts: list[_Part] = []
    for part in content.parts or ():
        if part.function_response is None:
            texts.append(part)
            continue
        if texts:
            turns.append(Message(role=role, content=_text(texts)))
            texts = []
        turns.append(_response(part.function_response, waiting))
    return [*turns, Message(role=role, content=_text(texts))] if texts or not turns else turns


def _response(given: _FunctionResponse, waiting: list[tuple[str | None, ToolCall]]) -> Message:
    """The result of a call, found by its id, otherwise by its name and position."""
    if any("inlineData" in part or "fileData" in part for part in given.parts or ()):
        raise _unsupported("functionResponse.parts")
    call_id = given.id
    for place, (known_id, call) in enumerate(waiting):
        if known_id == given.id if given.id else call.name == given.name:
            call_id = waiting.pop(place)[1].id
            break
    return Message(role="tool", content=_result(given.response), tool_call_id=call_id or None, name=given.name or None)


def _result(response: Any) -> str:
    """SDKs wrap the return value of a function as `{"result": 3}` or `{"output": 3}`."""
    if isinstance(response, Mapping) and len(response) == 1 and (wrapped := {"result", "output"} & set(response)):
        response = response[wrapped.pop()]
    if response is None:
        return ""
    return response if isinstance(response, str) else msgspec.json.encode(response).decode()


def _assistant(parts: Iterable[_Part]) -> tuple[Message, list[tuple[str | None, ToolCall]]]:
    """The message, and its calls with the ids that the client has for them."""
    parts = list(parts)
    calls: list[tuple[str | None, ToolCall]] = []
    for part in parts:
        if (call := part.function_call) is not None:
            call_id = signed(part.thought_signature) or call.id or ""
            calls.append((call.id, ToolCall(id=call_id, name=call.name, arguments=from_object(call.args))))
    message = Message(
        role="assistant",
        content="".join(_texts(part for part in parts if not part.thought)),
        reasoning="".join(_texts(part for part in parts if part.thought)),
        tool_calls=tuple(call for _, call in calls),
    )
    return message, calls


def _text(parts: Iterable[_Part]) -> str:
    return "\n".join(_texts(parts))


def _texts(parts: Iterable[_Part]) -> list[str]:
    texts: list[str] = []
    for part in parts:
        if part.inline_data is not None or part.file_data is not None:
            raise _unsupported("inlineData" if part.file_data is None else "fileData")
        code = part.executable_code and part.executable_code.code
        output = part.code_execution_result and part.code_execution_result.output
        texts.extend(text for text in (part.text, code, output) if text)
    return texts


def _unsupported(kind: str) -> Refused:
    message = f"parts of type `{kind}` are not supported"
    return invalid(message, code="unsupported_content", param="contents", hint="send text")


def _function(declared: _Declaration) -> dict[str, Any]:
    nothing = {"type": "object", "properties": {}}
    parameters = lower_types(declared.parameters_json_schema) or json_schema(declared.parameters or nothing)
    return function_tool(declared.name, description=declared.description or "", parameters=parameters)


def _choose(
    tools: tuple[dict[str, Any], ...], config: _ToolConfig | None
) -> tuple[tuple[dict[str, Any], ...], ToolChoice, str | None]:
    """(tools, tool_choice, tool_name). Tools that the model may not call are left out of the prompt, except with mode
    `NONE`, and with mode `ANY` and one name.
    """
    calling = (config and config.function_calling_config) or _Calling()
    mode = (calling.mode or "AUTO").upper()
    if mode == "NONE" or not tools:
        return tools, "none" if mode == "NONE" else "auto", None
    allowed = calling.allowed_function_names or []
    unknown = [name for name in allowed if name not in {tool["function"]["name"] for tool in tools}]
    if unknown:
        raise invalid(f"`allowedFunctionNames` has `{unknown[0]}`, which is not declared", param="toolConfig")
    if mode == "ANY" and len(allowed) == 1:
        return tools, "required", allowed[0]
    shown = tuple(tool for tool in tools if not allowed or tool["function"]["name"] in allowed)
    return shown, "required" if mode == "ANY" else "auto", None


def _wanted_schema(config: _Generation) -> dict[str, Any] | None:
    if (config.response_mime_type or "application/json") != "application/json":
        return None
    if config.response_json_schema or config.response_schema:
        return lower_types(config.response_json_schema) or json_schema(config.response_schema or {})
    return {"type": "object"} if config.response_mime_type else None


def _counted(tokens: int) -> dict[str, Any]:
    return {"totalTokens": tokens}


def _shows_thoughts(request: ChatRequest) -> bool:
    config = _camel(request.body.get("generationConfig") or request.body.get("generation_config"))
    thinking = config.get("thinkingConfig") if isinstance(config, dict) else None
    return isinstance(thinking, dict) and bool(thinking.get("includeThoughts"))


def _origin(reply: Reply) -> dict[str, Any]:
    return {"modelVersion": reply.request.model, "responseId": reply.id}


def _candidate(choice: Choice, parts: list[dict[str, Any]], *, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": choice.index}
    candidate["finishReason"] = FINISHED.get(choice.finish_reason, "OTHER")
    if choice.tokens:
        candidate["avgLogprobs"] = sum(token.logprob for token in choice.tokens) / len(choice.tokens)
    if tokens is not None:
        candidate["logprobsResult"] = logprobs(tokens)
    return candidate


def _parts(choice: Choice, *, thoughts: bool) -> list[dict[str, Any]]:
    """At least one part: agents read `parts[0]`."""
    message = choice.message
    reasoning = [{"text": message.reasoning, "thought": True}] if thoughts and message.reasoning else []
    text = [{"text": message.content}] if message.content or not message.tool_calls else []
    return [*reasoning, *text, *_calls(choice)]


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "functionCall": {"id": call.id, "name": call.name, "args": to_object(call.arguments)},
            "thoughtSignature": signature(call.id),
        }
        for call in choice.message.tool_calls
    ]


def _usage(reply: Reply) -> dict[str, Any]:
    """Google does not count reasoning as part of the candidates."""
    return {
        "promptTokenCount": reply.prompt_tokens,
        "cachedContentTokenCount": reply.reused_tokens,
        "candidatesTokenCount": reply.completion_tokens - reply.reasoning_tokens,
        "thoughtsTokenCount": reply.reasoning_tokens,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": reply.prompt_tokens}],
    }
