"""An engine that gives the user's answer to one prompt, and leaves everything else to another engine, or to none.

An answer is a text, or JSON as scripts return it (`gateway/scripted.py`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from lightningrl.chat import ChatTemplate
from lightningrl.engine.base import Delta, Engine, Unanswerable
from lightningrl.errors import UserError
from lightningrl.gateway.scripted import ANSWER, MAX_LENGTH, ScriptedEngine, ScriptError, message_of
from lightningrl.types import Call, Sampling, Weights

UNANSWERED = "it was not recorded, and there is no engine"
"""The message for a call that nothing answers. Its `capture_reason` is this."""
FIELDS = {"content", "reasoning", "tool_calls"}


def answer_of(text: str) -> Any:
    """What a script would return for this answer: JSON with such fields, or a list of tool calls; else the text.

    Raises `UserError` for JSON with such fields that is no valid answer.
    """
    found: Any = text
    with suppress(ValueError):
        found = json.loads(text)
    is_answer = isinstance(found, Mapping) and found and not found.keys() - FIELDS
    are_calls = isinstance(found, list) and found and all(isinstance(call, Mapping) for call in found)
    if not (is_answer or are_calls):
        return text
    try:
        message_of(found, name="--answer")
    except ScriptError as error:
        hint = f"give a text, {ANSWER}, or a list of such tool calls"
        raise UserError(f"`--answer` is no valid answer: `{text:.200}`", hint=hint) from error
    return found


def given(answer: Any, *, place: Call, template: ChatTemplate, otherwise: Engine) -> Engine:
    """`otherwise`, but for the first answer to the prompt of `place`, a call of the trunk."""
    script = ScriptedEngine(lambda prompt, messages, tools: answer, template, policy=place.policy, name="--answer")
    return Given(place.prompt_ids.tolist(), script, otherwise=otherwise)


@final
class Given:
    """See `Engine`."""

    def __init__(self, prompt_ids: Sequence[int], answer: Engine, *, otherwise: Engine) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._answer: Engine | None = answer
        self._otherwise = otherwise

    def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        engine = self._otherwise
        if self._answer is not None and tuple(prompt_ids) == self._prompt_ids:
            engine, self._answer = self._answer, None
            sampling = replace(sampling, max_tokens=MAX_LENGTH)  # it is never cut off
        return engine.generate(prompt_ids, sampling=sampling, policy=policy, stream=stream)

    async def load(self, weights: Weights) -> None:
        await self._otherwise.load(weights)

    async def pause(self, *, timeout_s: float = 60.0) -> None:
        await self._otherwise.pause(timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._otherwise.resume()

    async def close(self) -> None:
        await self._otherwise.close()


@final
class NoEngine:
    """See `Engine`. It answers nothing: all answers come from records."""

    async def generate(
        self, prompt_ids: Sequence[int], *, sampling: Sampling, policy: str, stream: bool = False
    ) -> AsyncIterator[Delta]:
        await asyncio.sleep(0)
        for delta in ():
            yield delta
        raise Unanswerable(UNANSWERED)

    async def load(self, weights: Weights) -> None: ...

    async def pause(self, *, timeout_s: float = 60.0) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...
