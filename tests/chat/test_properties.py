"""Does every bridged prompt begin with the ids that were read and sampled, and is no changed answer bridged? For random
answers, and all changes that clients make.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightningrl.chat import AnswerStream
from lightningrl.messages import Message, ToolCall
from tests.chat.zookeeper import NAMES, PLAIN, Attempt, attempt, chat_template

SPLICING = ["chatml", "counter", "gemma", "glm", "llama3", "mistral", "phi", "qwen3", "thinker"]
CALLING = ["chatml", "glm", "llama3", "mistral", "qwen3", "thinker"]
ENDED = st.booleans()
SAMPLED = st.lists(st.sampled_from(PLAIN), max_size=12)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

CLIENTS: dict[str, Callable[[Message], Message]] = {
    "keeps all": lambda m: m,
    "drops thoughts": lambda m: replace(m, reasoning=""),
    "trims": lambda m: replace(m, content=m.content.strip(), reasoning=m.reasoning.strip()),
    "adds white space": lambda m: replace(m, content=f"\n{m.content} "),
    "names agents": lambda m: replace(m, name="writer"),
}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


def user(content: str) -> Message:
    return Message(role="user", content=content or "x")


def follows(talk: Attempt, messages: list[Message], ids: list[int]) -> str:
    """The suffix of the bridged prompt for these messages. The template's rendering of all messages ends with it."""
    prompt = talk.prompt(messages, tools=[TOOL] if any(m.tool_calls for m in messages) else [])
    assert (prompt.capture, prompt.parent_call_id) == ("bridged", f"c{len(talk.calls)}")
    suffix = talk.suffix(prompt)
    if ids and ids[-1] in talk.template.stop_token_ids:
        suffix = talk.template.token_text(ids[-1]) + suffix
    assert talk.template.text(messages).endswith(suffix)
    return suffix


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", SPLICING)
@given(answers=st.lists(st.tuples(SAMPLED, ENDED, WORDS), min_size=1, max_size=3))
def test_what_was_sampled_stays_in_every_later_prompt(
    name: str, client: str, answers: list[tuple[list[int], bool, str]]
) -> None:
    talk = attempt(name)
    messages = [user("say a word")]
    for sampled, ended, question in answers:
        ids = [*sampled, talk.template.stop_token_ids[0]] if ended else sampled
        _, answer, _ = talk.answer(messages, ids)
        messages += [CLIENTS[client](answer), user(question)]
        suffix = follows(talk, messages, ids)
        assert question.strip() in suffix


@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("name", NAMES)
@given(sampled=SAMPLED, ended=ENDED, edit=WORDS.filter(str.strip))
@example(sampled=[343, 343, 203], ended=False, edit="0")  # of the thinker: two tags that end thoughts
def test_an_edited_answer_is_never_bridged(name: str, sampled: list[int], ended: bool, edit: str) -> None:
    """Except if the edit is text behind all sampled text, in a turn that has not ended: then only the edit is new."""
    talk = attempt(name)
    asked = [user("say a word")]
    ids = [*sampled, talk.template.stop_token_ids[0]] if ended else sampled
    _, answer, _ = talk.answer(asked, ids)
    text = talk.template.decode(ids)
    _, tag, behind = text.partition("</think>")
    ends_thoughts = tag and answer.content.strip() != text.strip()  # the first tag; what is behind may have others
    said = (behind if ends_thoughts else text).lstrip()
    for edited in (edit + answer.content, answer.content + edit):
        prompt = talk.prompt([*asked, replace(answer, content=edited), user("more")])
        goes_on = not ended and bool(answer.content.strip()) and edited.lstrip().startswith(said)
        assert prompt.capture == "forked" or goes_on or edited == text.strip()
        if prompt.capture == "bridged" and goes_on:
            assert talk.suffix(prompt).startswith(edited.lstrip()[len(said) :].rstrip())


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", SPLICING)
@given(draw=st.data(), turns=st.lists(st.tuples(SAMPLED, SAMPLED, WORDS, WORDS), min_size=1, max_size=3))
def test_what_was_sampled_before_and_with_a_stop_string_stays_and_what_is_put_behind_it_is_new(
    name: str, draw: st.DataObject, turns: list[tuple[list[int], list[int], str, str]]
) -> None:
    """For every spelling of the stop string, any tokens sampled beyond it, and any text put behind it."""
    talk, stop = attempt(name), "STOP"
    spelled = [token for letter in stop for token in talk.template.encode(letter)]
    messages = [user("say a word")]
    for sampled, beyond, behind, question in turns:
        ids = [*sampled, *draw.draw(st.sampled_from([spelled, talk.template.encode(stop)])), *beyond]
        _, answer, _ = talk.answer(messages, ids, stop=[stop])
        whole = talk.template.decode(ids)
        if (
            not answer.content.strip() or "think>" in whole + behind
        ):  # no answer to continue, or reasoning, which has a test of its own
            return
        messages += [replace(answer, content=whole + behind), user(question)]
        prompt = talk.prompt(messages)
        assert (prompt.capture, prompt.parent_call_id) == ("bridged", f"c{len(talk.calls)}")
        assert talk.suffix(prompt).startswith(behind.rstrip())
        assert question.strip() in talk.suffix(prompt)[len(behind.rstrip()) :]


def test_what_is_sampled_here_is_seldom_what_a_tokenizer_would_choose() -> None:
    """Otherwise the tests above would prove nothing."""
    template, canonical = chat_template("chatml"), []

    @settings(max_examples=100, database=None, derandomize=True)
    @given(SAMPLED.filter(lambda ids: len(ids) > 3))
    def count(ids: list[int]) -> None:
        canonical.append(template.encode(template.decode(ids)) == ids)

    count()
    assert sum(canonical) < len(canonical) / 2


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(WORDS, VALUES, max_size=4)


