"""A branch plays back what the calculator worked out, whatever the workbench: the model reads the same."""

import copy
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.trunks import playing, recorded, wish

pytestmark = pytest.mark.asyncio(loop_scope="module")
TASK = {"question": "how much is 37 times 48 less 5", "answer": "1771"}
SCRIPT: list[Any] = [
    {
        "tool_calls": [
            wish("calculator", '{"expression": "37 * 48"}', id="call_a"),
            wish("calculator", '{"expression": "7 / 0"}', id="call_b"),
        ]
    },
    {"tool_calls": [wish("calculator", '{"sum": "1776 - 5"}', id="call_c"), wish("add", "{}", id="call_d")]},
    "1771",
]
"""Two calls in parallel; arguments that do not fit, and a tool that there is not."""


@pytest_asyncio.fixture(loop_scope="module", scope="module", autouse=True)
async def closing(math: Any) -> AsyncIterator[None]:
    yield
    await math.workbench.close()


async def test_recorded_results_take_the_place_of_the_calculator(math: Any, server: Any) -> None:
    server.answers = [*SCRIPT]
    output = await math.agent.run(TASK)
    asked, server.asked, server.answers = server.asked, [], [*SCRIPT]
    with playing(recorded(asked, SCRIPT), tools="never") as playback:
        assert await math.agent.run(TASK) == output
    assert json.dumps(server.asked) == json.dumps(asked)
    assert playback.why_void(succeeded=True) is None

    changed = copy.deepcopy(asked)
    for request in changed:
        for message in request["messages"]:
            if message.get("tool_call_id") == "call_a":
                message["content"] = "this is only in the record"
    server.asked, server.answers = [], [*SCRIPT]
    with playing(recorded(changed, SCRIPT), tools="never"):
        await math.agent.run(TASK)
    assert json.dumps(server.asked) == json.dumps(changed)
    await math.agent.client("math", os.environ["OPENAI_BASE_URL"], "attempt-token").close()
    math.agent.client.cache_clear()
