"""Do unchanged agents of many frameworks work through the gateway, and is each call captured token by token?

Each case is a small real agent: a tool, two or more calls of a model, a final answer. See docs/gateway.md.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from lightningrl.chat import ChatTemplate, reasons
from lightningrl.dialects.gemini import VERB
from lightningrl.types import Call, Capture

from .conftest import HERE, ROOT, Program, Ran

ZURICH = ["Zürich ❄", 2, True, None]
OSLO = ["Oslo", 3, False, 'say "cold" — é\n']

Link = tuple[Capture, int | None, str | None]
"""Of a call: capture, index of its parent, and reason."""
FRESH: Link = ("rendered", None, None)


def bridged(parent: int) -> Link:
    return "bridged", parent, None


def partly(parent: int, reason: str) -> Link:
    return "partly", parent, reason


def forked(parent: int, reason: str) -> Link:
    return "forked", parent, reason


THREE = (FRESH, bridged(0), bridged(1))
"""Question, tool, answer; then a second question."""
TWO = THREE[:2]
"""Question, tool, answer."""
SAID = ("The forecast is {0}.",)
TWICE = ("The forecast is {0}.", "As I said: {0}.")
BOTH = ("The forecasts are {0} and {1}.",) * 2


@dataclass(frozen=True, kw_only=True)
class Case:
    program: Program
    dialect: str
    calls: tuple[Link, ...]
    tools: tuple[list[Any], ...]
    """The arguments of each tool call."""
    answers: tuple[str, ...]
    """The agent's answers; `{0}` and `{1}` stand for the tool's results."""
    streamed: bool | None
    """Whether its calls stream; None: only some of them."""

    def __str__(self) -> str:
        return self.program.name


def case(
    command: str,
    *,
    calls: tuple[Link, ...] = TWO,
    answers: tuple[str, ...] = SAID,
    tools: tuple[list[Any], ...] = (ZURICH,),
    script: str = "weather",
    dialect: str = "openai.chat",
    streams: bool | None = None,
    venv: str = "agents",
) -> Case:
    """`streams`: whether its calls stream; None: only if the command says `stream`."""
    agent, *words = command.split()
    python = interpreter(venv)
    program = Program(
        name=command.replace(" ", "-"),
        command=(str(python), str(HERE / "agents" / f"{agent}.py"), *words),
        engine=f"scripts:{script}",
        needs=python,
        hint=f"`make .venv-{venv}/ready`; MATRIX_PYTHON and MATRIX_PYTHON_OLDER name others",
    )
    streamed = "stream" in words if streams is None else streams
    return Case(program=program, dialect=dialect, calls=calls, tools=tools, answers=answers, streamed=streamed)


def interpreter(venv: str) -> Path:
    variable = {"agents": "MATRIX_PYTHON", "agents-older": "MATRIX_PYTHON_OLDER"}[venv]
    return Path(os.environ.get(variable) or ROOT / f".venv-{venv}" / "bin" / "python")


def both(command: str, **options: Any) -> list[Case]:
    """The same agent, streaming and not."""
    return [case(command, **options), case(f"{command} stream", **options)]


HANDED = {
    "script": "handoff",
    "calls": (FRESH, forked(0, reasons.TOOLS_CHANGED), bridged(1), bridged(2)),
    "tools": (ZURICH, OSLO),
    "answers": BOTH,
}
FORM = {"script": "structured", "answers": ("{0}",)}
REWRITTEN = (FRESH, forked(0, reasons.ANSWER_REWRITTEN))
"""smolagents rewrites tool calls as text of the answer, which is not what the model sampled."""
REFLECTED = (FRESH, forked(0, reasons.TOOLS_CHANGED), partly(0, reasons.TOOLS_CHANGED))
"""AutoGen reflects without tools, so the prompt begins differently. The next question has the tools again, and the
reflection as text.
"""
RESPONSES = {"dialect": "openai.responses"}
ANTHROPIC: dict[str, Any] = {"dialect": "anthropic.messages"}
GOOGLE = {"dialect": "google.gemini"}

CASES = [
    *both("openai_chat", calls=THREE, answers=TWICE),
    *both("openai_parse", **FORM),
    *both("openai_responses previous", calls=THREE, answers=TWICE, **RESPONSES),
    *both("openai_responses items", calls=THREE, answers=TWICE, **RESPONSES),
    *both("openai_react", script="react", dialect="openai.completions"),
    *both("langgraph_react", calls=THREE, answers=TWICE),
    *both("langgraph_react responses", calls=THREE, answers=TWICE, **RESPONSES),
    *both("langgraph_graph", script="silent"),
    *both("langchain_agent", script="parallel", tools=(ZURICH, OSLO), answers=BOTH[:1]),
    *both("openai_agents_sdk handoff", **HANDED, **RESPONSES),
    *both("openai_agents_sdk handoff chat", **HANDED),
    *both("autogen_assistant", calls=REFLECTED, answers=TWICE),
    *both("autogen_assistant loop", calls=THREE, answers=TWICE),
    *both("autogen_team", script="team", calls=(FRESH, bridged(0), FRESH), answers=("Printed: {0}. DONE",)),
    *both(
        "autogen_team selector", script="team", calls=(FRESH, FRESH, bridged(1), FRESH), answers=("Printed: {0}. DONE",)
    ),
    *both("pydantic_agent chat", **FORM),
    *both("pydantic_agent responses", **FORM, **RESPONSES),
    *both("pydantic_agent anthropic", **FORM, **ANTHROPIC, streams=True),
    *both("pydantic_agent google", **FORM, **GOOGLE),
    *both("smol_agent tools", script="smol", calls=REWRITTEN),
    *both("smol_agent code", script="smol"),
    *both("anthropic_loop", calls=THREE, answers=TWICE, **ANTHROPIC),
    *both("anthropic_runner", **ANTHROPIC),
    *both("gemini_chat", calls=THREE, answers=TWICE, **GOOGLE),
    *both("agent_framework_agent", calls=THREE, answers=TWICE, **RESPONSES),
    *both("agent_framework_agent chat", calls=THREE, answers=TWICE),
    *both("agno_agent", script="silent", venv="agents-older"),
    *both("agno_agent responses", script="silent", venv="agents-older", **RESPONSES),
    *both("haystack_agent"),
    *both("llamaindex_agent", calls=THREE, answers=TWICE, venv="agents-older"),
    *both("litellm_loop openai", venv="agents-older"),
    *both("litellm_loop anthropic", venv="agents-older", **ANTHROPIC),
    *both("mirascope_agent", venv="agents-older", **RESPONSES),
    case("strands_agent openai", calls=THREE, answers=TWICE, venv="agents-older", streams=True),
    case("strands_agent anthropic once", venv="agents-older", streams=True, **ANTHROPIC),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_agent_works_unchanged_and_is_captured_token_by_token(
    case: Case, ran: Callable[[Program], Ran], template: ChatTemplate
) -> None:
    found = ran(case.program)
    assert found.report["exit_code"] == 0, found.log
    codes = [f"{found.code}/{days}" for days in (2, 3)]
    assert sorted(found.printed["TOOL"], key=str) == sorted(case.tools, key=str), found.log
    assert found.printed["ANSWER"] == [answer.format(*codes) for answer in case.answers], found.log
    assert_linked(found.calls, case)
    assert_exact(found, template)
    assert_counted(found, case)


def assert_linked(calls: list[Call], case: Case) -> None:
    """Each call is linked to the call that it continues."""
    names: dict[str | None, int | None] = {None: None, **{call.id: place for place, call in enumerate(calls)}}
    assert [(call.capture, names[call.parent_call_id], call.capture_reason) for call in calls] == list(case.calls)
    for call in calls:
        assert call.dialect == case.dialect
        streamed = bool(call.request.get("stream")) or call.request.get(VERB) == "streamGenerateContent"
        assert case.streamed in (streamed, None)


def assert_exact(found: Ran, template: ChatTemplate) -> None:
    """The ids of a call decode to the script's prompt and answer. A bridged prompt begins with the exact ids of its
    parent, prompt and completion.
    """
    known = {call.id: call for call in found.calls}
    for call in found.calls:
        prompt = template.decode(call.prompt_ids.tolist(), control=True)
        completion = template.decode(call.completion_ids.tolist(), control=True)
        assert_spelled(completion, found.said[prompt])
        assert len(call.logprobs) == len(call.completion_ids) and not call.logprobs.any()
        if call.capture in ("bridged", "partly"):
            parent = known[call.parent_call_id or ""]
            before = np.concatenate((parent.prompt_ids, parent.completion_ids))
            assert np.array_equal(call.prompt_ids[: len(before)], before)
            assert len(call.prompt_ids) > len(before)


def assert_spelled(completion: str, said: dict[str, Any]) -> None:
    """The completion is ChatML with Hermes tool calls: reasoning first, then text, then the exact arguments."""
    thoughts = f"<think>\n{said['reasoning']}\n</think>\n\n" if said.get("reasoning") else ""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in said.get("tool_calls", ())
    ]
    text = said.get("content", "")
    whole = thoughts + "\n".join([text, *calls] if text else calls) + "<|im_end|>"
    if not completion.endswith("<|im_end|>"):  # cut off after a stop string of the request
        assert completion.endswith(("Observation:", "</code>")), completion
        whole = whole[: len(completion)]
    assert completion == whole


def assert_counted(found: Ran, case: Case) -> None:
    """The report of `lightningrl run` agrees with the records."""
    captures = Counter(call.capture for call in found.calls)
    expected = {
        "calls": len(case.calls),
        **{capture: captures[capture] for capture in get_args(Capture)},
        "partly_reasons": dict(Counter(reason for capture, _, reason in case.calls if capture == "partly")),
        "fork_reasons": dict(Counter(reason for capture, _, reason in case.calls if capture == "forked")),
        "incomplete_reasons": {},
        "dialects": {case.dialect: len(case.calls)},
        "attempts": 1,
        "errors": {},
        "sampled_tokens": sum(len(call.completion_ids) for call in found.calls),
        "prompt_tokens": sum(len(call.prompt_ids) for call in found.calls),
    }
    assert {key: found.report[key] for key in expected} == expected
