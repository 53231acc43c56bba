"""Tool spans that are derived from recorded calls: the real SDK of each dialect, over a real socket."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from lightningrl.tracing import spans_of
from lightningrl.types import Attempt, Span

from .conftest import Stage

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
ASKS = """<tool_call>
{"name": "weather", "arguments": {"city":  "Oslo"}}
</tool_call>
<tool_call>
{"name": "time", "arguments": {}}
</tool_call>"""
RAISED = "ValueError: no such city"


async def tools(stage: Stage, attempt: Attempt) -> list[Span]:
    found = spans_of(await stage.calls(attempt))
    assert [span.call_id for span in found if span.kind == "llm"] == [call.id for call in await stage.calls(attempt)]
    return [span for span in found if span.kind == "tool"]


async def openai_chat(url: str, key: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    offered: Any = [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")
    ]
    messages: list[Any] = [{"role": "user", "content": "say a word"}]
    said = (await client.chat.completions.create(model="m", messages=messages, tools=offered)).choices[0].message
    first, second = said.tool_calls or []
    messages += [
        said,
        {"role": "tool", "tool_call_id": second.id, "content": "12:00"},
        {"role": "tool", "tool_call_id": first.id, "content": RAISED},
    ]
    for _ in range(2):
        said = (await client.chat.completions.create(model="m", messages=messages, tools=offered)).choices[0].message
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "again"}]
    await client.close()


async def openai_responses(url: str, key: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
    offered: Any = [
        {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name in ("weather", "time")
    ]
    said = await client.responses.create(model="m", input="say a word", tools=offered)
    ids = [item.call_id for item in said.output if item.type == "function_call"]
    told: Any = [
        {"type": "function_call_output", "call_id": i, "output": text}
        for i, text in zip(ids, (RAISED, "12:00"), strict=True)
    ]
    for _ in range(2):
        said = await client.responses.create(model="m", input=told, tools=offered, previous_response_id=said.id)
        told = [{"role": "user", "content": "again"}]
    await client.close()


async def anthropic_messages(url: str, key: str) -> None:
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key)
    offered: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "time")]
    messages: list[Any] = [{"role": "user", "content": "say a word"}]
    said = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=offered)
    first, second = (block.id for block in said.content if block.type == "tool_use")
    told = [
        {"type": "tool_result", "tool_use_id": first, "content": [{"type": "text", "text": RAISED}], "is_error": True},
        {"type": "tool_result", "tool_use_id": second, "content": "12:00"},
    ]
    messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": told}]
    for _ in range(2):
        said = await client.messages.create(model="m", max_tokens=99, messages=messages, tools=offered)
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "again"}]
    await client.close()


async def google_gemini(url: str, key: str) -> None:
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url))
    declared: Any = [{"name": name, "parameters_json_schema": PARAMETERS} for name in ("weather", "time")]
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=declared)])
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="say a word")])]
    said = await client.aio.models.generate_content(model="m", contents=contents, config=config)
    told = [types.Part.from_function_response(name="weather", response={"error": RAISED})]
    told += [types.Part.from_function_response(name="time", response={"result": "12:00"})]
    contents += [said.candidates[0].content, types.Content(role="user", parts=told)]  # type: ignore[index]
    for _ in range(2):
        said = await client.aio.models.generate_content(model="m", contents=contents, config=config)
        contents += [said.candidates[0].content, types.Content(role="user", parts=[types.Part(text="again")])]  # type: ignore[index]
    await client.aio.aclose()


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
@pytest.mark.parametrize(
    "agent", [openai_chat, openai_responses, anthropic_messages, google_gemini], ids=lambda agent: agent.__name__
)
async def test_each_tool_call_is_one_span_however_often_its_result_is_sent(stage: Stage, agent: Any) -> None:
    attempt = await stage.begin()
    stage.says(ASKS, "red", "green")
    await agent(stage.url, attempt.token)
    weather, clock = await tools(stage, attempt)
    calls = await stage.calls(attempt)
    assert [(s.name, s.status, s.call_id) for s in (weather, clock)] == [
        ("weather", "error", calls[0].id),
        ("time", "unset", calls[0].id),
    ]
    assert json.loads(weather.input or "") == {"city": "Oslo"} and clock.input == "{}"
    assert weather.error == RAISED and weather.attributes["exception.type"] == "ValueError" and clock.output == "12:00"
    assert (weather.started_at, weather.ended_at) == (calls[0].ended_at, calls[1].started_at)
    if agent in (openai_chat, openai_responses):
        assert weather.input == '{"city":  "Oslo"}', "byte for byte, where the wire keeps it"


async def test_results_of_interleaved_sub_agents_stay_separate(stage: Stage) -> None:
    attempt = await stage.begin()
    client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=attempt.token)
    offered: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    stage.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    histories: dict[str, list[Any]] = {
        name: [{"role": "user", "content": f"you pick one colour {name}"}] for name in "AB"
    }
    for turn in range(3):
        for name, history in histories.items():
            said = (
                (await client.chat.completions.create(model=name, messages=history, tools=offered)).choices[0].message
            )
            [asked] = said.tool_calls or []
            history += [said, {"role": "tool", "tool_call_id": asked.id, "content": f"{name}{turn}"}]
    await client.close()
    found = await tools(stage, attempt)
    by_id = {call.id: call for call in await stage.calls(attempt)}
    assert [(by_id[s.call_id or ""].agent, s.output) for s in found] == [
        ("A", "A0"),
        ("B", "B0"),
        ("A", "A1"),
        ("B", "B1"),
    ]
    assert [by_id[s.call_id or ""].index for s in found] == [0, 1, 2, 3]


async def test_functions_without_ids_are_matched_within_their_conversation(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.says('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    histories: dict[str, list[Any]] = {name: [{"role": "user", "content": f"pick another one {name}"}] for name in "AB"}
    async with httpx.AsyncClient(
        base_url=f"{stage.url}/v1", headers={"authorization": f"Bearer {attempt.token}"}
    ) as client:
        for turn in range(3):
            for name, history in histories.items():
                body = {
                    "model": name,
                    "messages": history,
                    "functions": [{"name": "weather", "parameters": PARAMETERS}],
                }
                said = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
                history += [said, {"role": "function", "name": "weather", "content": f"{name}{turn}"}]
    by_id = {call.id: call for call in await stage.calls(attempt)}
    found = [
        (by_id[span.call_id or ""].agent, by_id[span.call_id or ""].index, span.output)
        for span in await tools(stage, attempt)
    ]
    assert found == [("A", 0, "A0"), ("B", 1, "B0"), ("A", 2, "A1"), ("B", 3, "B1")]


async def test_a_tool_call_that_cannot_be_read_is_a_failed_tool(stage: Stage) -> None:
    attempt = await stage.begin()
    client = openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key=attempt.token)
    offered: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    stage.says(
        '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>', "<tool_call> is how it is done"
    )
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say a word"}], tools=offered)
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say a word"}])
    await client.close()
    [broken] = await tools(stage, attempt)
    assert (broken.name, broken.status, broken.attributes["lightningrl.malformed"]) == ("weather", "error", True)
    assert broken.call_id == (await stage.calls(attempt))[0].id


async def test_a_broken_answer_requests_no_tools(stage: Stage) -> None:
    attempt = await stage.begin()
    stage.says(ASKS)
    stage.engine.error = RuntimeError("gone")
    async with httpx.AsyncClient(
        base_url=f"{stage.url}/v1", headers={"authorization": f"Bearer {attempt.token}"}
    ) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": "say a word"}], "tools": []}
        assert (await client.post("/chat/completions", json=body)).status_code == 503
    [only] = spans_of(await stage.calls(attempt))
    assert (only.kind, only.status) == ("llm", "error") and "gone" in (only.error or "")
