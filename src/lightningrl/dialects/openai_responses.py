"""OpenAI's `responses`. https://platform.openai.com/docs/api-reference/responses

A request may refer to an earlier response of its attempt, or to one of the response's items. `openai_items` reads and
writes items.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any, Literal

import msgspec

from lightningrl.dialects import openai_items as items
from lightningrl.dialects import openai_wire as wire
from lightningrl.dialects.base import (
    ChatRequest,
    Choice,
    EventStream,
    MediaType,
    Past,
    Refused,
    Reply,
    Temperature,
    TokenLogprob,
    function_tool,
    invalid,
)
from lightningrl.dialects.openai_items import Item
from lightningrl.dialects.openai_wire import encode
from lightningrl.messages import Message, joined
from lightningrl.types import FinishReason

COUNT_ONLY = "count_only"
"""The field that a POST to `/responses/input_tokens` adds to its body."""


class _Tool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: "list[_Tool] | None" = None
    """Of a namespace."""


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] = {}


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Body(msgspec.Struct):
    model: str = ""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    include: list[str] | None = None
    reasoning: _Reasoning | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=wire.MOST_TOP_LOGPROBS)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class OpenAIResponses:
    """See `Dialect`."""

    name = "openai.responses"
    id_prefix = items.ID_PREFIX

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        found = wire.matched(path, "/responses")
        if found is None and (counting := wire.matched(path, "/responses/input_tokens")) is not None:
            return {**counting, COUNT_ONLY: True}
        return found

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        parsed = wire.convert(body, _Body)
        _check(parsed, counting=bool(body.get(COUNT_ONLY)))
        tools, choice, name = wire.choose_tools(parsed.tool_choice, list(_tools(parsed.tools or ())))
        top_logprobs = parsed.top_logprobs or 0
        system = (Message(role="system", content=parsed.instructions),) if parsed.instructions else ()
        return ChatRequest(
            body=body,
            model=parsed.model,
            messages=wire.ended((*system, *items.messages(items.conversation(body, past), past))),
            tools=tools,
            tool_choice=choice,
            tool_name=name,
            parallel_tool_calls=parsed.parallel_tool_calls is not False,
            json_schema=_json_schema(parsed.text),
            stream=bool(parsed.stream),
            logprobs=top_logprobs > 0 or "message.output_text.logprobs" in (parsed.include or ()),
            top_logprobs=top_logprobs,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            max_tokens=parsed.max_output_tokens,
            counted=_counted if body.get(COUNT_ONLY) else None,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        [choice] = reply.choices
        return {
            **_envelope(reply, status=STATUS[choice.finish_reason]),
            "error": BROKEN if choice.finish_reason == "error" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if choice.finish_reason == "length" else None,
            "output": items.output(choice, reply.request, reply.id),
            "usage": _usage(reply),
        }

    def stream(self, begun: Reply) -> EventStream:
        return _Stream(begun)

    def answer(self, response: Mapping[str, Any]) -> Message:
        """One message, also if an upstream's items interleave: reasoning, a message, more reasoning, a call."""
        turns = items.messages(msgspec.convert(response["output"], list[dict[str, Any]]), Past())
        answers = (turn for turn in turns if turn.role == "assistant")
        return reduce(joined, answers, Message(role="assistant", content=""))

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        message, counts = self.answer(response), response["usage"]
        completed: FinishReason = "tool_calls" if message.tool_calls else "stop"
        texts = [item["content"][0] for item in response["output"] if item["type"] == "message"]
        tokens = tuple(token for text in texts for token in wire.tokens_of(text["logprobs"]))
        choice = Choice(
            index=0,
            message=message,
            finish_reason=completed if response["status"] == "completed" else "length",
            stopped_by=None,
            completion_tokens=counts["output_tokens"],
            reasoning_tokens=counts["output_tokens_details"]["reasoning_tokens"],
            tokens=tokens if request.logprobs else None,
        )
        return Reply(
            id=response["id"],
            request=request,
            created=response["created_at"],
            prompt_tokens=counts["input_tokens"],
            reused_tokens=counts["input_tokens_details"]["cached_tokens"],
            choices=(choice,),
        )

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        items.remember(past, request.body, response)

    def error(self, refused: Refused) -> dict[str, Any]:
        return wire.error_body(refused)


