"""What if a function is the model? prompt ids → text, messages, tools → script → answer → the ids a model would have
sampled for it.

For trying an agent, and the whole way around it, without a model: what the script says is tokenised through the model's
own template, so all that is recorded has the form of a real run. Every token has the logprob 0, the certainty of a
script.
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
"""`script(prompt, messages, tools)`, plain or `async`: the prompt as text with its control tokens, and what it was made
from, as OpenAI's chat writes it (arguments of tool calls as JSON text). Of a raw prompt the messages are empty. A
script with a parameter `response_format` is told, by name, which JSON the agent demands, whatever its dialect; None:
any text.

It returns a text; or `{"content": …, "reasoning": …, "tool_calls": [{"name": …, "arguments": …}]}`, each of them
optional, with arguments as a dict or as JSON text that is kept byte for byte; or a list of such tool calls.
"""

PLAIN = Path(__file__).parents[1] / "chat" / "plain"
"""Tokenizer and chat template for scripts that stand in for no model in particular."""

MAX_LENGTH = 1_000_000
"""Context length for scripts, in tokens: they have no limit of their own."""

ANY_OBJECT = {"type": "object"}

current_request: ContextVar[ChatRequest | None] = ContextVar("lightningrl_request", default=None)
"""What the agent has asked for, while an engine answers it; None: nobody did, the prompt is all there is."""


class ScriptError(EngineError):
    """A script raised, or returned what is no answer. It would do so again."""


class ScriptedEngine:
    """See `Engine`. Whether an answer is valid under `Sampling.grammar` is up to the script."""

    def __init__(self, script: Script, template: ChatTemplate, *, policy: str = "policy", name: str = "") -> None:
        """`name` is what errors call the script; empty: its own."""
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
                await asyncio.sleep(0)  # a stream that nobody reads any more is cancelled here
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
            raise EngineError(
                f"`{self._running}` answers have not ended within {timeout_s:g} s", hint=f"does `{self._name}` hang?"
            ) from error

    async def resume(self) -> None:
        self._open.set()

    async def close(self) -> None:
        self._closed = True
        self._open.set()

    async def _answer(self, prompt_ids: Sequence[int]) -> list[int]:
        """The ids that say what the script says."""
        request = current_request.get()
        messages = request.messages if request else ()
        tools = request.tools if request else ()
        decode = self._template.decode
        prompt = (
            decode(prompt_ids, control=True)
            if len(prompt_ids) <= LONG
            else await in_thread(decode, prompt_ids, control=True)
        )
        try:
            said = await _call(
                self._script,
                prompt,
                [shown(message) for message in messages],
                [dict(tool) for tool in tools],
                **self._wishes(),
            )
        except Exception as error:  # a script may raise anything
            raise ScriptError(f"script `{self._name}` raised {_told(error)}") from error
        message = self._message(said)
        if not messages and not message.tool_calls:
            end = self._template.turn_end_id
            return self._template.encode(message.content) + ([] if end is None else [end])
        return self._template.answer_ids(message, messages=messages, tools=tools)

    def _wishes(self) -> dict[str, Any]:
        """What the script is told by name."""
        if not self._takes_format:
            return {}
        request = current_request.get()
        return {
            "response_format": None if request is None or request.json_schema is None else _format(request.json_schema)
        }

    def _message(self, said: Any) -> Message:
        """Raises `ScriptError` for what is no answer."""
        if isinstance(said, str):
            said = {"content": said}
        elif isinstance(said, list | tuple):
            said = {"tool_calls": said}
        try:
            if not isinstance(said, Mapping) or said.keys() - {"content", "reasoning", "tool_calls"}:
                raise TypeError(f"`{said!r:.200}`")
            calls = tuple(_tool_call(wish) for wish in said.get("tool_calls") or ())
            return Message(
                role="assistant",
                content=_text(said.get("content")),
                reasoning=_text(said.get("reasoning")),
                tool_calls=calls,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            hint = 'return a text, {"content": …, "reasoning": …, "tool_calls": [{"name": …, "arguments": …}]}, or a list of such tool calls'
            raise ScriptError(f"script `{self._name}` returned what is no answer: {_told(error)}", hint=hint) from error

    def _until_stopped(self, ids: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], FinishReason]:
        """What a model that is made to say this is let say, and why no more."""
        for length, token_id in enumerate(ids, start=1):
            if token_id in sampling.stop_token_ids or (
                sampling.stop and self._stops.found(ids[:length], sampling.stop)
            ):
                return tuple(ids[:length]), "stop"
            if length == sampling.max_tokens:
                return tuple(ids[:length]), "length"
        return tuple(ids), "stop"


async def _call(script: Script, *arguments: Any, **named: Any) -> Any:
    """`async def` in this event loop, anything else in a thread of its own: it may take its time."""
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
    """As OpenAI's chat writes it."""
    if schema == ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema)}}


def shown(message: Message) -> dict[str, Any]:
    """A message as OpenAI's chat writes it."""
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


def _tool_call(wish: Mapping[str, Any]) -> ToolCall:
    wish = wish.get("function", wish)  # as OpenAI's chat nests it
    arguments = wish.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return ToolCall(id="", name=_text(wish["name"]), arguments=_text(text))


def _text(value: object) -> str:
    if not isinstance(value, str | None):
        raise TypeError(f"`{value!r:.200}` is no text")
    (value or "").encode()  # half a surrogate pair is no text either
    return value or ""


def _told(error: BaseException) -> str:
    return f"`{type(error).__name__}`: {error}"
