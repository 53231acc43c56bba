"""Does constrained decoding hold? All answers that a grammar allows meet the request, in the spelling of the model."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

from lightningrl.chat import AnswerStream, ChatTemplate
from lightningrl.chat.grammar import check, grammar_of
from lightningrl.errors import UserError
from lightningrl.messages import Message
from lightningrl.models.tiny import CHAT_TEMPLATE, MARKUP, build_tokenizer

THINK = ("<think>", "</think>")
TEXTS = ["add 1 and 22, then look at Oslo", '<tool_call> {"name": "add", "arguments": {"a": 1}} </tool_call>']
LLAMA = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.tool_calls -%}"
    "{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}"
    "{%- set f = m.tool_calls[0].function -%}"
    """{{ '{"name": "' + f.name + '", "parameters": ' }}{{ f.arguments | tojson }}{{ "}" }}"""
    "{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
MISTRAL = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{%- if m.tool_calls -%}[TOOL_CALLS] [{%- for c in m.tool_calls -%}{%- if not loop.first -%}, {% endif -%}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{%- endfor -%}]'
    "{%- else -%}{{ m.content }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def tool(name: str, *, strict: bool = False, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


ADD = tool("add", strict=True, a={"type": "integer", "minimum": 0, "maximum": 99}, b={"enum": [1, 22]})
ADD_ALL = tool("add_all", strict=True, of={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3})
LOOK = tool("look", at={"type": "string", "maxLength": 5})
TOOLS = (ADD, ADD_ALL, LOOK)


class Speaker:
    """A model that samples uniformly among the tokens that a grammar allows."""

    def __init__(self, chat_template: str, *, tags: Sequence[str] = MARKUP, control: Sequence[str] = ()) -> None:
        trained = build_tokenizer(TEXTS, vocab_size=330).backend_tokenizer
        pieces = json.loads(trained.to_str())
        pieces["added_tokens"] = [
            t for t in pieces["added_tokens"] if t["content"] in tags or t["content"] not in MARKUP
        ]
        self.tokenizer = Tokenizer.from_str(json.dumps(pieces))
        self.tokenizer.add_tokens([t for t in tags if t not in MARKUP])
        self.tokenizer.add_special_tokens(list(control))
        self.template = ChatTemplate(self.tokenizer, chat_template, special={})
        self.size = max(self.tokenizer.get_vocab().values()) + 1
        self._llguidance = llguidance.LLTokenizer(
            self.tokenizer.to_str(), n_vocab=self.size, eos_token=self.template.turn_end_id
        )

    def grammar(self, **asked: Any) -> str:
        plain = {
            "tools": TOOLS,
            "tool_choice": "auto",
            "tool_name": None,
            "parallel_tool_calls": True,
            "json_schema": None,
        }
        grammar = grammar_of(self.template, **{**plain, **asked})
        assert grammar is not None
        return grammar

    def matcher(self, grammar: str) -> Any:
        matcher = llguidance.LLMatcher(self._llguidance, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def says(self, grammar: str, *, count: int, limit: int = 300) -> Iterator[list[int]]:
        """`count` complete answers. Answers of more than `limit` tokens are skipped."""
        rng = random.Random(grammar)
        compiled = self.matcher(grammar)
        complete = (ids for _ in range(50 * count) if (ids := self._walk(compiled.deep_copy(), rng, limit)) is not None)
        return islice(complete, count)

    def _walk(self, matcher: Any, rng: random.Random, limit: int) -> list[int] | None:
        ids: list[int] = []
        while len(ids) < limit:
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), count=self.size, bitorder="little"
            )
            allowed = np.nonzero(bits)[0].tolist()
            end = self.template.turn_end_id
            ids.append(end if end in allowed and rng.random() < 0.2 else rng.choice(allowed))
            if ids[-1] == end:
                return ids
            assert matcher.consume_token(ids[-1]), matcher.get_error()
        return None

    def may_say(self, grammar: str, text: str) -> bool:
        """Does the grammar allow this text, in the tokenizer's spelling?"""
        matcher = self.matcher(grammar)
        ids = self.template.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def read(self, ids: list[int]) -> Message:
        stream = AnswerStream(self.template, stop=(), tools=True, seed=b"")
        stream.feed(ids)
        return stream.finish().message


