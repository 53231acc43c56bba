"""Does the tree splice or fork as docs/token-exact.md says? For every template, and every change by a client."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import reasons
from lightningrl.messages import Message, ToolCall
from tests.chat.zookeeper import NAMES, Attempt, attempt

DOCS = Path(__file__).parents[2] / "docs" / "token-exact.md"
SPLICED, EARLIER, RENDERED = "spliced", "spliced after an earlier answer", "rendered"

SYSTEM = Message(role="system", content="be brief")
USER = Message(role="user", content="say a word")
MORE = Message(role="user", content="and another one")
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "add")
)


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A conversation with two answers. The client may change the second one when it sends it back."""

    before: list[Message]
    """System message, question, first answer, and the next message."""
    answer: Message
    after: list[Message]
    """The messages after the second answer."""
    tools: tuple[dict[str, Any], ...] = ()
    raw: str = ""
    """All the text of the second answer."""


def partly(reason: str) -> str:
    return f"{EARLIER}: {reason}"


Request = tuple[list[Message], tuple[dict[str, Any], ...]]


def sent(talk: Talk, **changes: Any) -> Request:
    """The next request, with these changes to the answer."""
    return [*talk.before, replace(talk.answer, **changes), *talk.after], talk.tools


def arguments(talk: Talk, text: str) -> Request:
    return sent(talk, tool_calls=tuple(replace(call, arguments=text) for call in talk.answer.tool_calls))


def system_moved(talk: Talk) -> Request:
    return [replace(talk.before[0], role="developer"), *talk.before[1:], talk.answer, *talk.after], talk.tools


TEXT: dict[str, tuple[Callable[[Talk], Request], str]] = {
    "sends everything back as it came": (sent, SPLICED),
    "trims white space": (lambda t: sent(t, content=t.answer.content.strip()), SPLICED),
    "drops the thoughts": (lambda t: sent(t, reasoning=""), SPLICED),
    "puts the name of an agent to the answer": (lambda t: sent(t, name="writer"), SPLICED),
    "calls the system message `developer`": (system_moved, SPLICED),
    "puts a system message after the answer": (
        lambda t: ([*t.before, t.answer, replace(SYSTEM, content="hurry"), *t.after], t.tools),
        SPLICED,
    ),
    "edits the last answer": (lambda t: sent(t, content="something else"), partly(reasons.ANSWER_REWRITTEN)),
    "edits the thoughts of the last answer": (
        lambda t: sent(t, reasoning="I know better"),
        partly(reasons.ANSWER_REWRITTEN),
    ),
    "adds a tool call to the last answer": (
        lambda t: (
            [
                *t.before,
                replace(t.answer, tool_calls=(ToolCall(id="x", name="look", arguments="{}"),)),
                replace(MORE, role="tool", tool_call_id="x"),
            ],
            t.tools,
        ),
        partly(reasons.ANSWER_REWRITTEN),
    ),
    "puts text behind the last answer": (
        lambda t: sent(t, content=f"{t.answer.content} (so I said)"),
        partly(reasons.ANSWER_EXTENDED),
    ),
    "leaves the last answer out": (lambda t: ([*t.before, *t.after], t.tools), EARLIER),
    "puts a system message before the last answer": (
        lambda t: ([*t.before, replace(SYSTEM, content="hurry"), t.answer, *t.after], t.tools),
        partly(reasons.HISTORY_INSERTED),
    ),
    "clears what came before the last answer": (
        lambda t: ([*t.before[:-1], replace(MORE, content="[cleared]"), t.answer, *t.after], t.tools),
        partly(reasons.HISTORY_REWRITTEN),
    ),
    "edits all answers": (
        lambda t: (
            [*t.before[:2], replace(t.answer, content="x"), MORE, replace(t.answer, content="y"), *t.after],
            t.tools,
        ),
        reasons.ANSWER_REWRITTEN,
    ),
    "edits the first answer": (
        lambda t: ([*t.before[:2], replace(t.answer, content="x"), MORE, t.answer, *t.after], t.tools),
        reasons.HISTORY_REWRITTEN,
    ),
    "edits the system message": (
        lambda t: ([replace(SYSTEM, content="be long"), *t.before[1:], t.answer, *t.after], t.tools),
        reasons.HISTORY_REWRITTEN,
    ),
    "edits an earlier question": (
        lambda t: ([SYSTEM, replace(USER, content="say two"), *t.before[2:], t.answer, *t.after], t.tools),
        reasons.HISTORY_REWRITTEN,
    ),
    "drops the oldest messages": (
        lambda t: ([SYSTEM, *t.before[3:], t.answer, *t.after], t.tools),
        reasons.HISTORY_DROPPED,
    ),
    "drops the system message": (lambda t: ([*t.before[1:], t.answer, *t.after], t.tools), reasons.HISTORY_DROPPED),
    "inserts messages before the first answer": (
        lambda t: (
            [
                SYSTEM,
                replace(USER, content="hello"),
                Message(role="assistant", content="hi"),
                *t.before[1:],
                t.answer,
                *t.after,
            ],
            t.tools,
        ),
        reasons.HISTORY_INSERTED,
    ),
    "replaces the history by a summary": (
        lambda t: ([SYSTEM, replace(USER, content="so far: a word was said")], t.tools),
        RENDERED,
    ),
    "asks something else": (lambda t: ([SYSTEM, replace(USER, content="what is this")], t.tools), RENDERED),
}
"""Changes that a client may make to a conversation of texts."""

