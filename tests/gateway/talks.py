"""A small agent in each dialect, on the real SDK: a conversation with a tool, streaming or not."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anthropic
import openai
from google import genai
from google.genai import types

MODEL = "m"
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TURNS = 4
"""Calls of one conversation at most."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A tool call."""

    id: str
    arguments: Any


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer of the model."""

    text: str
    wishes: Sequence[Wish]
    turns: Sequence[Any]
    """What the next request adds to its messages for it."""


class Talker(Protocol):
    """One dialect. `turns` are the messages as its SDK wants them."""

    def user(self, text: str) -> Any: ...

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        """The messages with the tool's results."""
        ...

    async def ask(self, turns: list[Any]) -> Said: ...

    async def close(self) -> None: ...


async def talk(talker: Talker, text: str) -> str:
    """A conversation until the model wants no tool any more. Returns all that it said."""
    turns, texts = [talker.user(text)], list[str]()
    for _ in range(TURNS):
        said = await talker.ask(turns)
        texts.append(said.text)
        if not said.wishes:
            break
        turns = [*turns, *said.turns, *talker.results([(wish, f"23 in {wish.arguments}") for wish in said.wishes])]
    return " ".join(texts)


class Chat:
    def __init__(self, url: str, token: str, *, stream: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
        self._stream = stream
        self._tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": wish.id, "content": text} for wish, text in results]

    async def ask(self, turns: list[Any]) -> Said:
        completions = self._client.chat.completions
        if self._stream:
            async with completions.stream(model=MODEL, messages=turns, tools=self._tools) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            answer = await completions.create(model=MODEL, messages=turns, tools=self._tools)
            message = answer.choices[0].message
        wishes = [
            Wish(id=call.id, arguments=call.function.arguments)
            for call in message.tool_calls or ()
            if call.type == "function"
        ]
        return Said(text=message.content or "", wishes=wishes, turns=[message])

    async def close(self) -> None:
        await self._client.close()


class Responses:
    def __init__(self, url: str, token: str, *, stream: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
        self._stream = stream
        self._tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": wish.id, "output": text} for wish, text in results]

    async def ask(self, turns: list[Any]) -> Said:
        if self._stream:
            async with self._client.responses.stream(model=MODEL, input=turns, tools=self._tools) as events:
                response = await events.get_final_response()
        else:
            response = await self._client.responses.create(model=MODEL, input=turns, tools=self._tools)
        wishes = [
            Wish(id=item.call_id, arguments=item.arguments) for item in response.output if item.type == "function_call"
        ]
        return Said(
            text=response.output_text, wishes=wishes, turns=[item.to_dict(mode="json") for item in response.output]
        )

    async def close(self) -> None:
        await self._client.close()


class Completions:
    """Raw prompts: a conversation is one text, and a tool is a line of it."""

    def __init__(self, url: str, token: str, *, stream: bool) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
        self._stream = stream

    def user(self, text: str) -> Any:
        return f"{text} :"

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        return [f" {text} :" for _, text in results]

    async def ask(self, turns: list[Any]) -> Said:
        prompt = "".join(turns)
        if self._stream:
            chunks = await self._client.completions.create(model=MODEL, prompt=prompt, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])
        else:
            text = (await self._client.completions.create(model=MODEL, prompt=prompt)).choices[0].text
        wishes = [Wish(id="", arguments="it")] if "weather" in text else []
        return Said(text=text, wishes=wishes, turns=[text])

    async def close(self) -> None:
        await self._client.close()


class Messages:
    def __init__(self, url: str, token: str, *, stream: bool) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=url, api_key=token, max_retries=0)
        self._stream = stream
        self._tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        blocks = [{"type": "tool_result", "tool_use_id": wish.id, "content": text} for wish, text in results]
        return [{"role": "user", "content": blocks}]

    async def ask(self, turns: list[Any]) -> Said:
        asked: Any = {"model": MODEL, "max_tokens": 100, "messages": turns, "tools": self._tools}
        if self._stream:
            async with self._client.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await self._client.messages.create(**asked)
        text = "".join(block.text for block in message.content if block.type == "text")
        wishes = [
            Wish(id=block.id, arguments=json.dumps(block.input))
            for block in message.content
            if block.type == "tool_use"
        ]
        return Said(text=text, wishes=wishes, turns=[{"role": "assistant", "content": message.content}])

    async def close(self) -> None:
        await self._client.close()


class Gemini:
    def __init__(self, url: str, token: str, *, stream: bool) -> None:
        retry = types.HttpRetryOptions(attempts=1)
        self._client = genai.Client(
            api_key=token, http_options=types.HttpOptions(base_url=url, retry_options=retry)
        ).aio
        self._stream = stream
        declared = types.FunctionDeclaration(name="weather", parameters_json_schema=PARAMETERS)
        self._config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])

    def user(self, text: str) -> Any:
        return types.UserContent(text)

    def results(self, results: Sequence[tuple[Wish, str]]) -> list[Any]:
        told = [
            types.Part(function_response=types.FunctionResponse(id=wish.id, name="weather", response={"output": text}))
            for wish, text in results
        ]
        return [types.Content(role="user", parts=told)]

    async def ask(self, turns: list[Any]) -> Said:
        models, asked = self._client.models, {"model": MODEL, "contents": turns, "config": self._config}
        if self._stream:
            chunks = [chunk async for chunk in await models.generate_content_stream(**asked)]
        else:
            chunks = [await models.generate_content(**asked)]
        parts = [part for chunk in chunks for part in chunk.parts or ()]
        wishes = [
            Wish(id=part.function_call.id or "", arguments=json.dumps(part.function_call.args))
            for part in parts
            if part.function_call
        ]
        text = "".join(part.text or "" for part in parts if not part.thought)
        return Said(text=text, wishes=wishes, turns=[types.Content(role="model", parts=parts)])

    async def close(self) -> None:
        await self._client.aclose()


DIALECTS = {
    "openai.chat": Chat,
    "openai.responses": Responses,
    "openai.completions": Completions,
    "anthropic.messages": Messages,
    "google.gemini": Gemini,
}
