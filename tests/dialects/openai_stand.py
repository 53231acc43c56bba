"""OpenAI's real SDK in front of one dialect, without gateway or engine. A test chooses the answers."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
from openai import AsyncOpenAI, OpenAI

from lightningrl.dialects.base import ChatRequest, Choice, Dialect, Past, Refused, Reply, TokenLogprob
from lightningrl.messages import Message, ToolCall
from lightningrl.types import FinishReason

from .begun import begun

USER = {"role": "user", "content": "what is the weather ?"}
CALL = ToolCall(id="call_1", name="weather", arguments='{"city":  "Zürich"}')
TOKENS = (
    TokenLogprob(text="It", logprob=-0.5, top=(("It", -0.5), ("é", -1.5))),
    TokenLogprob(text=" is", logprob=-0.25),
)


def says(
    content: str = "",
    *,
    reasoning: str = "",
    calls: Sequence[ToolCall] = (),
    finish: FinishReason | None = None,
    tokens: tuple[TokenLogprob, ...] | None = None,
    index: int = 0,
) -> Choice:
    return Choice(
        index=index,
        message=Message(role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls)),
        finish_reason=finish or ("tool_calls" if calls else "stop"),
        stopped_by=None,
        completion_tokens=9,
        reasoning_tokens=4 if reasoning else 0,
        tokens=tokens,
    )


class Stand:
    """Answers each request with the next choices. Keeps the requests, and the bodies that were sent."""

    def __init__(self, dialect: Dialect, *answers: Sequence[Choice] | Refused) -> None:
        self.dialect = dialect
        self.answers = list(answers)
        self.past = Past()
        self.asked: list[ChatRequest] = []
        self.sent: list[bytes] = []

    def client(self) -> OpenAI:
        return OpenAI(
            base_url="http://stand/v1",
            api_key="k",
            max_retries=0,
            http_client=httpx2.Client(transport=self.transport()),
        )

    def async_client(self) -> AsyncOpenAI:
        http = httpx2.AsyncClient(transport=self.transport())
        return AsyncOpenAI(base_url="http://stand/v1", api_key="k", max_retries=0, http_client=http)

    def transport(self) -> httpx2.MockTransport:
        return httpx2.MockTransport(self._handle)

    def _handle(self, http: httpx2.Request) -> httpx2.Response:
        added = self.dialect.match(http.url.path.removeprefix("/v1"), "")
        assert added is not None, http.url
        try:
            request = self.dialect.parse({**json.loads(http.read()), **added}, self.past)
        except Refused as refused:
            return httpx2.Response(refused.status, json=self.dialect.error(refused))
        self.asked.append(request)
        if request.counted is not None:
            return httpx2.Response(200, json=request.counted(42))
        data, kind = self._stream(request) if request.stream else (self._whole(request), "application/json")
        self.sent.append(data)
        return httpx2.Response(200, content=data, headers={"content-type": kind})

    def _whole(self, request: ChatRequest) -> bytes:
        reply = self._reply(request)
        body = self.dialect.respond(reply)
        self.dialect.remember(self.past, request, body)
        return json.dumps(body).encode()

    def _stream(self, request: ChatRequest) -> tuple[bytes, str]:
        events = self.dialect.stream(begun(request, self._id()))
        answer = self.answers[0]
        if isinstance(answer, Refused):
            return events.text(0, "It ", None) + events.error(answer), "text/event-stream"
        data = b""
        for choice in answer:
            data += b"".join(events.reasoning(choice.index, piece) for piece in pieces(choice.message.reasoning))
            data += b"".join(
                events.text(choice.index, piece, None)
                for piece in pieces(choice.message.content if choice.tokens is None else "")
            )
            for token in choice.tokens or ():
                data += events.text(choice.index, token.text, [token])
        reply = self._reply(request)
        self.dialect.remember(self.past, request, self.dialect.respond(reply))
        return data + b"".join(map(events.finish, reply.choices)) + events.close(reply), "text/event-stream"

    def _reply(self, request: ChatRequest) -> Reply:
        reply_id, choices = self._id(), self.answers.pop(0)
        assert not isinstance(choices, Refused)
        return Reply(
            id=reply_id, request=request, created=7, prompt_tokens=30, reused_tokens=20, choices=tuple(choices)
        )

    def _id(self) -> str:
        return f"{self.dialect.id_prefix}r_x.1-{len(self.asked) - 1}"


def pieces(text: str) -> list[str]:
    return [text[start : start + 3] for start in range(0, len(text), 3)]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without `[DONE]`."""
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def refused(parse: Callable[[dict[str, Any], Past], ChatRequest], body: dict[str, Any]) -> Refused:
    try:
        parse(body, Past())
    except Refused as refusal:
        return refusal
    raise AssertionError(f"{body} was understood")
