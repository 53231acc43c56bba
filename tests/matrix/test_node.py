"""Do unchanged agents on Node and coding agents work through the gateway, and is each call captured token by token?

The AI SDK in two versions, with each of its providers; Claude Code, Codex and Gemini CLI with their shell tools. See
`test_matrix.py`.
"""

import json
import os
from collections.abc import Callable

import pytest

from lightningrl.chat import ChatTemplate, reasons

from .conftest import HERE, Program, Ran
from .test_matrix import (
    FRESH,
    THREE,
    TWICE,
    TWO,
    ZURICH,
    Case,
    Link,
    assert_counted,
    assert_exact,
    assert_linked,
    bridged,
    forked,
)

NODE = HERE / "node"
READY = NODE / "node_modules" / ".ready"
HINT = "install Node.js 20 or newer with npm, then `make test`; MATRIX_NODE=skip leaves these agents out"
PATH = f"PATH={NODE / 'node_modules' / '.bin'}{os.pathsep}{os.environ.get('PATH', '')}"
QUESTION, AGAIN = "What will the weather be like?", "Say that again, please."

pytestmark = [pytest.mark.skip(reason="MATRIX_NODE=skip")] if os.environ.get("MATRIX_NODE") == "skip" else []

DIALECTS = {
    "responses": "openai.responses",
    "chat": "openai.chat",
    "compatible": "openai.chat",
    "anthropic": "anthropic.messages",
    "google": "google.gemini",
}
"""Provider of the AI SDK → its dialect."""


def sdk(
    words: str,
    *,
    calls: tuple[Link, ...] = TWO,
    answers: tuple[str, ...] = ("{0}",),
    script: str = "scripts_node:structured",
) -> Case:
    """`words` are version, provider and options: `node agent.mjs 7 responses output stream`."""
    version, provider, *rest = words.split()
    command = ("node", str(NODE / "agent.mjs"), version, provider, *rest)
    program = Program(name=f"ai-{words.replace(' ', '-')}", command=command, engine=script, needs=READY, hint=HINT)
    return Case(
        program=program,
        dialect=DIALECTS[provider],
        calls=calls,
        tools=(ZURICH,),
        answers=answers,
        streamed="stream" in rest,
    )


def asked_twice(words: str) -> Case:
    return sdk(words, calls=THREE, answers=TWICE, script="scripts:weather")


def coding(
    name: str,
    *command: str,
    dialect: str,
    calls: tuple[Link, ...] = THREE,
    script: str = "shell",
    route: str = "",
    streamed: bool | None = True,
) -> Case:
    """A question, two shell commands one after the other, an answer."""
    program = Program(
        name=name,
        command=("env", PATH, *command),
        engine=f"scripts_node:{script}",
        flags=("--route", route) if route else (),
        needs=READY,
        hint=HINT,
    )
    return Case(program=program, dialect=dialect, calls=calls, tools=(), answers=("{0} and {1}",), streamed=streamed)