SPEAKERS = {
    "hermes": lambda: Speaker(CHAT_TEMPLATE),
    "hermes in letters": lambda: Speaker(CHAT_TEMPLATE, tags=()),
    "hermes that thinks": lambda: Speaker(thinking("{{- '<|im_start|>assistant\\n' -}}"), tags=(*MARKUP, *THINK)),
    "hermes that thinks in letters": lambda: Speaker(thinking("{{- '<|im_start|>assistant\\n' -}}"), tags=()),
    "hermes that must think": lambda: Speaker(
        thinking("{{- '<|im_start|>assistant\\n<think>\\n' -}}"), tags=(*MARKUP, *THINK)
    ),
    "hermes that may not think": lambda: Speaker(
        thinking("{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}"), tags=(*MARKUP, *THINK)
    ),
    "llama": lambda: Speaker(LLAMA),
    "mistral": lambda: Speaker(MISTRAL, control=("[TOOL_CALLS]",)),
    "mistral in letters": lambda: Speaker(MISTRAL),
}
PARALLEL = [name for name in SPEAKERS if name != "llama"]


def thinking(opening: str) -> str:
    """ChatML with reasoning, whose generation prompt is `opening`."""
    changed = CHAT_TEMPLATE.replace("{{- '<|im_start|>assistant\\n' -}}", opening)
    assert changed != CHAT_TEMPLATE or opening in CHAT_TEMPLATE
    return "{#- thoughts: <think>…</think> -#}" + changed


@pytest.fixture(scope="module")
def speakers() -> dict[str, Speaker]:
    return {name: make() for name, make in SPEAKERS.items()}


def keeps(name: str, arguments: str) -> bool:
    """Do these arguments follow the schema of the tool?"""
    value = json.loads(arguments)
    if name == "add":
        return (
            list(value) == ["a", "b"]
            and isinstance(value["a"], int)
            and 0 <= value["a"] <= 99
            and value["b"] in (1, 22)
        )
    if name == "add_all":
        return list(value) == ["of"] and 1 <= len(value["of"]) <= 3 and all(isinstance(x, bool) for x in value["of"])
    return name == "look" and list(value) == ["at"] and isinstance(value["at"], str) and len(value["at"]) <= 5


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_required_tool_is_called_whatever_is_sampled(speakers: dict[str, Speaker], name: str) -> None:
    speaker, counts, seen = speakers[name], set(), set()
    for ids in speaker.says(speaker.grammar(tool_choice="required"), count=60):
        message = speaker.read(ids)
        assert message.content == ""
        assert message.tool_calls and all(keeps(call.name, call.arguments) for call in message.tool_calls)
        counts.add(len(message.tool_calls))
        seen.update(call.name for call in message.tool_calls)
    assert seen == {"add", "add_all", "look"}
    assert (max(counts) > 1) == (name in PARALLEL)


@pytest.mark.parametrize("name", SPEAKERS)
def test_without_parallel_calls_there_is_exactly_one(speakers: dict[str, Speaker], name: str) -> None:
    speaker = speakers[name]
    answers = [
        speaker.read(ids)
        for ids in speaker.says(speaker.grammar(tool_choice="required", parallel_tool_calls=False), count=30)
    ]
    assert len(answers) == 30 and {len(message.tool_calls) for message in answers} == {1}


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_named_tool_is_called_once_and_no_other(speakers: dict[str, Speaker], name: str) -> None:
    speaker = speakers[name]
    answers = [
        speaker.read(ids)
        for ids in speaker.says(speaker.grammar(tool_choice="required", tool_name="add_all"), count=30)
    ]
    assert len(answers) == 30
    assert all(
        [call.name for call in message.tool_calls] == ["add_all"] and keeps("add_all", message.tool_calls[0].arguments)
        for message in answers
    )


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("several", [True, False])
def test_with_strict_tools_an_answer_is_text_or_calls_that_keep_to_their_schema(
    speakers: dict[str, Speaker], name: str, several: bool
) -> None:
    speaker = speakers[name]
    grammar = speaker.grammar(parallel_tool_calls=several)
    answers = [speaker.read(ids) for ids in speaker.says(grammar, count=120, limit=200)]
    assert len(answers) == 120
    calls = [message.tool_calls for message in answers]
    assert all(keeps(call.name, call.arguments) for some in calls for call in some)
    assert any(not some for some in calls)
    assert several or max(map(len, calls)) <= 1


