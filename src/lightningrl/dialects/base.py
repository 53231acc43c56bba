"""The contract of a dialect: it reads requests of one wire format, and writes responses, streams and errors.

path + body → `match`, `parse` → `ChatRequest` → (the gateway samples) → `Reply` → `respond` → body, or `stream` →
events. A dialect knows no engine and no store.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec

from lightningrl.messages import Message
from lightningrl.types import FinishReason

ToolChoice: TypeAlias = Literal["auto", "none", "required"]

TURNS = ("messages", "input", "contents")
"""Fields that hold the conversation, in the bodies of the dialects."""

Temperature: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""Finite: where a number may be written as text, infinity would be accepted."""

Stop: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]
Stops: TypeAlias = Annotated[list[Stop], msgspec.Meta(max_length=64)]
"""Limited, as each sampled token is compared with each stop string. OpenAI takes 4, Google 5."""


class Refused(Exception):
    """A request is refused. Its dialect writes the error body."""

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
        """A word for programs that handle the error."""
        self.param = param
        """The field of the request that caused the error."""
        self.retry_after_s = retry_after_s
        """When to send the request again; None: unknown."""
        self.final = final
        """Tell SDKs not to retry, as they do by default from status 500 on."""


def invalid(
    message: str, *, code: str = "invalid_request", param: str | None = None, hint: str | None = None
) -> Refused:
    """A refusal with status 400."""
    return Refused(400, message, code=code, param=param, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request in no dialect. None: the request does not say."""

    body: Mapping[str, Any]
    """As sent, and as recorded."""
    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Raw prompts, text or token ids, instead of messages: no template is applied. Each gets `n` answers."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """In OpenAI's shape: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""
    tool_choice: ToolChoice = "auto"
    """`none`: the tools stay in the prompt, but a tool call in the answer is text."""
    tool_name: str | None = None
    """With `required`: the one tool that must be called."""
    parallel_tool_calls: bool = True
    """False: at most one tool call in an answer."""
    json_schema: Mapping[str, Any] | None = None
    """The answer must be JSON of this schema ({"type": "object"} for any object)."""
    n: int = 1
    """Answers to sample for each prompt."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with token counts, where the dialect leaves that to the request."""
    logprobs: bool = False
    top_logprobs: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    counted: Callable[[int], dict[str, Any]] | None = None
    """Set for a request that counts the tokens of its prompt, without sampling: count → response body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, as text."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    """(text, logprob) of the likeliest tokens at this position, best first; empty unless requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished answer."""

    index: int
    message: Message
    finish_reason: FinishReason
    stopped_by: str | None
    """The stop string that ended the answer; None: it ended otherwise."""
    completion_tokens: int
    reasoning_tokens: int
    """Part of `completion_tokens`."""
    tokens: tuple[TokenLogprob, ...] | None
    """None unless log-probabilities were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answers to one request."""

    id: str
    request: ChatRequest
    created: int
    """Unix seconds."""
    prompt_tokens: int
    reused_tokens: int
    """The part of `prompt_tokens` that an earlier call of the conversation has read or sampled."""
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
    """One streamed reply. Each method returns the bytes to send next.

    For each choice: `reasoning`*, `text`*, then `finish`; after the last choice `close`, or `error` at any time. The
    first method that needs an open stream, or an open block, sends its opening. `index` is that of the choice.
    """

    media_type: MediaType
    """Comments may keep a stream of server-sent events alive; nothing may stand between the parts of a JSON list."""

    def reasoning(self, index: int, text: str) -> bytes:
        """A piece of the reasoning."""
        ...

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        """A piece of an answer; `text` may be empty, e.g. after a token that is half a character."""
        ...

    def finish(self, choice: Choice) -> bytes:
        """The end of one answer: its tool calls and finish reason. All its text has been sent."""
        ...

    def close(self, reply: Reply) -> bytes:
        """The terminal event. Without it a stream counts as broken."""
        ...

    def error(self, refused: Refused) -> bytes:
        """An error event: the stream breaks here."""
        ...


def function_tool(name: str, **given: Any) -> dict[str, Any]:
    """A tool in the shape of `ChatRequest.tools`. Fields that are None are left out: templates render every field."""
    function = {"name": name, **{field: value for field, value in given.items() if value is not None}}
    return {"type": "function", "function": function}


@dataclass(slots=True)
class Past:
    """Earlier responses of an attempt, for dialects whose requests may refer to them."""

    conversations: dict[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    """Reply id → the items of its conversation, including its own output."""
    items: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Item id → item."""


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str:
        """As recorded in `Call.dialect`."""
        ...

    @property
    def id_prefix(self) -> str:
        """Reply ids begin with it, e.g. `chatcmpl-`."""
        ...

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        """The fields that a POST to `path` (without `/v1`) adds to the body, usually none; None: another's path."""
        ...

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        """`body` has the fields of `match`. Unknown fields are ignored. Raises `Refused` for an invalid request."""
        ...

    def respond(self, reply: Reply) -> dict[str, Any]: ...

    def stream(self, begun: Reply) -> EventStream:
        """`begun` has no choices yet."""
        ...

    def answer(self, response: Mapping[str, Any]) -> Message:
        """The answer in a recorded response of one choice: the inverse of `respond`."""
        ...

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        """The reply in a recorded response of one choice: all of it that `respond` and `stream` show."""
        ...

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Keep what later requests of this attempt may refer to. Most dialects keep nothing."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]: ...