THEN_AN_OBJECT = (*TWO, forked(1, reasons.TOOLS_CHANGED))
"""Question, tool, answer; then an object, for which the SDK sends no tools."""
THEN_AGAIN = (*THREE, bridged(2))
"""Question, command, command, answer; then a second question in another process."""
SDK = [
    *(
        asked_twice(f"{version} {provider}{how}")
        for version in (6, 7)
        for provider in DIALECTS
        for how in ("", " stream")
    ),
    *(sdk(f"7 {provider} output{how}") for provider in DIALECTS for how in ("", " stream")),
    *(sdk(f"7 {provider} object", calls=THEN_AN_OBJECT) for provider in DIALECTS),
    *(sdk(f"6 {provider} output stream") for provider in DIALECTS),
]
CLAUDE = ("claude", "--allowedTools", "Bash,Agent", "-p", QUESTION)
CODEX = ("codex", "--dangerously-bypass-approvals-and-sandbox", "exec", "--skip-git-repo-check")
ANTHROPIC, RESPONSES, GOOGLE = "anthropic.messages", "openai.responses", "google.gemini"
STREAM_JSON = coding("claude-stream-json", *CLAUDE, "--output-format", "stream-json", "--verbose", dialect=ANTHROPIC)
ERRAND = coding(
    "claude-errand",
    *CLAUDE,
    dialect=ANTHROPIC,
    script="errand",
    route="model=claude-haiku*,policy=frozen",
    calls=(FRESH, FRESH, bridged(1), bridged(0)),
)
CODING = [
    coding("claude", *CLAUDE, dialect=ANTHROPIC),
    STREAM_JSON,
    coding(
        "claude-continue",
        "sh",
        "-c",
        '"$@" && claude --continue -p "$0"',
        AGAIN,
        *CLAUDE,
        dialect=ANTHROPIC,
        calls=THEN_AGAIN,
    ),
    ERRAND,
    coding("codex", *CODEX, QUESTION, dialect=RESPONSES),
    coding(
        "codex-resume",
        "sh",
        "-c",
        '"$@" && codex exec resume --skip-git-repo-check --last "$0"',
        AGAIN,
        *CODEX,
        QUESTION,
        dialect=RESPONSES,
        calls=THEN_AGAIN,
    ),
    coding(
        "gemini",
        "sh",
        str(NODE / "gemini.sh"),
        "--yolo",
        "-p",
        QUESTION,
        dialect=GOOGLE,
        streamed=None,
        calls=(FRESH, FRESH, bridged(1), bridged(2)),
    ),
]
"""Gemini CLI first asks a smaller model, without streaming, which model to use."""


@pytest.mark.parametrize("case", SDK, ids=str)
def test_an_agent_of_the_ai_sdk_works_unchanged(
    case: Case, ran: Callable[[Program], Ran], template: ChatTemplate
) -> None:
    found = ran(case.program)
    assert found.report["exit_code"] == 0, found.log
    assert found.printed["TOOL"] == list(case.tools), found.log
    assert found.printed["ANSWER"] == [answer.format(f"{found.code}/2") for answer in case.answers], found.log
    assert_captured(found, case, template)


@pytest.mark.parametrize("case", CODING, ids=str)
def test_a_coding_agent_works_unchanged(case: Case, ran: Callable[[Program], Ran], template: ChatTemplate) -> None:
    found = ran(case.program)
    assert found.report["exit_code"] == 0, found.log
    codes = [f"{found.code}/1", f"{found.code}/2"]
    assert (found.folder / "trace.txt").read_text().split() == codes, found.log
    assert any(" and ".join(codes) in line for line in found.lines), found.log
    assert_captured(found, case, template)


@pytest.mark.parametrize(
    "case", [sdk("7 responses object", calls=THEN_AN_OBJECT), asked_twice("6 responses stream")], ids=str
)
def test_items_that_the_ai_sdk_only_refers_to_are_known(case: Case, ran: Callable[[Program], Ran]) -> None:
    """The SDK does send references, so the cases above test them."""
    for call in ran(case.program).calls[1:]:
        assert "item_reference" in {item.get("type") for item in call.request["input"]}


@pytest.mark.parametrize("case", [STREAM_JSON], ids=str)
def test_claude_code_streams_json(case: Case, ran: Callable[[Program], Ran]) -> None:
    found = ran(case.program)
    events = [json.loads(line) for line in found.lines if line]
    assert events[0]["type"] == "system"
    assert (events[-1]["type"], events[-1]["is_error"], events[-1]["num_turns"]) == ("result", False, 3)
    assert events[-1]["result"] == f"It printed {found.code}/1 and {found.code}/2."
    assert events[-1]["usage"]["output_tokens"] == found.report["sampled_tokens"]


@pytest.mark.parametrize("case", [ERRAND], ids=str)
def test_a_subagent_of_claude_code_is_routed_away(case: Case, ran: Callable[[Program], Ran]) -> None:
    assert [call.policy for call in ran(case.program).calls] == ["policy", "frozen", "frozen", "policy"]


def assert_captured(found: Ran, case: Case, template: ChatTemplate) -> None:
    assert_linked(found.calls, case)
    assert_exact(found, template)
    assert_counted(found, case)