CALLS: dict[str, tuple[Callable[[Talk], Request], str]] = {
    "writes arguments with other spaces": (
        lambda t: arguments(t, '{"at":1,"deep":{"ok":true,"no":null},"x":"ü"}'),
        SPLICED,
    ),
    "writes arguments in another order": (
        lambda t: arguments(t, '{"x": "ü", "deep": {"no": null, "ok": true}, "at": 1}'),
        SPLICED,
    ),
    "writes arguments with other escapes and numbers": (
        lambda t: arguments(t, '{"at": 1.0, "deep": {"ok": true, "no": null}, "x": "\\u00fc"}'),
        SPLICED,
    ),
    "drops the text beside a tool call": (lambda t: sent(t, content=""), SPLICED),
    "has no ids for tool calls": (
        lambda t: sent(t, tool_calls=tuple(replace(call, id="") for call in t.answer.tool_calls)),
        SPLICED,
    ),
    "puts tool calls into the text": (lambda t: sent(t, content=t.raw, tool_calls=()), SPLICED),
    "edits the arguments of a tool call": (
        lambda t: arguments(t, '{"at": 2, "deep": {"ok": true, "no": null}, "x": "ü"}'),
        reasons.ANSWER_REWRITTEN,
    ),
    "makes `true` of `1`": (
        lambda t: arguments(t, '{"at": true, "deep": {"ok": true, "no": null}, "x": "ü"}'),
        reasons.ANSWER_REWRITTEN,
    ),
    "drops a tool call": (lambda t: sent(t, tool_calls=(), content="looking"), reasons.ANSWER_REWRITTEN),
    "edits the text beside a tool call": (lambda t: sent(t, content="else"), reasons.ANSWER_REWRITTEN),
    "renames tool call ids": (
        lambda t: sent(t, tool_calls=tuple(replace(call, id="other") for call in t.answer.tool_calls)),
        reasons.ANSWER_REWRITTEN,
    ),
    "drops the tools": (lambda t: ([*t.before, t.answer, *t.after], ()), reasons.TOOLS_CHANGED),
    "changes the tools": (lambda t: ([*t.before, t.answer, *t.after], t.tools[:1]), reasons.TOOLS_CHANGED),
}
"""Changes that a client may make to tool calls."""

STOPPED: dict[str, tuple[Callable[[Talk], Request], str]] = {
    "leaves the stop string out, as it came": (sent, SPLICED),
    "puts the stop string back behind the answer": (lambda t: sent(t, content=t.raw), SPLICED),
    "puts the stop string and more behind the answer": (lambda t: sent(t, content=f"{t.raw} it is blue\n"), SPLICED),
    "puts only other text behind the answer": (
        lambda t: sent(t, content=f"{t.answer.content}\nResult: blue"),
        partly(reasons.ANSWER_EXTENDED),
    ),
    "edits the answer before the stop string": (
        lambda t: sent(t, content=f"No {t.raw} it is blue\n"),
        partly(reasons.ANSWER_REWRITTEN),
    ),
}
"""Changes that a client may make to an answer that a stop string has ended."""

TEMPLATES: dict[str, tuple[str, str]] = {
    "chatml": (SPLICED, SPLICED),
    "qwen3": (SPLICED, reasons.TEMPLATE_POLICY),
    "thinker": (SPLICED, reasons.TEMPLATE_POLICY),
    "llama3": (SPLICED, SPLICED),
    "mistral": (SPLICED, reasons.TEMPLATE_POLICY),
    "gemma": (SPLICED, SPLICED),
    "glm": (SPLICED, SPLICED),
    "phi": (SPLICED, SPLICED),
    "counter": (SPLICED, SPLICED),
    "terminator": (reasons.FOREIGN_END, reasons.TEMPLATE_POLICY),
    "endless": (reasons.NO_TURN_END, reasons.TEMPLATE_POLICY),
    "remark": (reasons.TEXT_BEFORE_END, reasons.TEMPLATE_POLICY),
    "echo": (reasons.SUFFIX_DEPENDS, SPLICED),
}
"""The decisions for an unchanged answer in the tokenizer's own spelling: under `exact`, and under `template`."""


def decided(attempt: Attempt, request: Request) -> str:
    prompt = attempt.prompt(request[0], tools=request[1])
    spliced = SPLICED if prompt.parent_call_id == f"c{len(attempt.calls)}" else EARLIER
    return {
        "bridged": spliced,
        "partly": partly(str(prompt.reason)),
        "rendered": RENDERED,
        "forked": str(prompt.reason),
    }[prompt.capture]


