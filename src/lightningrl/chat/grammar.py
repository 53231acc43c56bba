"""Which answers does a request allow? Constrained decoding: a grammar that engines sample under.

tool choice, tools, JSON schema → `grammar_of` → Lark text in llguidance's dialect, or None if every answer is allowed.
Tool calls are spelled as the model's template spells them. llguidance is needed only to check or to apply a grammar.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from lightningrl.chat.template import ChatTemplate
from lightningrl.chat.tools import OPEN
from lightningrl.errors import UserError

Function = Mapping[str, Any]

SPACES = r" |\n {0,40}"
"""White space in JSON: a space, or a line break with its indentation. Unbounded, weak models write spaces endlessly."""
ESCAPES = 'nrbtf\\"'
"""Allowed after a backslash in a string. No `u`: half of a surrogate pair would be no text."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
"""Text that may be a single token of the tokenizer."""
ANYTHING = "/(?s:.*)/"
LOOKS_LIKE_A_CALL = r"\s*(<\|python_tag\|>|\[TOOL_CALLS\])?\s*[{\[](?s:.*)"
"""Answers that are parsed as a tool call in formats without tags (see `chat.tools`)."""


def grammar_of(
    template: ChatTemplate,
    *,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Literal["auto", "none", "required"],
    tool_name: str | None,
    parallel_tool_calls: bool,
    json_schema: Mapping[str, Any] | None,
) -> str | None:
    """The grammar of the answers that this request allows; None if it allows every answer.

    `tools` are in the format of OpenAI's chat API. The arguments of a `strict` tool follow its schema to the letter,
    those of another tool as far as llguidance supports the schema. Reasoning is free. Raises `UserError` for a schema
    that cannot be compiled, and for a missing tool.
    """
    offered = [] if tool_choice == "none" else tools
    functions = [_function(tool) for tool in offered if tool.get("type", "function") == "function"]
    several = parallel_tool_calls and tool_name is None
    language = _Language(template)
    if tool_choice == "required":
        chosen = [f for f in functions if tool_name in (None, f["name"])]
        if not chosen:
            missing = f"tool `{tool_name}`" if tool_name else "tool"
            raise UserError(f"there is no {missing} to call", hint="send it in `tools`")
        rules = language.calls("answer", chosen, several=several)
    elif json_schema is not None and functions:
        calls = language.calls("calls", functions, several=several)
        rules = ["answer: calls | json", *calls, f"json: {_json(json_schema)}"]
    elif json_schema is not None:
        rules = [f"answer: {_json(json_schema)}"]
    elif any(f.get("strict") for f in functions):
        rules = language.text_or_calls("answer", functions, several=several)
    else:
        return None
    grammar = "\n".join([*language.start("answer"), *rules])
    check(grammar)
    return grammar


def check(grammar: str) -> None:
    """Raises `UserError` if `grammar` cannot be compiled. Without llguidance, only engines can tell."""
    problem = _problem(grammar)
    if problem is not None:
        raise UserError(f"the answer cannot be constrained as requested: {problem}", hint="use a simpler JSON schema")


