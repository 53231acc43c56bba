"""The parts that OpenAI's endpoints share: paths, errors, `tool_choice`, usage, log-probabilities, stream events."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from lightningrl.dialects.base import (
    ChatRequest,
    Choice,
    Refused,
    Reply,
    Stop,
    Stops,
    Temperature,
    TokenLogprob,
    ToolChoice,
    function_tool,
    invalid,
)
from lightningrl.messages import Message

log = logging.getLogger(__name__)

T = TypeVar("T")

encode = msgspec.json.Encoder().encode

MOST_CHOICES = 128
"""OpenAI's limit of `n`."""

MOST_TOP_LOGPROBS = 20
"""OpenAI's limit of `top_logprobs`."""

AZURE = re.compile(r"/openai(?:/v1)?(?:/deployments/(.+))?")

NOTHING: Mapping[str, Any] = {}


class Part(msgspec.Struct):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """The request fields that chat and completions share."""

    model: str
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    stop: Stop | Stops | None = None
    seed: int | None = None

    def common(self) -> dict[str, Any]:
        """The same as fields of a `ChatRequest`."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return {
            "model": self.model,
            "n": self.n or 1,
            "stream": bool(self.stream),
            "include_usage": self.stream_options is not None and bool(self.stream_options.include_usage),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),  # vLLM's clients write -1 for all
            "stop": tuple(stop for stop in stops if stop),
            "seed": self.seed,
        }


def matched(path: str, endpoint: str) -> Mapping[str, Any] | None:
    """The fields that `path` adds to the body of a request to `endpoint`; None: another endpoint.

    Azure's clients name the model in the path: `/openai/deployments/<model>/chat/completions`.
    """
    if path == endpoint:
        return NOTHING
    found = AZURE.fullmatch(path.removesuffix(endpoint)) if path.endswith(endpoint) else None
    if found is None:
        return None
    return {"model": found[1]} if found[1] else NOTHING


def convert(body: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise invalid(f"bad request: {error}", param=_param(str(error))) from error


def error_body(refused: Refused) -> dict[str, Any]:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if refused.status == 429 else kind
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def text_of(content: str | Sequence[Part] | None, *, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(part, param) for part in content)


def custom_tool(name: str, description: str | None) -> dict[str, Any]:
    """A custom tool takes plain text. Templates know only functions, so it becomes a function of one string."""
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return function_tool(name, description=description, parameters=parameters)


@lru_cache(maxsize=100)  # once for each type
def leave_out(kind: str) -> None:
    """Leave out a tool that OpenAI's servers would run: this server cannot."""
    log.warning("tools of type %r are not served here: agents go without them", kind)


