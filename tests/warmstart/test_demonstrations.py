"""Demonstrations from files, functions and runs; errors name the invalid one."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightningrl.chat import ChatTemplate
from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.models.load import export_folder
from lightningrl.models.tiny import build_model
from lightningrl.recipe import load_config
from lightningrl.warmstart.demonstrations import Answer, load_demonstrations
from lightningrl.warmstart.examples import examples_of
from lightningrl.warmstart.vocabulary import tokenizer_for

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}},
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"what": "red hat", "where": "attic"}'},
}
WITH_TOOL = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "find things"},
        {"role": "user", "content": "a red hat"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "red hat: 7 francs"},
        {"role": "assistant", "content": "7 francs"},
    ],
}


def recipe(colours: Path, source: str) -> Config:
    return load_config(colours / "recipe.toml", ["warmstart.teacher=", f"warmstart.demonstrations={source}"])


def of_file(colours: Path, *rows: object) -> list[list[Answer]]:
    (colours / "shown.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return [list(answers) for answers in load_demonstrations(recipe(colours, "shown.jsonl")).answers]


def template_of(answers: list[list[Answer]], folder: Path) -> ChatTemplate:
    tokenizer = tokenizer_for(answers)
    export_folder(
        build_model(len(tokenizer), hidden=32, eos_token_id=tokenizer.eos_token_id), folder, tokenizer=tokenizer
    )
    return ChatTemplate.load(folder)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "no assistant message"),
        ({"input": {}}, "`messages` is missing"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "ho"}]}, "the first message is from the assistant"),
        ({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "ho"}]}, "content"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]},
            "message 2 is an empty answer",
        ),
        ({"messages": ["hi"]}, "messages"),
    ],
)
def test_an_invalid_line_is_named_with_an_example(colours: Path, row: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        of_file(colours, GOOD, "", row)
    assert "shown.jsonl` line 3 is not a demonstration" in caught.value.message and said in caught.value.message
    assert '"messages"' in str(caught.value.hint)


def test_every_answer_is_imitated_but_those_of_weight_0(colours: Path) -> None:
    told = {"role": "user", "content": "and"}
    turns = [
        *GOOD["messages"],
        told,
        {"role": "assistant", "content": "no", "weight": 0},
        told,
        {"role": "assistant", "content": "end"},
    ]
    [answers, several] = of_file(colours, {"messages": turns}, [GOOD, GOOD])
    assert [(len(answer.messages), answer.message.content) for answer in answers] == [(1, "ho"), (5, "end")]
    assert [answer.message.content for answer in several] == ["ho", "ho"]


def test_token_ids_are_those_that_the_gateway_would_have_served(colours: Path) -> None:
    answers = of_file(colours, WITH_TOOL)
    template = template_of(answers, colours / "model")
    [[call, last]] = examples_of(answers, template, max_length=64)
    assert list(last.prompt_ids[: len(call.prompt_ids)]) == list(call.prompt_ids)
    assert list(last.prompt_ids[len(call.prompt_ids) :][: len(call.completion_ids)]) == list(call.completion_ids)
    assert list(call.prompt_ids) == template.render(answers[0][0].messages, tools=[TOOL])
    said = [template.decode(example.completion_ids, control=True) for example in (call, last)]
    arguments = CALL["function"]["arguments"]  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]
    assert said == [
        f'<tool_call>\n{{"name": "find", "arguments": {arguments}}}\n</tool_call><|im_end|>',
        "7 francs<|im_end|>",
    ]


def test_repeated_phrases_are_single_tokens(colours: Path) -> None:
    answers = of_file(colours, WITH_TOOL)
    template = template_of(answers, colours / "model")
    [[call, _]] = examples_of(answers, template, max_length=64)
    texts = [template.token_text(token) for token in call.prompt_ids]
    assert texts[0].startswith("<|im_start|>system\nfind things") and texts[0].endswith("</tool_call>")
    words = [
        '<tool_call>\n{"name": "find", "arguments": {"what": "',
        "red",
        " ",
        "hat",
        '", "where": "',
        "attic",
        '"}}\n</tool_call>',
        "<|im_end|>",
    ]
    assert [template.token_text(token) for token in call.completion_ids] == words
    for text in ("Zoë's 42 hats — \U0001f3a9\n\t{}", "</tool_call>"):
        assert template.decode(template.encode(text)) == text


def test_a_demonstration_that_is_too_long_is_named(colours: Path) -> None:
    answers = of_file(colours, GOOD, WITH_TOOL)
    template = template_of(answers, colours / "model")
    with pytest.raises(UserError, match=r"demonstration 2 has `.*` tokens, and `engine.max_length` is `12`"):
        examples_of(answers, template, max_length=12)
