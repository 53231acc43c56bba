"""What a dialect is: how one wire format asks, answers, streams and complains. It knows no engine and no store.

body → `parse` → `ChatRequest` → (the gateway samples) → `Reply` → `respond` → body, or piece by piece through `stream`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightningrl.chat import Message
from lightningrl.types import FinishReason


class Refused(Exception):
    """A request that gets no answer; the dialect says so in its own shape."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = f"{message}; hint: {hint}" if hint else message
        self.code = code
        """A word that programs can tell errors apart by."""
        self.param = param
        """The field of the request that is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks for, in no dialect. None: it did not say."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI writes them: {"type": "function", "function": {"name", "description", "parameters"}}."""
    n: int = 1
    """Answers to draw."""
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with token counts."""
    logprobs: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, shown."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished answer."""

    index: int
    message: Message
    finish_reason: FinishReason
    completion_tokens: int
    tokens: tuple[TokenLogprob, ...] | None
    """None unless logprobs were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All that is to be answered."""

    id: str
    model: str
    created: int
    """Unix seconds."""
    prompt_tokens: int
    choices: tuple[Choice, ...]


class EventStream(Protocol):
    """One streamed reply. Each verb returns the bytes to send, in the order of the calls."""

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        """A piece of an answer. The first piece may have to open the stream first."""
        ...

    def finish(self, choice: Choice, rest: str) -> bytes:
        """The end of one answer: text held back so far, tool calls, finish reason."""
        ...

    def close(self, reply: Reply) -> bytes:
        """The terminal event. Without it a stream counts as broken."""
        ...

    def error(self, refused: Refused) -> bytes:
        """The stream breaks here."""
        ...


class Dialect(Protocol):
    @property
    def name(self) -> str:
        """As recorded in `Call.dialect`."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths to POST to, without `/v1`, e.g. `/chat/completions`."""
        ...

    def parse(self, body: object) -> ChatRequest:
        """Raises `Refused` for what cannot be understood. Unknown fields are ignored."""
        ...

    def respond(self, reply: Reply) -> dict[str, Any]: ...

    def stream(self, request: ChatRequest, *, reply_id: str, created: int) -> EventStream: ...

    def answer(self, response: Mapping[str, Any]) -> Message:
        """What was said in a recorded response: the inverse of `respond`."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]: ...
