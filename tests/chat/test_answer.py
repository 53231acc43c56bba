"""Is an answer cut, parsed and streamed the same way however its tokens arrive?"""

import random
from pathlib import Path

import pytest

from lightningrl.chat import AnswerStream, ChatTemplate
from lightningrl.chat.tools import parse


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a":  1, "é": "ü"}}\n</tool_call>', "", [("f", '{"a":  1, "é": "ü"}')]),
        ('so:\n<tool_call>{"arguments":{},"name":"f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>', "so:", [("f", "{}"), ("g", "{}")]),
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
@pytest.mark.parametrize("parse_tools", [False, True])
def test_a_stream_says_what_the_whole_says(template: ChatTemplate, said: str, parse_tools: bool) -> None:
    ids = template.encode(said)
    whole = AnswerStream(template, stop=["STOP", "zzz"], parse_tools=parse_tools, seed=b"s")
    first = whole.feed(ids)
    end = whole.finish()
    assert first + end.rest == end.message.content
    assert "STOP" not in end.message.content
    chance = random.Random(0)
    for _ in range(20):
        stream, pieces, place = AnswerStream(template, stop=["STOP", "zzz"], parse_tools=parse_tools, seed=b"s"), "", 0
        while place < len(ids):
            step = chance.randint(1, 3)
            pieces += stream.feed(ids[place : place + step])
            place += step
        last = stream.finish()
        assert (pieces + last.rest, last.message) == (end.message.content, end.message)


def test_text_is_shown_as_soon_as_it_is_certain(template: ChatTemplate) -> None:
    stream = AnswerStream(template, stop=["STOP"], parse_tools=False, seed=b"s")
    assert stream.feed(template.encode("good")) == "good"
    assert stream.feed(template.encode("ST")) == ""
    assert stream.feed(template.encode("AR")) == "STAR"


def test_tool_call_ids_follow_from_the_seed(template: ChatTemplate) -> None:
    def ids(seed: bytes) -> list[str]:
        stream = AnswerStream(template, stop=(), parse_tools=True, seed=seed)
        stream.feed(template.encode('<tool_call>{"name": "f"}</tool_call>' * 2))
        return [call.id for call in stream.finish().message.tool_calls]

    assert ids(b"a") == ids(b"a")
    assert len({*ids(b"a"), *ids(b"b")}) == 4