def thought(attempt: Attempt) -> str:
    """The reasoning that a model with this template begins its answers with."""
    return {"none": "", "may": "<think>\nhm\n</think>\n\n", "begun": "hm\n</think>\n\n"}[attempt.template.thinking]


def talked(attempt: Attempt) -> Talk:
    before = [SYSTEM, USER]
    _, first, _ = attempt.says(before, f"{thought(attempt)}red")
    before += [first, MORE]
    _, answer, _ = attempt.says(before, f"{thought(attempt)} the word is blue ")
    return Talk(before=before, answer=answer, after=[Message(role="user", content="thanks")])


def stopped(attempt: Attempt) -> Talk:
    talk = talked(attempt)
    before = [*talk.before, talk.answer, MORE]
    text = "Action: look\nObservation:"
    _, answer, _ = attempt.answer(before, attempt.template.encode(f"{thought(attempt)}{text}"), stop=["Observation:"])
    assert answer.content == "Action: look\n"
    return Talk(before=before, answer=answer, after=talk.after, raw=text)


def called(attempt: Attempt) -> Talk:
    wish = ToolCall(id="", name="look", arguments='{"at": 1,  "deep": {"ok": true, "no": null}, "x": "ü"}')
    message = Message(role="assistant", content="looking", tool_calls=(wish,))
    before = [SYSTEM, USER]
    ids = attempt.template.answer_ids(message, messages=before, tools=TOOLS)
    _, answer, _ = attempt.answer(before, ids, tools=TOOLS)
    [call] = answer.tool_calls
    assert call.arguments == wish.arguments
    result = Message(role="tool", content="42", tool_call_id=call.id, name="look")
    return Talk(before=before, answer=answer, after=[result], tools=TOOLS, raw=attempt.template.decode(ids))


@pytest.mark.parametrize("does", TEXT)
@pytest.mark.parametrize("name", NAMES)
def test_texts(name: str, does: str) -> None:
    act, expected = TEXT[does]
    stage = attempt(name)
    request = act(talked(stage))
    if "thoughts" in does and stage.template.thinking == "none":
        expected = SPLICED  # there is no reasoning to edit
    if expected.startswith(SPLICED) and TEMPLATES[name][0] != SPLICED:
        expected = TEMPLATES[name][0]
    if name == "glm" and does == "puts a system message after the answer":
        expected = reasons.FOREIGN_END  # `<|user|>` was sampled, and `<|system|>` follows
    assert decided(stage, request) == expected


@pytest.mark.parametrize("does", STOPPED)
@pytest.mark.parametrize("name", [name for name, (exact, _) in TEMPLATES.items() if exact == SPLICED])
def test_answers_that_a_stop_string_has_ended(name: str, does: str) -> None:
    act, expected = STOPPED[does]
    stage = attempt(name)
    assert decided(stage, act(stopped(stage))) == expected


@pytest.mark.parametrize("does", CALLS)
@pytest.mark.parametrize("name", ["chatml", "qwen3", "thinker", "glm", "llama3", "mistral"])
def test_tool_calls(name: str, does: str) -> None:
    act, expected = CALLS[does]
    stage = attempt(name)
    talk = called(stage)
    if not talk.answer.content and "text beside" in does:
        pytest.skip("this template has no text beside tool calls")
    if expected == reasons.TOOLS_CHANGED and not stage.template.traits.shows_tools:
        expected = SPLICED  # the prompt does not depend on the tools
    if name == "glm" and expected == SPLICED:
        expected = reasons.FOREIGN_END  # the script samples `<|user|>` where a model samples `<|observation|>`
    assert decided(stage, act(talk)) == expected


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("name", NAMES)
def test_templates(name: str, history: str) -> None:
    stage = attempt(name, history=history)
    before = [SYSTEM, USER]
    _, answer, call_id = stage.says(before, f"{thought(stage)}blue")
    prompt = stage.prompt([*before, answer, MORE])
    assert decided(stage, ([*before, answer, MORE], ())) == TEMPLATES[name][history == "template"]
    assert prompt.parent_call_id == call_id  # the parent is linked in any case
    if history == "template":
        assert prompt.ids.tolist() == stage.template.render([*before, answer, MORE])


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under a heading of the page."""
    part = DOCS.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def test_the_page_says_the_same() -> None:
    assert dict(rows("What a client does")) == {does: said for does, (_, said) in (TEXT | STOPPED | CALLS).items()}
    assert {name.strip("`"): (exact, policy) for name, _, exact, policy in rows("What a template does")} == TEMPLATES
    assert [reason for reason, _ in rows("Reasons")] == list(reasons.ALL)


def test_every_reason_is_reached() -> None:
    shown: Sequence[str] = [said.removeprefix(f"{EARLIER}: ") for _, said in (TEXT | STOPPED | CALLS).values()] + [
        said for pair in TEMPLATES.values() for said in pair
    ]
    elsewhere = {reasons.END_JOINED, reasons.RAW_END_LEFT_OUT}  # see `test_tree` and `test_raw`
    assert set(reasons.ALL) - set(shown) == elsewhere
