"""OpenAI's `completions`. https://platform.openai.com/docs/api-reference/completions

Raw prompts, as text or token ids: no template, no tools. Several prompts are answered in their order.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

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
from lightningrl.messages import Message

MOST_PROMPTS = 2048
"""OpenAI's limit."""

MAX_TOKENS = 16
"""OpenAI's default."""

Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Body(wire.SharedFields, kw_only=True):
    prompt: str | Annotated[list[str | Id | list[Id]], msgspec.Meta(min_length=1, max_length=10_000_000)]
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=wire.MOST_TOP_LOGPROBS)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Answer(msgspec.Struct):
    text: str
    echoed: int = 0


class OpenAICompletions:
    """See `Dialect`."""

    name = "openai.completions"
    id_prefix = "cmpl-"

    def match(self, path: str, query: str) -> Mapping[str, Any] | None:
        return None if path.endswith("/chat/completions") else wire.matched(path, "/completions")

    def parse(self, body: Mapping[str, Any], past: Past) -> ChatRequest:
        parsed = wire.convert(body, _Body)
        prompts = _prompts(parsed.prompt)
        _check(parsed, prompts)
        return ChatRequest(
            body=body,
            **parsed.common(),
            prompts=prompts,
            logprobs=parsed.logprobs is not None,
            top_logprobs=parsed.logprobs or 0,
            max_tokens=MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens,
        )

    def respond(self, reply: Reply) -> dict[str, Any]:
        echoed = _echoed(reply.request)
        return {
            **wire.envelope(reply, kind="text_completion"),
            "choices": [_choice(choice, echoed) for choice in reply.choices],
            "usage": wire.usage(reply),
        }

    def stream(self, begun: Reply) -> EventStream:
        return _Stream(begun)

    def answer(self, response: Mapping[str, Any]) -> Message:
        choice = msgspec.convert(response["choices"][0], _Answer)
        return Message(role="assistant", content=choice.text[choice.echoed :])

    def reply(self, request: ChatRequest, response: Mapping[str, Any]) -> Reply:
        scores = response["choices"][0]["logprobs"]
        return wire.reply(request, response, self.answer(response), None if scores is None else _tokens(scores))

    def remember(self, past: Past, request: ChatRequest, response: Mapping[str, Any]) -> None:
        """Nothing: every request has its whole prompt."""

    def error(self, refused: Refused) -> dict[str, Any]:
        return wire.error_body(refused)


class _Stream:
    """Server-sent events: text, finish reason, usage if requested, `[DONE]`.

    All of a text event but its text is encoded once for each choice.
    """

    media_type: MediaType = "text/event-stream"

    def __init__(self, begun: Reply) -> None:
        self._chunks = wire.Chunks(begun, kind="text_completion")
        self.close, self.error = self._chunks.close, self._chunks.error
        self._text_end = b',"logprobs":null,"finish_reason":null}]' + self._chunks.tail
        self._text_begin: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}
        """Characters of each choice so far."""
        self._request = begun.request

    def reasoning(self, index: int, text: str) -> bytes:
        """Raw answers have no separate reasoning: it is text."""
        return self.text(index, text, None)

    def text(self, index: int, text: str, tokens: Sequence[TokenLogprob] | None) -> bytes:
        begin = self._text_begin.get(index)
        if begin is not None and text and tokens is None:
            return begin + encode(text) + self._text_end
        opening = self._open(index)
        return opening + self._chunk(index, text, tokens=tokens) if text or tokens else opening

    def finish(self, choice: Choice) -> bytes:
        return self._open(choice.index) + self._chunk(choice.index, "", finish_reason=choice.finish_reason)

    def _open(self, index: int) -> bytes:
        if index in self._text_begin:
            return b""
        self._text_begin[index] = self._chunks.head + f',"choices":[{{"index":{index},"text":'.encode()
        echoed = _echoed(self._request)
        self._offsets[index] = len(echoed)
        return self._chunk(index, echoed) if echoed else b""

    def _chunk(
        self, index: int, text: str, *, finish_reason: str | None = None, tokens: Sequence[TokenLogprob] | None = None
    ) -> bytes:
        logprobs = _logprobs(tokens, self._offsets[index])
        self._offsets[index] += sum(len(token.text) for token in tokens or ())
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunks.event(choice)


def _prompts(prompt: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(token_id, int) for token_id in prompt):
        return (tuple(prompt),)
    if any(isinstance(one, int) for one in prompt):
        raise invalid("`prompt` mixes token ids with prompts", param="prompt", hint="send texts, or lists of ids")
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompt)


def _check(parsed: _Body, prompts: Sequence[str | tuple[int, ...]]) -> None:
    n = parsed.n or 1
    answers = len(prompts) * n
    too_many = f"`{answers}` answers are requested, at most `{MOST_PROMPTS}` are allowed"
    scored = parsed.echo and parsed.logprobs is not None
    alone = len(prompts) == 1 and isinstance(prompts[0], str)
    for param, wrong, message, hint in (
        ("prompt", not all(prompts), "a prompt is empty", "send at least one token"),
        ("prompt", answers > MOST_PROMPTS, too_many, "send fewer prompts"),
        ("suffix", bool(parsed.suffix), "`suffix` is not supported", "send what comes before"),
        ("best_of", parsed.best_of not in (None, n), "`best_of` is not supported", "request `n` and choose"),
        ("echo", parsed.echo and not alone, "`echo` repeats a single text", "send one prompt, as text"),
        ("echo", scored, "`echo` with `logprobs` is not supported", "prompts have no logprobs here"),
    ):
        if wrong:
            raise invalid(message, param=param, hint=hint)


def _echoed(request: ChatRequest) -> str:
    return str(request.prompts[0]) if request.body.get("echo") else ""


def _choice(choice: Choice, echoed: str) -> dict[str, Any]:
    """The field `echoed` is our addition: how many characters of `text` belong to the prompt."""
    return {
        "index": choice.index,
        "text": echoed + choice.message.content,
        "logprobs": _logprobs(choice.tokens, 0),
        "finish_reason": choice.finish_reason,
        **({"echoed": len(echoed)} if echoed else {}),
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
    """`offset`: how many characters precede these tokens."""
    if tokens is None:
        return None
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    tops = [dict(token.top) for token in tokens] if any(token.top for token in tokens) else None
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _tokens(scores: Mapping[str, Any]) -> tuple[TokenLogprob, ...]:
    """The inverse of `_logprobs`."""
    tops = scores["top_logprobs"] or [{}] * len(scores["tokens"])
    return tuple(
        TokenLogprob(text=text, logprob=logprob, top=tuple(top.items()))
        for text, logprob, top in zip(scores["tokens"], scores["token_logprobs"], tops, strict=True)
    )
