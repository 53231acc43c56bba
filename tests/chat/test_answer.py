"""Is an answer parsed and streamed the same way, however its tokens are split?"""

import random
from pathlib import Path

import pytest

from lightningrl.chat import AnswerStream, ChatTemplate
from lightningrl.chat.tools import Spelling, parse


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a":  1, "é": "ü"}}\n</tool_call>',
            "",
            [("f", '{"a":  1, "é": "ü"}')],
        ),
        (
            'so:\n<tool_call>{"arguments":{},"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>',
            "so:",
            [("f", "{}"), ("g", "{}")],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": true}"}</tool_call>', "", [("f", '{"a": true}')]),
        ('<tool_call>{"name": "f", "arguments": {"q": "</b>"}}</tool_call>', "", [("f", '{"q": "</b>"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', None, []),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": "no"}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name":', None, []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", None, []),
    ],
)
def test_tool_calls_are_read_or_left_as_text(text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parse(text) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    ("spelling", "text", "calls"),
    [
        ("llama", '{"name": "f", "parameters": {"a":  1, "é": [true, null]}}', [("f", '{"a":  1, "é": [true, null]}')]),
        ("llama", '\n<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
        (
            "llama",
            '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"q": "};"}}\n',
            [("f", "{}"), ("g", '{"q": "};"}')],
        ),
        ("llama", '{"type": "function", "name": "f", "parameters": {}}', [("f", "{}")]),
        ("llama", 'I call {"name": "f", "parameters": {}}', []),
        ("llama", '{"name": "f", "parameters": {}} and more', []),
        ("llama", '{"name": "Ada", "age": 36}', []),
        ("llama", '{"name": "Ada"}', []),
        ("llama", '{"name": "f", "parameters": {}, "arguments": {}}', []),
        ("llama", '{"name": "f", "parameters": [1]}', []),
        ("llama", "", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a":1}, "id": "abcdefghi"}]', [("f", '{"a":1}')]),
        ("mistral", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]', [("f", "{}"), ("g", "{}")]),
        ("mistral", "[1, 2]", []),
        ("mistral", "[]", []),
        ("mistral", '[{"name": "f", "arguments": {}}] done', []),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"q": "</tool_call>"}}</tool_call>',
            [("f", '{"q": "</tool_call>"}')],
        ),
    ],
)
def test_each_model_has_its_own_spelling(spelling: Spelling, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(text, spelling) == ("" if calls else text, calls)


SAID = [
    "no markers at all",
    "ends in spaces   ",
    "a < b and <tool but no <tool_call",
    'look \n\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    'look <tool_call>{"name": broken</tool_call> and on',
    "one STOP two STOP three",
    "nearly STO",
    "🦊 STOP",
]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("tools", [False, True])
def test_a_stream_says_what_the_whole_says(template: ChatTemplate, said: str, tools: bool) -> None:
    ids = template.encode(said)
    whole = AnswerStream(template, stop=["STOP", "zzz"], tools=tools, seed=b"s")
    first = whole.feed(ids)
    end = whole.finish()
    assert first.content + end.rest.content == end.message.content
    assert "STOP" not in end.message.content
    rng = random.Random(0)
    for _ in range(20):
        stream, pieces, place = AnswerStream(template, stop=["STOP", "zzz"], tools=tools, seed=b"s"), "", 0
        while place < len(ids):
            step = rng.randint(1, 3)
            pieces += stream.feed(ids[place : place + step]).content
            place += step
        last = stream.finish()
        assert (pieces + last.rest.content, last.message) == (end.message.content, end.message)


def test_text_is_shown_as_soon_as_it_is_certain(template: ChatTemplate) -> None:
    stream = AnswerStream(template, stop=["STOP"], tools=False, seed=b"s")
    assert stream.feed(template.encode("good")).content == "good"
    assert stream.feed(template.encode("ST")).content == ""
    assert stream.feed(template.encode("AR")).content == "STAR"


def test_tool_call_ids_follow_from_the_seed(template: ChatTemplate) -> None:
    def ids(seed: bytes) -> list[str]:
        stream = AnswerStream(template, stop=(), tools=True, seed=seed)
        stream.feed(template.encode('<tool_call>{"name": "f"}</tool_call>' * 2))
        return [call.id for call in stream.finish().message.tool_calls]

    assert ids(b"a") == ids(b"a")
    assert len({*ids(b"a"), *ids(b"b")}) == 4
