"""Does the example of a difference show its cause?"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightningrl.dialects.base import Past
from lightningrl.dialects.openai_chat import OpenAIChat
from lightningrl.gateway.difference import example
from lightningrl.types import Call, Sampling

CALL = Call(
    id="c0",
    attempt_id="t.1",
    index=0,
    parent_call_id=None,
    agent="m",
    policy="policy",
    policy_version=0,
    dialect="openai.chat",
    request={},
    response={},
    prompt_ids=np.array([], np.int32),
    completion_ids=np.array([], np.int32),
    logprobs=np.array([], np.float32),
    sampling=Sampling(),
    finish_reason="stop",
    capture="rendered",
)
SYSTEM = {"role": "system", "content": "You are a careful agent that answers questions about a database, in short."}
USER = {"role": "user", "content": "which album?"}


def tool(name: str = "search", **given: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **given}}


def asks(name: str, arguments: str, tool_id: str = "x") -> dict[str, Any]:
    call = {"id": tool_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


def told(
    request: dict[str, Any], *bodies: dict[str, Any], used: Collection[int] = (), dialect: str = "openai.chat"
) -> str:
    trunk = [replace(CALL, id=f"c{index}", index=index, request=given) for index, given in enumerate(bodies)]
    unused = {call.id for call in trunk if call.index not in used}
    return example(OpenAIChat().parse(request, Past()), dialect=dialect, trunk=trunk, unused=unused)


LONG = "x" * 100


@pytest.mark.parametrize(
    ("request_", "recorded", "said"),
    [
        (
            body({**SYSTEM, "content": SYSTEM["content"].replace("short", "detail")}, USER),
            body(SYSTEM, USER),
            'message 1 (system) has "…bout a database, in detail." instead of "…bout a database, in short."',
        ),
        (
            body({**USER, "content": f"{LONG}a{LONG}"}),
            body({**USER, "content": f"{LONG}b{LONG}"}),
            f'message 1 (user) has "…{LONG[:20]}a{LONG[:39]}…" instead of "…{LONG[:20]}b{LONG[:39]}…"',
        ),
        (body({**USER, "content": "a\n b"}), body({**USER, "content": "a b"}), 'has "a\\n b" instead of "a b"'),
        (
            body(USER, asks("search", '{"q":1}', "y")),
            body(USER, asks("search", '{"q":2}')),
            'tool calls of message 2 (assistant) has "search({\\"q\\":1})" instead of "search({\\"q\\":2})"',
        ),
        (body(USER, USER), body(USER, asks("f", "{}")), "message 2 is of `user` instead of `assistant`"),
        (body(USER, USER), body(USER), '2 messages instead of 1; message 2 (user) is new: "which album?"'),
        (body(USER), body(USER, USER), '1 message instead of 2; message 2 (user) lacks: "which album?"'),
        (body(USER, tools=[tool(), tool("open")]), body(USER, tools=[tool()]), "it has another tool: `open`"),
        (body(USER, tools=[]), body(USER, tools=[tool()]), "it lacks the tool `search`"),
        (
            body(USER, tools=[tool(description="find")]),
            body(USER, tools=[tool(description="seek")]),
            'the tool `search` has "…rch\\",\\"description\\":\\"find',
        ),
        (
            body(USER, tools=[tool("a"), tool("b")]),
            body(USER, tools=[tool("b"), tool("a")]),
            "its tools have another order: `a, b` instead of `b, a`",
        ),
        ({**body(USER), "model": "n"}, body(USER), "it asks the model `n` instead of `m`"),
        (body(USER, n=3), body(USER, n=2), "it asks for `3` answers instead of `2`"),
        (body(USER), body(USER), "the same messages as in call 1, but its prompt has other tokens"),
    ],
)
def test_an_example_names_the_first_difference(request_: Any, recorded: Any, said: str) -> None:
    found = told(request_, recorded)
    assert said in found and "call 1" in found and "\n" not in found


def test_the_nearest_call_that_is_left_is_compared() -> None:
    others = (body(SYSTEM), body(USER, USER, USER), body(USER, {**USER, "content": "which song?"}))
    request = body(USER, {**USER, "content": "which singer?"})
    assert told(request, *others).endswith('"which singer?" instead of "which song?" (call 3)')
    assert told(request, *others, used=[2]).endswith("(call 2)")


def test_a_request_that_comes_once_more_is_told_apart() -> None:
    assert told(body(USER), body(USER), used=[0]) == "it asks call 1 once more; the record has it once"
    assert told(body(USER), body(USER), body(USER), used=[0, 1]).endswith("has it 2 times")
    assert told(body(SYSTEM), body(USER), used=[0]) == "it calls once more; all 1 recorded calls have been answered"


def test_a_call_whose_answer_broke_is_named() -> None:
    broken = replace(CALL, request=body(USER), capture="incomplete", capture_reason="the client went away")
    request = OpenAIChat().parse(body(USER), Past())
    found = example(request, dialect="openai.chat", trunk=[broken], unused=())
    assert found == "the answer to call 1 broke, so it cannot be given again: the client went away"


def test_another_dialect_is_named() -> None:
    assert told(body(USER), body(USER), dialect="anthropic.messages").startswith("it asks in `anthropic.messages`")