class _Language:
    """Grammar rules in the spelling of one model."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._format = template.traits.tool_format

    def start(self, answer: str) -> list[str]:
        """Optional reasoning, then `answer`."""
        think, thinking = self._template.traits.think, self._template.thinking
        if think is None or thinking == "none":
            return [f"start: {answer}"]
        begin = "" if thinking == "begun" else self._spelled(think[0])
        optional = "" if thinking == "begun" else "?"
        return [
            f"start: thought{optional} {answer}",
            f'thought: {begin} thinking ("\\n" "\\n"?)?',  # llguidance 1.7 cannot read `~0..2`
            *self._up_to("thinking", think[1]),
        ]

    def calls(self, rule: str, functions: Sequence[Function], *, several: bool) -> list[str]:
        """Tool calls alone."""
        return self._calls(rule, self._spelled(self._begin()), functions, several=several)

    def text_or_calls(self, rule: str, functions: Sequence[Function], *, several: bool) -> list[str]:
        """Free text, and perhaps calls. Once an answer looks like a call, it must follow the schema of a tool."""
        if self._format.spelling != "hermes":
            text = f"TEXT: {ANYTHING} & ~/{LOOKS_LIKE_A_CALL}/"
            return [f"{rule}: TEXT? | calls", text, *self.calls("calls", functions, several=several)]
        rest = self._spelled(self._begin().removeprefix(OPEN))
        rules = self._calls("calls", f"text {rest}", functions, several=several)
        return [f"{rule}: TEXT? | calls", f"TEXT: {_without(OPEN)}", *self._up_to("text", OPEN), *rules]

    def _calls(self, rule: str, begin: str, functions: Sequence[Function], *, several: bool) -> list[str]:
        between = self._format.between
        more = f" ({self._spelled(between)} call)*" if several and between is not None else ""
        rules = [f"{rule}: {begin} call{more} {self._spelled(self._format.end)}"]
        rules.append(f"call: {' | '.join(f'call_{place}' for place in range(len(functions)))}")
        for place, function in enumerate(functions):
            name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
            rules.append(f"call_{place}: {self._spelled(name + self._format.middle)} {_arguments(function)}")
        return rules

    def _begin(self) -> str:
        """How calls begin, without the empty reasoning that some templates put before them."""
        begin = self._format.begin
        return begin[begin.index(OPEN) :] if self._format.spelling == "hermes" else begin

    def _up_to(self, rule: str, tag: str) -> list[str]:
        """Any text, then `tag`."""
        if self._token(tag) is None:
            return [f"{rule}[lazy]: /(?s:.*){_pattern(tag)}/"]
        return [f"{rule}: {rule.upper()}_BEFORE? {self._spelled(tag)}", f"{rule.upper()}_BEFORE: {_without(tag)}"]

    def _spelled(self, text: str) -> str:
        """Text as a rule. Tags that are single tokens stay tokens: spelled in letters they would have other ids."""
        pieces, place = [], 0
        for tag in TAG.finditer(text):
            token = self._token(tag.group())
            if token is not None:
                pieces += [_literal(text[place : tag.start()]), f"<[{token}]>"]
                place = tag.end()
        return " ".join(piece for piece in [*pieces, _literal(text[place:])] if piece != '""')

    def _token(self, tag: str) -> int | None:
        ids = self._template.encode(tag)
        return ids[0] if len(ids) == 1 and self._template.is_added(ids[0]) else None


def _without(tag: str) -> str:
    """A terminal: any text in which `tag` does not appear."""
    return f"{ANYTHING} & ~/(?s:.*){_pattern(tag)}(?s:.*)/"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _literal(text: str) -> str:
    return json.dumps(text)


def _function(tool: Mapping[str, Any]) -> Function:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        hint = 'tools look like {"type": "function", "function": {"name": …, "parameters": …}}'
        raise UserError("a tool has no name", hint=hint)
    return function


def _arguments(function: Function) -> str:
    schema = function.get("parameters") or ANY_OBJECT
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        hint = 'its `parameters` need `"type": "object"`'
        raise UserError(f"the arguments of tool `{function['name']}` are no object", hint=hint)
    strict = bool(function.get("strict"))
    text = _json({"type": "object", **schema}, lenient=not strict)
    if not strict and _problem(f"start: {text}") is not None:
        return _json(ANY_OBJECT)  # only a strict tool needs its schema
    return text


def _json(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    options = {"whitespace_pattern": SPACES, "json_allowed_escapes": ESCAPES, **({"lenient": True} if lenient else {})}
    try:
        return "%json " + json.dumps({**schema, "x-guidance": options}, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"this is no JSON schema: {error}", hint="send plain JSON") from error


@lru_cache(maxsize=1024)
def _problem(grammar: str) -> str | None:
    """Why llguidance cannot compile `grammar`, in one line; None: it can. Needs no tokenizer."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        return None  # then no engine here applies grammars; a remote engine has to check them itself
    message = LLMatcher.validate_grammar(grammar).strip()
    if not message or message.startswith("WARNING"):
        return None
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message.splitlines()[0])
