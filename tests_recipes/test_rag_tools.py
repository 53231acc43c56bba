"""A branch plays back what search found, in this process or over MCP: no search runs, and the model reads the same."""

import copy
from typing import Any

import pytest

from lightningrl.dialects.base import Past
from lightningrl.dialects.openai_responses import OpenAIResponses
from tests.trunks import playing, recorded, wish


@pytest.mark.parametrize("where", ["local", "mcp"])
async def test_recorded_results_take_the_place_of_searches(
    rag: Any, server: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("RAG_SEARCH", where)
    question = next(q for q in rag.tasks.questions("heldout", seed=0, count=20) if len(q.chain) == 3)
    task = rag.tasks.as_task(question, "x")["input"]
    script = [
        {"tool_calls": [wish("search", '{"query": "boss of ada"}', id="call_a"), wish("search", "{}", id="call_b")]},
        {"tool_calls": [wish("search", '{"query": "boss of bob"}', id="call_c")]},
        "<answer> tom hale </answer>",
    ]
    server.answers = [*script]
    output = await rag.agent.run(task)
    asked, server.asked, server.answers = server.asked, [], [*script]
    with playing(recorded(asked, script, dialect="openai.responses"), tools="never") as playback:
        assert await rag.agent.run(task) == output
    assert [read(request) for request in server.asked] == [read(request) for request in asked]
    assert playback.why_void(succeeded=True) is None

    changed = copy.deepcopy(asked)
    for request in changed:
        for item in request["input"]:
            if item.get("call_id") == "call_a" and item["type"] == "function_call_output":
                item["output"] = "this is only in the record"
    server.asked, server.answers = [], [*script]
    with playing(recorded(changed, script, dialect="openai.responses"), tools="never"):
        await rag.agent.run(task)
    assert [read(request) for request in server.asked] == [read(request) for request in changed]


def read(request: Any) -> Any:
    """What the model reads. Over MCP a result comes in parts, and is played back as one text."""
    return OpenAIResponses().parse(request, Past()).messages