def custom_arguments(text: str) -> str:
    return encode({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """The inverse of `custom_arguments`; arguments in another shape are returned unchanged."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def ended(messages: Sequence[Message]) -> tuple[Message, ...]:
    """OpenAI's models never continue a final assistant message: they answer it with a new one."""
    if not messages or messages[-1].role != "assistant":
        return tuple(messages)
    return (*messages[:-1], replace(messages[-1], ended=True))


def choose_tools(
    choice: Any, tools: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice, str | None]:
    """(tools, tool_choice, tool_name) of a `tool_choice`. It is nested in chat ({"type": "function", "function":
    {"name"}}) and flat in responses.

    With `allowed_tools`, other tools are left out of the prompt, so the model cannot call them.
    """
    if choice in (None, "auto", "none"):
        return tuple(tools), choice or "auto", None
    if choice == "required":
        return _required(tools, None)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    wish = choice.get(kind, choice) if kind in ("function", "custom", "allowed_tools") else None
    if not isinstance(wish, Mapping):
        raise _bad_choice("`tool_choice` cannot be understood", "`auto`, `none`, `required`, or a function by its name")
    if kind != "allowed_tools":
        return _required(tools, str(wish.get("name")))
    allowed = wish.get("tools")
    names = {_allowed_name(tool) for tool in allowed} if isinstance(allowed, list) else set()
    left = [tool for tool in tools if tool["function"]["name"] in names]
    if wish.get("mode") == "required":
        return _required(left, None)
    return tuple(left), "auto", None


class Chunks:
    """The events of a chat or completions stream, around their choices."""

    def __init__(self, begun: Reply, *, kind: str) -> None:
        self._counts = begun.request.include_usage
        self.head = b"data: " + encode(envelope(begun, kind=kind))[:-1]
        self.tail = b',"usage":null}\n\n' if self._counts else b"}\n\n"

    def event(self, choice: Mapping[str, Any]) -> bytes:
        return self.head + b',"choices":[' + encode(choice) + b"]" + self.tail

    def close(self, reply: Reply) -> bytes:
        counts = self.head + b',"choices":[],"usage":' + encode(usage(reply)) + b"}\n\n" if self._counts else b""
        return counts + b"data: [DONE]\n\n"

    def error(self, refused: Refused) -> bytes:
        return b"data: " + encode(error_body(refused)) + b"\n\n"


def envelope(reply: Reply, *, kind: str) -> dict[str, Any]:
    """The fields around the choices of a response, or of one event of a stream."""
    model = reply.request.model
    return {"id": reply.id, "object": kind, "created": reply.created, "model": model, "system_fingerprint": None}


def usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.reused_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": reply.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def reply(
    request: ChatRequest, response: Mapping[str, Any], message: Message, tokens: tuple[TokenLogprob, ...] | None
) -> Reply:
    """The reply in a response of one choice with these `envelope` and `usage`."""
    [choice], counts = response["choices"], response["usage"]
    called = choice["finish_reason"] in ("tool_calls", "function_call")
    return Reply(
        id=response["id"],
        request=request,
        created=response["created"],
        prompt_tokens=counts["prompt_tokens"],
        reused_tokens=counts["prompt_tokens_details"]["cached_tokens"],
        choices=(
            Choice(
                index=0,
                message=message,
                finish_reason="tool_calls" if called else choice["finish_reason"],
                stopped_by=None,
                completion_tokens=counts["completion_tokens"],
                reasoning_tokens=counts["completion_tokens_details"]["reasoning_tokens"],
                tokens=tokens,
            ),
        ),
    )


def tokens_of(shown: Sequence[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    """The inverse of `shown`."""

    def pair(token: Mapping[str, Any]) -> tuple[str, float]:
        return token["token"], token["logprob"]

    return tuple(
        TokenLogprob(text=token["token"], logprob=token["logprob"], top=tuple(map(pair, token["top_logprobs"])))
        for token in shown
    )


def shown(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_shown(token.text, token.logprob), "top_logprobs": [_shown(text, logprob) for text, logprob in token.top]}
        for token in tokens
    ]


def _required(
    tools: Sequence[Mapping[str, Any]], name: str | None
) -> tuple[tuple[Mapping[str, Any], ...], ToolChoice, str | None]:
    if not tools or (name is not None and all(tool["function"]["name"] != name for tool in tools)):
        raise _bad_choice(
            f"`tool_choice` wants {f'`{name}`' if name else 'a tool'}, which is not among `tools`",
            "name a function of `tools`",
        )
    return tuple(tools), "required", name


def _bad_choice(message: str, hint: str) -> Refused:
    return invalid(message, param="tool_choice", hint=hint)


def _allowed_name(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    wish = tool.get(kind, tool) if isinstance(kind, str) else tool
    name = wish.get("name") if isinstance(wish, Mapping) else None
    return name if isinstance(name, str) else None


def _text(part: Part, param: str) -> str:
    if part.type in ("text", "input_text", "output_text", "summary_text", "reasoning_text"):
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    message = f"content of type `{part.type}` is not supported"
    raise invalid(message, code="unsupported_content", param=param, hint="send text")


def _shown(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _param(message: str) -> str | None:
    """`messages` from "Expected `str`, got `int` - at `$.messages[0].content`"."""
    _, found, path = message.partition("`$.")
    return path.rstrip("`").split("[")[0].split(".")[0] if found else None