@pytest.mark.parametrize("name", SPEAKERS)
def test_what_models_write_is_allowed_and_what_breaks_the_schema_is_not(
    speakers: dict[str, Speaker], name: str
) -> None:
    speaker = speakers[name]
    written, end = (
        speaker.template.traits.tool_format,
        "" if name == "llama" else "]" if name.startswith("mistral") else "\n</tool_call>",
    )
    begun = "hm.\n</think>\n\n" if name == "hermes that must think" else ""

    def call(arguments: str) -> str:
        return f"{begun}{written.begin.rpartition('</think>')[2].lstrip()}add{written.middle}{arguments}}}{end}"

    auto, required = speaker.grammar(), speaker.grammar(tool_choice="required")
    for spelled in ('{"a": 7, "b": 22}', '{"a":7,"b":22}', '{\n  "a": 7,\n  "b": 22\n}'):
        assert speaker.may_say(auto, call(spelled)) and speaker.may_say(required, call(spelled)), spelled
    for wrong in ('{"a": 100, "b": 22}', '{"a": 7}', '{"a": 7, "b": 22, "c": 1}', '{"a": "7", "b": 22}', "7"):
        assert not speaker.may_say(auto, call(wrong)) and not speaker.may_say(required, call(wrong)), wrong
    assert speaker.may_say(auto, f"{begun}There is <b>nothing</b> to add.") and not speaker.may_say(
        required, f"{begun}There is nothing to add."
    )


def test_text_before_a_call_is_free_until_a_tag_opens(speakers: dict[str, Speaker]) -> None:
    for name in ("hermes", "hermes in letters"):
        speaker = speakers[name]
        grammar = speaker.grammar(tools=(ADD,))
        good, bad = (
            '<tool_call>\n{"name": "add", "arguments": {"a": A, "b": 1}}\n</tool_call>'.replace("A", a)
            for a in ("5", '"5"')
        )
        assert speaker.may_say(grammar, f"I will <tool_cal add, {{then}}\n{good}\n{good}")
        assert not speaker.may_say(grammar, f"I will add\n{bad}")
        assert not speaker.may_say(grammar, f"I will add\n{good}\n{bad}")
        assert not speaker.may_say(grammar, "I write <tool_call> for fun")


def test_tags_are_the_tokens_that_the_model_has_learnt(speakers: dict[str, Speaker]) -> None:
    speaker = speakers["hermes"]
    tags = [speaker.template.encode(tag)[0] for tag in ("<tool_call>", "</tool_call>")]
    for ids in speaker.says(speaker.grammar(tool_choice="required", parallel_tool_calls=False), count=20):
        assert [t for t in ids if t in tags] == tags, "in letters they would be other tokens"


@pytest.mark.parametrize("name", ["hermes that thinks", "hermes that thinks in letters", "hermes that must think"])
def test_thoughts_are_free_and_what_follows_them_is_not(speakers: dict[str, Speaker], name: str) -> None:
    speaker = speakers[name]
    grammar = speaker.grammar(tool_choice="required", tool_name="add")
    opening = "" if name == "hermes that must think" else "<think>\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 1}}\n</tool_call>'
    assert speaker.may_say(grammar, f'{opening}Let me see: {{"x": <b>}}\n</think>\n\n{call}')
    assert not speaker.may_say(grammar, f"{opening}Let me see.\n</think>\n\nNo call.")
    assert not speaker.may_say(grammar, f"{opening}Let me see.")
    assert speaker.may_say(grammar, call) == (name != "hermes that must think")
    if "letters" not in name:  # random letters never make a closing tag
        assert any(speaker.read(ids).reasoning for ids in speaker.says(grammar, count=20, limit=200))


@pytest.mark.parametrize("name", SPEAKERS)
def test_json_answers_keep_to_their_schema(speakers: dict[str, Speaker], name: str) -> None:
    speaker = speakers[name]
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    for ids in speaker.says(speaker.grammar(tools=(), json_schema=schema), count=30):
        value = json.loads(speaker.read(ids).content)
        assert isinstance(value["ok"], bool) and set(value) <= {"ok", "n"}
    some = [
        json.loads(speaker.read(ids).content)
        for ids in speaker.says(speaker.grammar(tools=(), json_schema={"type": "object"}), count=20)
    ]
    assert len(some) == 20 and all(isinstance(value, dict) for value in some)


