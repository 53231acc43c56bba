"""What a dialect is: how one wire format asks, answers, streams and complains. It knows no engine and no store.

path + body → `match`, `parse` → `ChatRequest` → (the gateway samples) → `Reply` → `respond` → body, or piece by piece
through `stream`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec

from lightningrl.messages import Message
from lightningrl.types import FinishReason

ToolChoice: TypeAlias = Literal["auto", "none", "required"]

Temperature: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""Finite: where numbers may come as text, infinity is one of them."""

Stop: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]
Stops: TypeAlias = Annotated[list[Stop], msgspec.Meta(max_length=64)]
"""Each token that is sampled is compared with each of them. OpenAI takes 4, Google 5."""


class Refused(Exception):
    """A request that gets no answer; the dialect says so in its own shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        hint: str | None = None,
        retry_after_s: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = f"{message}; hint: {hint}" if hint else message
        self.code = code
        """A word that programs can tell errors apart by."""
        self.param = param
        """The field of the request that is to blame."""
        self.retry_after_s = retry_after_s
        """When to ask again; None: nobody knows."""
        self.final = final
        """SDKs are told not to ask again, which they would do from 500 on."""


def invalid(
    message: str, *, code: str = "invalid_request", param: str | None = None, hint: str | None = None
) -> Refused:
    """The refusal of a request that cannot be understood or served: status 400."""
    return Refused(400, message, code=code, param=param, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks for, in no dialect. None: it did not say."""

    body: Mapping[str, Any]
    """As it was sent, and as it is recorded."""
    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Raw prompts, text or token ids, in place of messages: no template is applied. Each gets `n` answers."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI's chat writes them: {"type": "function", "function": {"name", "description", "parameters", "strict"}}.
    """
    tool_choice: ToolChoice = "auto"
    """`none`: the tools stay in the prompt, and what looks like a tool call is text."""
    tool_name: str | None = None
    """With `required`: the one tool that must be called."""
    parallel_tool_calls: bool = True
    """False: one tool call in an answer at most."""
    json_schema: Mapping[str, Any] | None = None
    """The answer must be JSON of this schema ({"type": "object"} for any object)."""
    n: int = 1
    """Answers to draw for each prompt."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with token counts, where the dialect leaves that open."""
    logprobs: bool = False
    top_logprobs: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    counted: Callable[[int], dict[str, Any]] | None = None
    """Set: nothing is to be sampled; this makes the body that says how many tokens the prompt has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, shown."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """(text, logprob) of the likeliest tokens at its place, best first; empty unless they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished answer."""

    index: int
    message: Message
    finish_reason: FinishReason
    stopped_by: str | None
    """The stop string that ended it; None: something else did."""
    completion_tokens: int
    reasoning_tokens: int
    """Of `completion_tokens`."""
    tokens: tuple[TokenLogprob, ...] | None
    """None unless logprobs were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All that is to be answered."""

    id: str
    request: ChatRequest
    created: int
    """Unix seconds."""
    prompt_tokens: int
    reused_tokens: int
    """Of `prompt_tokens`: those that an earlier call of the conversation has read or said."""
    choices: tuple[Choice, ...]

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """Of all choices; part of `completion_tokens`."""
        return sum(choice.reasoning_tokens for choice in self.choices)


MediaType: TypeAlias = Literal["text/event-stream", "application/json"]


class EventStream(Protocol):
    """One streamed reply. Each verb returns the bytes to send, in the order of the calls.

    For each choice: `reasoning`*, `text`*, then `finish`; at the end of all `close`, or `error` at any time. What opens
    a stream or one of its blocks is sent by the first verb that needs it. `index` is that of the choice.
    """

    media_type: MediaType
    """Comments keep a stream of server-sent events alive; nothing may come between the parts of a JSON list."""

    def reasoning(self, index: int, text: str) -> bytes:
        """A piece of thinking."""
        ...

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        """A piece of an answer; `text` may be empty (e.g. half a character has been sampled)."""
        ...

    def finish(self, choice: Choice) -> bytes:
        """The end of one answer: tool calls, finish reason. All its text has been sent."""
        ...

    def close(self, reply: Reply) -> bytes:
        """The terminal event. Without it a stream counts as broken."""
        ...

    def error(self, refused: Refused) -> bytes:
        """The stream breaks here."""
        ...


def function_tool(name: str, **given: Any) -> dict[str, Any]:
    """A tool in the shape of `ChatRequest.tools`. Fields that are None are left out: templates render every field."""
    function = {"name": name, **{field: value for field, value in given.items() if value is not None}}
    return {"type": "function", "function": function}


@dataclass(slots=True)
class Past:
    """What a dialect with a memory on the server's side may be referred back to: one for each attempt."""

    conversations: dict[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    """Reply id → the items of its conversation, its own output included."""
    items: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Item id → item."""


class Dialect(Protocol):
    @property
    def name(self) -> str:
        """As recorded in `Call.dialect`."""
        ...

    @property
    def id_prefix(self) -> str:
        """Reply ids begin with it, e.g. `chatcmpl-`."""
        ...

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        """The fields that a POST to `path` (without `/v1`) adds to the body, most often none; None if the path is not
        this dialect's.
        """
        ...

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        """Raises `Refused` for what cannot be understood. Unknown fields are ignored. `body` has the fields of `match`."""
        ...

    def respond(self, reply: Reply) -> dict[str, Any]: ...

    def stream(self, begun: Reply) -> EventStream:
        """`begun` has no choices yet."""
        ...

    def answer(self, response: Mapping[str, Any]) -> Message:
        """What was said in a recorded response (of one choice): the inverse of `respond`."""
        ...

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Keep what later requests of this attempt may refer to. Most dialects have no memory: they do nothing."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]: ...