class _Stream:
    """Numbered server-sent events: the response begins; items begin, grow and end in turn; the response ends.

    Most events are pieces of text, so all of such an event but its text and number is encoded once.
    """

    media_type: MediaType = "text/event-stream"

    def __init__(self, begun: Reply) -> None:
        self._request = begun.request
        self._reply_id = begun.id
        self._begun = begun
        self._number = 0
        self._items = 0
        """How many items have ended."""
        self._open: Literal["reasoning", "message"] | None = None
        self._thoughts: list[str] = []
        self._waiting: list[TokenLogprob] = []
        """Tokens whose text has not been sent yet."""
        self._head = b""
        """The constant start of a text event; empty until a message begins."""

    def reasoning(self, index: int, text: str) -> bytes:
        events = self._begin()
        self._thoughts.append(text)
        if self._open is None:
            text = "".join(self._thoughts)
            if not text.strip():  # the empty reasoning of a template is no item
                return events
            events += self._begin_reasoning()
        if not text:
            return events
        kind, place = THOUGHT[items.summarised(self._request)]
        return events + self._event(f"response.{kind}_text.delta", {**self._within("rs"), place: 0, "delta": text})

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        if text and self._head and tokens is None and not self._waiting:
            self._number += 1
            return b'%b%b,"logprobs":[],"sequence_number":%d}\n\n' % (self._head, encode(text), self._number - 1)
        events = self._begin()
        self._waiting += tokens or ()
        if not text:
            return events
        events += self._begin_message()
        delta = {**self._part("msg"), "delta": text, "logprobs": wire.shown(self._waiting)}
        self._waiting = []
        return events + self._event("response.output_text.delta", delta)

    def finish(self, choice: Choice) -> bytes:
        events = [self._begin()]
        for item in items.output(choice, self._request, self._reply_id):
            if item["type"] == "message":
                events.append(self._begin_message() + self._end_message(item))
            elif item["type"] != "reasoning":
                events.append(self._end_reasoning() + self._call(item))
        return b"".join([*events, self._end_reasoning()])

    def close(self, reply: Reply) -> bytes:
        response = OpenAIResponses().respond(reply)
        return self._event(f"response.{response['status']}", {"response": response})

    def error(self, refused: Refused) -> bytes:
        """The error stands in three places: at the top level, as in the SDK's types; in `error`, which makes the SDK
        raise; and in the terminal event of the response.
        """
        body = wire.error_body(refused)["error"]
        events = self._begin() + self._event("error", {**body, "type": "error", "error": body})
        code = "rate_limit_exceeded" if refused.status == 429 else "server_error"
        response = {**_envelope(self._begun, status="failed"), "error": {"code": code, "message": refused.message}}
        return events + self._event("response.failed", {"response": response})

    def _begin(self) -> bytes:
        if self._number:
            return b""
        fields = {"response": msgspec.Raw(encode(_envelope(self._begun, status="in_progress")))}  # sent twice
        return self._event("response.created", fields) + self._event("response.in_progress", fields)

    def _begin_reasoning(self) -> bytes:
        self._open = "reasoning"
        item = {**items.reasoning_item("", self._request, self._reply_id, status="in_progress"), "summary": []}
        item.pop("content", None)
        added = self._event("response.output_item.added", {"output_index": self._items, "item": item})
        return added + self._thought_part("added", "")

    def _end_reasoning(self) -> bytes:
        if self._open != "reasoning":
            return b""
        self._open, text = None, "".join(self._thoughts)
        kind, place = THOUGHT[items.summarised(self._request)]
        events = self._event(f"response.{kind}_text.done", {**self._within("rs"), place: 0, "text": text})
        events += self._thought_part("done", text)
        return events + self._end_item(items.reasoning_item(text, self._request, self._reply_id, status="completed"))

    def _thought_part(self, change: Literal["added", "done"], text: str) -> bytes:
        if items.summarised(self._request):
            part = {"summary_index": 0, "part": {"type": "summary_text", "text": text}}
            return self._event(f"response.reasoning_summary_part.{change}", {**self._within("rs"), **part})
        part = {"type": "reasoning_text", "text": text}
        return self._event(f"response.content_part.{change}", {**self._part("rs"), "part": part})

    def _begin_message(self) -> bytes:
        if self._open == "message":
            return b""
        events = self._end_reasoning()
        self._open = "message"
        item = {
            "id": items.item_id("msg", self._reply_id),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        events += self._event("response.output_item.added", {"output_index": self._items, "item": item})
        events += self._event("response.content_part.added", {**self._part("msg"), "part": items.text_part("", None)})
        kind = "response.output_text.delta"
        self._head = f"event: {kind}\ndata: ".encode() + encode({"type": kind, **self._part("msg")})[:-1] + b',"delta":'
        return events

    def _end_message(self, item: Item) -> bytes:
        [part] = item["content"]
        done = {**self._part("msg"), "text": part["text"], "logprobs": part["logprobs"]}
        events = self._event("response.output_text.done", done)
        events += self._event("response.content_part.done", {**self._part("msg"), "part": part})
        self._open, self._head = None, b""
        return events + self._end_item(item)

    def _call(self, item: Item) -> bytes:
        field, kind = CALLS[item["type"]]
        place = {"item_id": item["id"], "output_index": self._items}
        begun = {**item, field: "", "status": "in_progress"}
        added = self._event("response.output_item.added", {"output_index": self._items, "item": begun})
        delta = self._event(f"response.{kind}.delta", {**place, "delta": item[field]})
        done = self._event(f"response.{kind}.done", {**place, "name": item["name"], field: item[field]})
        return added + delta + done + self._end_item(item)

    def _end_item(self, item: Item) -> bytes:
        self._items += 1
        return self._event("response.output_item.done", {"output_index": self._items - 1, "item": item})

    def _within(self, kind: str) -> dict[str, Any]:
        return {"item_id": items.item_id(kind, self._reply_id), "output_index": self._items}

    def _part(self, kind: str) -> dict[str, Any]:
        return {**self._within(kind), "content_index": 0}

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        self._number += 1
        data = encode({"type": kind, **fields, "sequence_number": self._number - 1})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


STATUS = {
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    "error": "failed",
}

BROKEN = {"code": "server_error", "message": "the answer broke"}

CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
"""Type of an item → (field of the arguments, name of the events)."""

THOUGHT = {False: ("reasoning", "content_index"), True: ("reasoning_summary", "summary_index")}
"""Is a summary requested? → (name of the events, name of the index)."""


def _check(parsed: _Body, *, counting: bool) -> None:
    if not parsed.model and not counting:
        raise invalid("the body has no `model`", param="model", hint="name one")
    if parsed.input in (None, []) and parsed.previous_response_id is None and not parsed.instructions:
        raise invalid("the body has no `input`", param="input", hint="send text or items")
    for param, given, hint in (
        ("conversation", parsed.conversation, "send `previous_response_id`, or the whole history"),
        ("prompt", parsed.prompt, "send `instructions` and `input`"),
        ("background", parsed.background, "wait for the answer, or stream it"),
    ):
        if given:
            raise invalid(f"`{param}` is not supported", code="unsupported_parameter", param=param, hint=hint)


def _tools(tools: Iterable[_Tool], namespace: str | None = None) -> Iterator[Mapping[str, Any]]:
    """Without tools that OpenAI's servers would run: this server cannot."""
    for tool in tools:
        if tool.type not in ("function", "custom", "namespace"):
            wire.leave_out(tool.type)
        elif tool.name is None:
            raise invalid(f"a tool of type `{tool.type}` has no `name`", param="tools", hint="give it one")
        elif tool.type == "namespace":
            yield from _tools(tool.tools or (), tool.name)
        else:
            name = items.joined(namespace, tool.name)
            if tool.type == "custom":
                yield wire.custom_tool(name, tool.description)
            else:
                yield function_tool(name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def _json_schema(text: _Text | None) -> Mapping[str, Any] | None:
    wanted = text and text.format
    if wanted is None or wanted.type == "text":
        return None
    return {"type": "object"} if wanted.type == "json_object" else wanted.schema


def _counted(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


def _envelope(reply: Reply, *, status: str) -> dict[str, Any]:
    """A response without output; most fields repeat the request."""
    request, body = reply.request, reply.request.body
    return {
        "id": reply.id,
        "object": "response",
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "created_at": reply.created,
        "model": request.model,
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "max_tool_calls": None,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "service_tier": "default",
        "store": body.get("store") is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": {"type": "text"},
            **{key: value for key, value in (body.get("text") or {}).items() if value is not None},
        },
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [
            {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
            for tool in body.get("tools") or ()
        ],
        "top_logprobs": request.top_logprobs,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": body.get("truncation") or "disabled",
        "user": None,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