def spelled(value: Any, draw: st.DataObject) -> str:
    """JSON as a model may write it."""
    separators = draw.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,  ", " :\t")]))
    indent = draw.draw(st.sampled_from([None, None, 2]))
    return json.dumps(value, ensure_ascii=draw.draw(st.booleans()), separators=separators, indent=indent)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def javascript(value: Any) -> Any:
    """All numbers are doubles, and whole ones lose their point."""
    if isinstance(value, dict):
        return {key: javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [javascript(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int(float(value)) if float(value).is_integer() and abs(float(value)) < 1e21 else float(value)


REWRITES: dict[str, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "compact": lambda text: json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False),
    "spaced": lambda text: json.dumps(json.loads(text)),
    "sorted": lambda text: json.dumps(json.loads(text), sort_keys=True),
    "reversed": lambda text: json.dumps(reversed_keys(json.loads(text))),
    "javascript": lambda text: json.dumps(javascript(json.loads(text)), separators=(",", ":")),
}


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("name", CALLING)
@given(draw=st.data(), arguments=OBJECTS)
def test_arguments_come_out_byte_for_byte_and_may_be_written_anew(
    name: str, rewrite: str, draw: st.DataObject, arguments: dict[str, Any]
) -> None:
    talk = attempt(name)
    asked = [user("say a word")]
    text = spelled(arguments, draw)
    said = Message(role="assistant", content="", tool_calls=(ToolCall(id="", name="look", arguments=text),))
    ids = talk.template.answer_ids(said, messages=asked, tools=[TOOL])
    if name == "glm":
        ids = [
            *ids[:-1],
            *talk.template.encode("<|observation|>"),
        ]  # the token that models with this template sample before a result
    _, answer, _ = talk.answer(asked, ids, tools=[TOOL])
    [call] = answer.tool_calls
    assert call.arguments == text
    echoed = replace(answer, tool_calls=(replace(call, arguments=REWRITES[rewrite](text)),))
    prompt = talk.prompt([*asked, echoed, Message(role="tool", content="1", tool_call_id=call.id)], tools=[TOOL])
    assert prompt.capture == "bridged"


@settings(max_examples=100, deadline=None)
@given(arguments=OBJECTS, other=OBJECTS)
def test_arguments_that_mean_something_else_are_never_bridged(arguments: dict[str, Any], other: dict[str, Any]) -> None:
    talk = attempt("chatml")
    asked = [user("say a word")]
    said = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="", name="look", arguments=json.dumps(arguments)),)
    )
    _, answer, _ = talk.answer(asked, talk.template.answer_ids(said, messages=asked, tools=[TOOL]), tools=[TOOL])
    echoed = replace(answer, tool_calls=(replace(answer.tool_calls[0], arguments=json.dumps(other)),))
    prompt = talk.prompt([*asked, echoed, user("more")], tools=[TOOL])
    same = json.dumps(javascript(arguments), sort_keys=True) == json.dumps(javascript(other), sort_keys=True)
    assert prompt.capture == ("bridged" if same else "forked")


@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("name", NAMES)
@given(
    content=WORDS.filter(lambda text: not text.startswith("\n") and "<" not in text),
    reasoning=WORDS.filter(lambda text: "<" not in text),
)
def test_what_a_script_says_is_what_the_agent_gets(name: str, content: str, reasoning: str) -> None:
    template = chat_template(name)
    thinks = template.traits.think is not None
    said = Message(role="assistant", content=content, reasoning=reasoning.strip() if thinks else "")
    ids = template.answer_ids(said, messages=[user("say a word")])
    stream = AnswerStream(template, stop=(), tools=False, seed=b"s")
    stream.feed(ids)
    answer = stream.finish()
    assert (answer.message.content, answer.message.reasoning) == (content, said.reasoning)
    assert (answer.reasoning_tokens > 0) >= (said.reasoning != "")
    assert ids[-1] in template.stop_token_ids


@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "thinker", "llama3", "mistral"])
@given(draw=st.data())
def test_a_stream_says_what_the_whole_says(name: str, tools: bool, draw: st.DataObject) -> None:
    template = chat_template(name)
    pieces = [
        "<think>",
        "</think>",
        "\n",
        " ",
        "STOP",
        "ST",
        "<tool_call>",
        '{"name": "look", "arguments": {"a": 1}}',
        "</tool_call>",
        "[",
        "]",
        ";",
    ]
    text = "".join(draw.draw(st.lists(st.sampled_from(pieces) | WORDS, max_size=8)))
    ids = template.encode(text)

    def stream() -> AnswerStream:
        return AnswerStream(template, stop=["STOP", "zzz"], tools=tools, seed=b"s")

    whole = stream()
    first, end = whole.feed(ids), whole.finish()
    message = end.message
    assert (first.content + end.rest.content, first.reasoning + end.rest.reasoning) == (
        message.content,
        message.reasoning,
    )
    assert end.stopped_by == ("STOP" if "STOP" in template.decode(ids) else None)
    one = stream()
    shown = [one.feed([token]) for token in ids]
    last = one.finish()
    assert last.message == message
    assert last.reasoning_tokens == end.reasoning_tokens <= len(ids)
    assert "".join(piece.content for piece in shown) + last.rest.content == message.content
    assert "".join(piece.reasoning for piece in shown) + last.rest.reasoning == message.reasoning