def test_with_tools_and_a_schema_an_answer_is_a_call_or_json(speakers: dict[str, Speaker]) -> None:
    speaker = speakers["hermes"]
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answers = [speaker.read(ids) for ids in speaker.says(speaker.grammar(tools=(LOOK,), json_schema=schema), count=40)]
    assert {bool(message.tool_calls) for message in answers} == {True, False}
    assert all(message.tool_calls or "ok" in json.loads(message.content) for message in answers)
    no_calls = [
        speaker.read(ids)
        for ids in speaker.says(speaker.grammar(tools=TOOLS, tool_choice="none", json_schema=schema), count=20)
    ]
    assert no_calls and all("ok" in json.loads(message.content) for message in no_calls)


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": ()},
        {"tools": (LOOK,)},
        {"tools": (LOOK,), "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
    ids=str,
)
def test_where_nothing_is_promised_nothing_is_constrained(speakers: dict[str, Speaker], asked: dict[str, Any]) -> None:
    plain = {"tool_choice": "auto", "tool_name": None, "parallel_tool_calls": True, "json_schema": None}
    assert grammar_of(speakers["hermes"].template, **{**plain, **asked}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "object", "properties": {"a": {"type": "zzz"}}},
        {"$ref": "#/definitions/nowhere"},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"not": {"type": "string"}},
        {"const": float("nan")},
        {"enum": ["\ud800"]},
        {"type": "string", "format": "nobody knows"},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_compiled_is_found_out_before_sampling(
    speakers: dict[str, Speaker], schema: dict[str, Any]
) -> None:
    strict = {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]},
        },
    }
    for asked in (
        {"tools": (), "json_schema": schema},
        {"tools": (strict,)},
        {"tools": (strict,), "tool_choice": "required"},
    ):
        with pytest.raises(UserError, match=r"(?s)(cannot be constrained|no JSON schema).*hint:"):
            speakers["hermes"].grammar(**asked)


@pytest.mark.parametrize(
    "schema",
    [{"type": "string", "format": "nobody knows"}, {"$ref": "#/definitions/nowhere"}, {"not": {"type": "string"}}],
    ids=str,
)
def test_a_tool_that_is_not_strict_may_have_a_schema_that_nobody_can_compile(
    speakers: dict[str, Speaker], schema: dict[str, Any]
) -> None:
    speaker = speakers["hermes"]
    lax = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
    grammar = speaker.grammar(tools=(lax,), tool_choice="required")
    assert speaker.may_say(grammar, '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call>')


def test_names_are_spelled_letter_by_letter_whatever_they_are(speakers: dict[str, Speaker]) -> None:
    speaker = speakers["hermes"]
    for name in ("a/b.c-d", "größe", "日本", "a" * 64, "{x}", "<b>"):
        (ids,) = speaker.says(speaker.grammar(tools=(tool(name, x={"type": "null"}),), tool_choice="required"), count=1)
        assert speaker.read(ids).tool_calls[0].name == name


def test_a_tool_that_is_not_there_cannot_be_asked_for(speakers: dict[str, Speaker]) -> None:
    with pytest.raises(UserError, match="no tool `jump`"):
        speakers["hermes"].grammar(tool_choice="required", tool_name="jump")
    with pytest.raises(UserError, match="no tool to call"):
        speakers["hermes"].grammar(tools=(), tool_choice="required")
    with pytest.raises(UserError, match="are no object"):
        speakers["hermes"].grammar(
            tools=({"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}},)
        )


def test_white_space_does_not_go_on_for_ever(speakers: dict[str, Speaker]) -> None:
    grammar = speakers["hermes"].grammar(
        tools=(), json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    )
    assert speakers["hermes"].may_say(grammar, '{\n    "a": 1\n}')
    assert not speakers["hermes"].may_say(grammar, '{\n\n"a": 1}')
    assert not speakers["hermes"].may_say(grammar, "{" + " " * 50 + '"a": 1}')


def test_strings_have_no_escapes_that_are_half_a_character(speakers: dict[str, Speaker]) -> None:
    grammar = speakers["hermes"].grammar(
        tools=(), json_schema={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    )
    assert speakers["hermes"].may_say(grammar, '{"a": "é \\n \\" \\\\ 😀"}')
    assert not speakers["hermes"].may_say(grammar, '{"a": "\\ud800"}')


def test_a_grammar_from_elsewhere_can_be_checked() -> None:
    check('start: "a" | "b"')
    with pytest.raises(UserError, match="cannot be constrained"):
        check("start: nowhere")
