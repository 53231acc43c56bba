"""Is a played-back answer the same byte for byte, in every dialect, as a stream and whole?"""

import asyncio
from typing import Any

import httpx2
import pytest

from lightningrl.types import Attempt, Branch, Rollout, Task

from .conftest import Stage

WISH = '<tool_call>\n{"name": "f", "arguments": {"a":  "é🦊"}}\n</tool_call>'
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT, TOOL, THOUGHT = "hello é🦊 world", f"let me see {WISH}{WISH}", f"<think>\nwell, é\n</think>\n\nyes{WISH}"
ASKED = {"role": "user", "content": "say a word"}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CHAT = {"model": "m", "messages": [ASKED], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSES = {"model": "m", "input": "say a word", "tools": [{"type": "function", **FUNCTION}]}
CLAUDE = {"model": "m", "messages": [ASKED], "max_tokens": 50, "tools": [{"name": "f", "input_schema": SCHEMA}]}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "say"}]}], "tools": [{"functionDeclarations": [FUNCTION]}]}
COMPLETIONS = {"model": "m", "prompt": "say a word", "max_tokens": 50}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True}),
    ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "parallel_tool_calls": False, "stop": ["world", "see"]}),
    ("/v1/chat/completions", {"model": "m", "messages": [ASKED], "functions": [FUNCTION], "stream": True}),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", {**RESPONSES, "stream": True}),
    ("/v1/responses", {**RESPONSES, "stream": True, "include": ["message.output_text.logprobs"]}),
    ("/v1/responses", {**RESPONSES, "stream": True, "reasoning": {"summary": "auto"}}),
    ("/v1/messages", CLAUDE),
    ("/v1/messages", {**CLAUDE, "stream": True}),
    ("/v1/messages", {**CLAUDE, "stream": True, "stop_sequences": ["world", "see"]}),
    ("/v1beta/models/m:generateContent", GEMINI),
    ("/v1beta/models/m:streamGenerateContent", GEMINI),
    ("/v1beta/models/m:streamGenerateContent?alt=sse", GEMINI),
    ("/v1beta/models/m:generateContent", {**GEMINI, "generationConfig": {"candidateCount": 2}}),
    ("/v1beta/models/m:generateContent", {**GEMINI, "generationConfig": {"responseLogprobs": True, "logprobs": 1}}),
    ("/v1/completions", {**COMPLETIONS, "logprobs": 1}),
    ("/v1/completions", {**COMPLETIONS, "stream": True}),
    ("/v1/completions", {**COMPLETIONS, "stream": True, "prompt": ["x", "y"], "logprobs": 1}),
]


async def answers(stage: Stage, attempt: Attempt) -> list[tuple[bytes, dict[str, str]]]:
    """The bytes of the answers to all requests, and their headers."""
    found: list[tuple[bytes, dict[str, str]]] = []
    async with httpx2.AsyncClient(headers={"x-api-key": attempt.token}) as client:
        for path, body in REQUESTS:
            answer = await client.post(f"{stage.url}{path}", json=body)
            assert answer.status_code == 200, answer.text
            found.append((answer.content, {name: value for name, value in answer.headers.items() if name != "date"}))
    return found


@pytest.mark.parametrize("text", [TEXT, TOOL, THOUGHT, ""], ids=["text", "tool", "thought", "nothing"])
async def test_a_played_back_answer_has_the_same_bytes(stage: Stage, text: str) -> None:
    trunk = await stage.begin("trunk")
    stage.says(text)
    live = await answers(stage, trunk)
    await stage.store.finish(trunk.id, "succeeded")
    task = Task(id="t", input={}, split="train")
    branch = Branch(attempt_id=trunk.id, call_id=None)
    await stage.store.enqueue([Rollout(id="branch", group_id="g", task=task, branch=branch)])
    [(_, attempt)] = await stage.store.claim("w", limit=1, lease_s=60)
    stage.says("never")
    await asyncio.sleep(1.0 - asyncio.get_running_loop().time() % 1.0)  # another second: `created` tells them
    for request, now, was in zip(REQUESTS, await answers(stage, attempt), live, strict=True):
        assert now == was, request
    trunk_calls, calls = await stage.calls(trunk), await stage.calls(attempt)
    assert [call.replays for call in calls] == [call.id for call in trunk_calls]
    assert [call.response for call in calls] == [call.response for call in trunk_calls]
