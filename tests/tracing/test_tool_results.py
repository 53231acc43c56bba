"""Which results of tools does a record have, and which of them does a branch play back?"""

from typing import Any

import pytest

from lightningrl.tracing.tool_results import CALLED_A_MODEL, NO_ID, NOT_IN_A_REQUEST, tool_results
from lightningrl.types import Branch, Call
from tests.trunks import call, wish

PAY = '{"amount": 5}'


def messages(*results: tuple[str, Any]) -> dict[str, Any]:
    """A request with these results: tool call id and content."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "pay"}]
    for tool_call_id, content in results:
        turns.append({"role": "assistant", "tool_calls": [wish("pay", PAY, id=tool_call_id)]})
        turns.append({"role": "tool", "tool_call_id": tool_call_id, "content": content})
    return {"model": "m", "messages": turns}


def asks(*ids: str) -> dict[str, Any]:
    return {"tool_calls": [wish("pay", PAY, id=tool_call_id) for tool_call_id in ids]}


def found(calls: list[Call], at: str | None = None) -> list[tuple[str, str | None, str]]:
    results = tool_results(calls, Branch(attempt_id="trunk.1", call_id=at))
    return [(result.id, result.text, result.missing) for result in results]


TRUNK = [
    call(0, messages(), asks("call_a")),
    call(1, messages(("call_a", " paid\n5 € ")), asks("call_b", "call_c")),
    call(2, messages(("call_a", " paid\n5 € "), ("call_b", ""), ("call_c", "paid")), asks("call_d")),
]


def test_a_result_is_the_text_of_the_first_request_that_has_it() -> None:
    assert found(TRUNK) == [
        ("call_a", " paid\n5 € ", ""),
        ("call_b", "", ""),
        ("call_c", "paid", ""),
        ("call_d", None, NOT_IN_A_REQUEST),
    ]


@pytest.mark.parametrize(("at", "known"), [("c0", []), ("c1", ["call_a"]), ("c2", ["call_a", "call_b", "call_c"])])
def test_a_branch_has_the_results_of_its_played_back_answers_only(at: str, known: list[str]) -> None:
    assert [tool_call_id for tool_call_id, _, _ in found(TRUNK, at)] == known


def test_a_tool_call_without_an_id_of_its_own_is_not_identified() -> None:
    twice = [call(0, messages(), asks("call_0")), call(1, messages(("call_0", "paid")), asks("call_0"))]
    assert found(twice) == [("", None, NO_ID)] * 2
    assert found([call(0, messages(), asks("")), call(1, messages(), "done")]) == [("", None, NO_ID)]


def test_a_result_with_a_picture_is_not_text() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    seen = [call(0, messages(), asks("call_a")), call(1, messages(("call_a", picture)), "done")]
    assert found(seen) == [("call_a", None, NOT_IN_A_REQUEST)]


def test_text_in_parts_is_joined_as_the_model_reads_it() -> None:
    parts = [{"type": "text", "text": "paid "}, {"type": "text", "text": "5"}]
    [first] = found([call(0, messages(), asks("call_a")), call(1, messages(("call_a", parts)), "done")])
    assert first == ("call_a", "paid 5", "")


def test_a_tool_that_may_have_called_a_model_is_not_played_back() -> None:
    """Its inner calls would not come, and the branch would differ."""
    inner = call(1, {"model": "m", "messages": [{"role": "user", "content": "inner"}]}, "yes", parent_call_id=None)
    calls = [call(0, messages(), asks("call_a")), inner, call(2, messages(("call_a", "paid")), "done")]
    assert found(calls) == [("call_a", None, CALLED_A_MODEL)]
    before = call(1, inner.request, "yes", parent_call_id=None, started_at=0.5)
    assert found([calls[0], before, calls[2]]) == [("call_a", "paid", "")]


def test_an_answer_that_broke_has_no_tool_calls() -> None:
    broken = call(0, messages(), asks("call_a"), capture="incomplete")
    assert found([broken, call(1, messages(("call_a", "paid")), "done")]) == []


def test_an_anthropic_result_may_be_marked_as_an_error() -> None:
    use = {"type": "tool_use", "id": "toolu_a", "name": "pay", "input": {"amount": 5}}
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "pay"}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_a", "content": "no money", "is_error": True}
    more = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = {"id": "c0", "type": "message", "role": "assistant", "model": "m", "content": [use]}
    first = call(0, asked, "", dialect="anthropic.messages", response={**answer, "stop_reason": "tool_use"})
    last = call(1, {**asked, "messages": [*asked["messages"], *more]}, "", dialect="anthropic.messages")
    [found] = tool_results([first, last], Branch(attempt_id="trunk.1", call_id=None))
    assert (found.id, found.text, found.failed) == ("toolu_a", "no money", True)
