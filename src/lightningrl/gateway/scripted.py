"""A function stands in for the model: prompt ids → text, messages, tools → script → answer → token ids.

Scripts try out an agent, and the whole training loop around it, without a model. Their answers are tokenized through a
chat template, so the records look like those of a real run. Every token has the log-probability 0: a script is certain.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeAlias

from lightningrl.chat import ChatTemplate
from lightningrl.chat.encoder import LONG
from lightningrl.dialects.base import ChatRequest
from lightningrl.engine.base import Delta
from lightningrl.engine.stop import StopFinder
from lightningrl.errors import EngineError
from lightningrl.gateway.threads import in_thread
from lightningrl.messages import Message, ToolCall
from lightningrl.types import FinishReason, Sampling, Weights

Script: TypeAlias = Callable[..., Any]
"""`script(prompt, messages, tools)`, plain or `async`.

`prompt` is the prompt as text, control tokens included. `messages` and `tools` are those of the request, in OpenAI's
chat format (arguments of tool calls as JSON text); a raw prompt has no messages. A script with a parameter
`response_format` gets the JSON format that the request demands, in any dialect; None: any text.

It returns a text; or `{"content": …, "reasoning": …, "tool_calls": [{"name": …, "arguments": …}]}`, each optional, with
arguments as a dict or as JSON text, which is kept byte for byte; or a list of such tool calls.
"""

PLAIN = Path(__file__).parents[1] / "chat" / "plain"
"""Tokenizer and chat template for scripts that stand in for no particular model."""

MAX_LENGTH = 1_000_000
"""Context length for scripts, in tokens: they have no limit of their own."""

ANY_OBJECT = {"type": "object"}
ANSWER = '{"content": …, "reasoning": …, "tool_calls": [{"name": …, "arguments": …}]}'

current_request: ContextVar[ChatRequest | None] = ContextVar("lightningrl_request", default=None)
"""The request that the engine is answering; None: no agent sent one, there is only a prompt."""


def no_model(prompt: str, messages: object, tools: object) -> str:
    """A script for runs whose routes all lead to other servers. A request that no such route fits has no answer."""
    raise ValueError("no route of this request leads to a model")


class ScriptError(EngineError):
    """A script raised, or returned no valid answer. Repeating the request would not help."""


class ScriptedEngine:
    """See `Engine`. It does not check answers against `Sampling.grammar`."""

    def __init__(self, script: Script, template: ChatTemplate, *, policy: str = "policy", name: str = "") -> None:
        """`name`: the script's name in errors; empty: its own."""
        self._script = script
        self._template = template
        self._policy = policy
        self._name = name or getattr(script, "__name__", type(script).__name__)
        self._takes_format = _takes_format(script)
        self._stops = StopFinder(template.decode)
        self._version = 0
        self._running = 0
        self._closed = False
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        if policy != self._policy:
            raise EngineError(f"unknown policy `{policy}`", hint=f"this engine serves `{self._policy}`")
        while not self._open.is_set():
            await self._open.wait()
        if self._closed:
            raise EngineError("the engine is closed")
        self._running += 1
        self._idle.clear()
        try:
            ids, reason = self._until_stopped(await self._answer(prompt_ids), sampling)
            pieces = [ids[place : place + 1] for place in range(len(ids))] if stream and ids else [ids]
            for place, piece in enumerate(pieces):
                await asyncio.sleep(0)  # a stream without a reader is cancelled here
                yield Delta(
                    token_ids=piece,
                    logprobs=(0.0,) * len(piece),
                    policy_version=self._version,
                    finish_reason=reason if place == len(pieces) - 1 else None,
                    top=tuple(((token_id, 0.0),) for token_id in piece) if sampling.top_logprobs else None,
                )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def load(self, weights: Weights) -> None:
        self._version = weights.version

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        self._open.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError as error:
            self._open.set()
            message = f"`{self._running}` answers have not ended within {timeout_s:g} s"
            raise EngineError(message, hint=f"does `{self._name}` hang?") from error

    async def resume(self) -> None:
        self._open.set()

    async def close(self) -> None:
        self._closed = True
        self._open.set()

    async def _answer(self, prompt_ids: Sequence[int]) -> list[int]:
        """The token ids of the script's answer."""
        request = current_request.get()
        messages = request.messages if request else ()
        tools = request.tools if request else ()
        named: dict[str, Any] = {}
        if self._takes_format:
            schema = request.json_schema if request else None
            named["response_format"] = None if schema is None else _format(schema)
        decode = self._template.decode
        if len(prompt_ids) <= LONG:
            prompt = decode(prompt_ids, control=True)
        else:
            prompt = await in_thread(decode, prompt_ids, control=True)
        arguments = (prompt, [shown(message) for message in messages], [dict(tool) for tool in tools])
        try:
            returned = await _call(self._script, *arguments, **named)
        except Exception as error:  # a script may raise anything
            raise ScriptError(f"script `{self._name}` raised {_told(error)}") from error
        message = message_of(returned, name=self._name)
        if not messages and not message.tool_calls:
            end = self._template.turn_end_id
            return self._template.encode(message.content) + ([] if end is None else [end])
        return self._template.answer_ids(message, messages=messages, tools=tools)

    def _until_stopped(self, ids: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
        """The answer up to the first stop string, stop token or the token limit, and which of them ended it."""
        for length, token_id in enumerate(ids, start=1):
            begun = tuple(ids[:length])
            if token_id in sampling.stop_token_ids or (sampling.stop and self._stops.found(begun, sampling.stop)):
                return begun, "stop"
            if length == sampling.max_tokens:
                return begun, "length"
        return tuple(ids), "stop"


def message_of(returned: Any, *, name: str) -> Message:
    """The answer of the script `name` as a message. Raises `ScriptError` if it is no valid one."""
    answer: Any = returned
    if isinstance(answer, str):
        answer = {"content": answer}
    elif isinstance(answer, list | tuple):
        answer = {"tool_calls": answer}
    try:
        if not isinstance(answer, Mapping) or answer.keys() - {"content", "reasoning", "tool_calls"}:
            raise TypeError(f"`{answer!r:.200}`")
        content, reasoning = _text(answer.get("content")), _text(answer.get("reasoning"))
        calls = tuple(_tool_call(call) for call in answer.get("tool_calls") or ())
        return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"script `{name}` returned no valid answer: {_told(error)}"
        raise ScriptError(message, hint=f"return a text, {ANSWER}, or a list of such tool calls") from error


async def _call(script: Script, *arguments: Any, **named: Any) -> Any:
    """Call a script: `async def` in this event loop, anything else in a thread, because it may block."""
    if inspect.iscoroutinefunction(script) or inspect.iscoroutinefunction(type(script).__call__):
        return await script(*arguments, **named)
    result = await in_thread(script, *arguments, **named)
    return await result if inspect.isawaitable(result) else result


def _takes_format(script: Script) -> bool:
    try:
        return "response_format" in inspect.signature(script).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        return False


def _format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The `response_format` of OpenAI's chat."""
    if schema == ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema)}}


def shown(message: Message) -> dict[str, Any]:
    """A message in OpenAI's chat format."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        turn["reasoning"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    call = call.get("function", call)  # OpenAI's chat nests it
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(id="", name=_text(call["name"]), arguments=_text(text))


def _text(value: object) -> str:
    if not isinstance(value, str | None):
        raise TypeError(f"`{value!r:.200}` is no text")
    (value or "").encode()  # raises for half a surrogate pair
    return value or ""


def _told(error: BaseException) -> str:
    return f"`{type(error).__name__}`: {error}"
