"""Is every JSON body either answered or refused? A bug here is a 500 of the gateway."""

import copy
import random
from typing import Any

import msgspec
import pytest

from lightningrl.dialects.base import Dialect, Past, Refused, Reply
from lightningrl.dialects.openai_chat import OpenAIChat
from lightningrl.dialects.openai_completions import OpenAICompletions
from lightningrl.dialects.openai_responses import OpenAIResponses

from .begun import begun
from .openai_stand import CALL, TOKENS, says

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {
            "role": "assistant",
            "function_call": {"name": "f", "arguments": "{}"},
            "refusal": "no",
            "reasoning_content": "hm",
        },
    ],
    "tools": [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": {"name": "c"}}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "functions": [FUNCTION],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "x",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "reasoning",
            "id": "rs_x",
            "summary": [{"type": "summary_text", "text": "x"}],
            "encrypted_content": "x",
        },
        {"type": "message", "role": "assistant", "content": "x", "id": "msg_1-0_0"},
        {"type": "function_call", "id": "fc_1-0_0", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "c", "input": "x"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "item_reference", "id": "msg_0-0_0"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "c"},
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "previous_response_id": "resp_0-0",
    "store": True,
    "top_logprobs": 2,
}
COMPLETIONS: dict[str, Any] = {
    "model": "m",
    "prompt": ["x", [1, 2]],
    "n": 2,
    "best_of": 2,
    "logprobs": 1,
    "stop": ["x"],
    "suffix": "",
    "echo": False,
}
SCRAPS: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        10**30,
        0.5,
        1e300,
        "",
        "m",
        "auto",
        "required",
        "function",
        "custom",
        "assistant",
        "tool",
        "message",
        "\u0000é🦊",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1],
        ["x"],
        {"type": "function"},
        {"type": [1]},
        {"name": {}},
        {"id": []},
        {"type": None, "id": "msg_0-0_0"},
    ),
]


VALID = [(OpenAIChat(), CHAT), (OpenAIResponses(), RESPONSES), (OpenAICompletions(), COMPLETIONS)]


@pytest.mark.parametrize(("dialect", "valid"), VALID, ids=["chat", "responses", "completions"])
def test_any_body_is_answered_or_refused(dialect: Dialect, valid: dict[str, Any]) -> None:
    chance, outcomes = random.Random(0), {"answered": 0, "refused": 0}
    for number in range(3000):
        body = copy.deepcopy(valid)
        for _ in range(chance.randrange(4)):
            bend(body, chance)
        past = Past()
        past.conversations["resp_0-0"] = past.items["msg_0-0_0"] = ()  # type: ignore[assignment]
        past.items["msg_0-0_0"] = {"type": "message", "id": "msg_0-0_0", "role": "assistant", "content": "x"}
        try:
            request = dialect.parse(body, past)
        except Refused as refused:
            msgspec.json.encode(dialect.error(refused))
            outcomes["refused"] += 1
            continue
        outcomes["answered"] += 1
        said = says("It is", reasoning="hm", calls=[CALL], tokens=TOKENS if number % 2 else None)
        reply = Reply(id="resp_1-0", request=request, created=7, prompt_tokens=1, reused_tokens=0, choices=(said,))
        response = msgspec.json.decode(msgspec.json.encode(dialect.respond(reply)))
        dialect.remember(past, request, response)
        dialect.answer(response)
        events = dialect.stream(begun(request, "resp_1-0"))
        events.reasoning(0, "hm")
        events.text(0, "It is", said.tokens)
        events.finish(said)
        events.close(reply)
    assert min(outcomes.values()) > 300, outcomes


def bend(body: Any, chance: random.Random) -> None:
    """Insert a random value somewhere in the tree, or remove one."""
    node = body
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = chance.choice(keys)
        below = node[key]
        if isinstance(below, dict | list) and below and chance.random() < 0.7:
            node = below
            continue
        if chance.random() < 0.2:
            del node[key]
        else:
            node[key] = chance.choice(SCRAPS)
        return
