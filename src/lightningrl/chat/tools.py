"""Which tools does an answer ask for? Three spellings are read, those of Hermes (and Qwen), Llama 3 and Mistral.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other
    llama     {"name": …, "parameters": {…}}, and nothing else; several with `;` in between
    mistral   [{"name": …, "arguments": {…}}, …], and nothing else

The arguments' JSON is kept byte for byte. What cannot be read is text: a guess at what was meant would be trained.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

Spelling = Literal["hermes", "llama", "mistral"]

BARE_TOKENS = ("<|python_tag|>", "[TOOL_CALLS]")
"""Control tokens before a bare call, should a tokenizer show them."""
PREFIX = re.compile(rf"\s*(?:{'|'.join(map(re.escape, BARE_TOKENS))})?\s*")
SCANNER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes its tool calls: `begin` name `middle` arguments (`between` name `middle` arguments)* `end`."""

    spelling: Spelling
    begin: str
    middle: str
    between: str | None
    """None: there is one call in an answer at most."""
    end: str


HERMES = ToolFormat(
    spelling="hermes",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)
"""Also what models are taken to write whose template shows no tool calls."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _Wish(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _BareWish(msgspec.Struct, forbid_unknown_fields=True):
    """Anything else in the object, and it is an answer in JSON."""

    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()
    type: str = "function"
    id: str = ""


class _Unreadable(Exception):
    pass


def parse(text: str, spelling: Spelling = "hermes") -> tuple[str, list[tuple[str, str]]]:
    """The text before the first tool call, and (name, arguments) of each.

    `('', [('add', '{"a":  1}')])` for `<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>`.
    One call that cannot be read makes the whole answer plain text.
    """
    try:
        return _marked(text) if spelling == "hermes" else ("", _bare(text))
    except (_Unreadable, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return text, []


def may_be_bare(lead: str) -> bool:
    """Can an answer that begins like this, without white space, be nothing but tool calls?"""
    return lead[0] in "{[" or any(lead.startswith(token) or token.startswith(lead) for token in BARE_TOKENS)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins, short of all of it."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place = text.find(marker[0], place + 1)
    return 0


def recognised(text: str, *, mark: str, count: int) -> ToolFormat | None:
    """The format in which `text` has `count` calls, whose names and only keys are `mark` and their number; None if it
    is not read here.
    """
    names = [f"{mark}{place}" for place in range(count)]
    arguments = [
        re.search(r"\{\s*\"" + name + r"\"\s*:\s*" + str(place) + r"\s*\}", text) for place, name in enumerate(names)
    ]
    first, last = arguments[0], arguments[-1]
    if first is None or last is None:
        return None
    begin, _, rest = text[: first.start()].partition(names[0])
    spelling: Spelling | None = None
    if OPEN in begin and begin.rstrip().endswith('"'):
        spelling = "hermes"
    elif PREFIX.fullmatch(begin.partition("{")[0].rstrip("[")) and begin.rstrip().endswith('"'):
        spelling = "mistral" if "[{" in begin else "llama"
    if spelling is None:
        return None
    between = text[first.end() : last.start()].partition(names[-1])[0] if count > 1 else None
    after = text[last.end() :]
    close = {"hermes": CLOSE, "llama": "}", "mistral": "]"}[spelling]
    end = after[: after.find(close) + len(close)]
    return ToolFormat(spelling=spelling, begin=begin, middle=rest, between=between, end=end)


def _marked(text: str) -> tuple[str, list[tuple[str, str]]]:
    place = text.find(OPEN)
    if place < 0:
        return text, []
    content, calls = text[:place].rstrip(), []
    while place >= 0:
        begin, end = _object_at(text, place + len(OPEN))
        wish = msgspec.json.decode(text[begin:end], type=_Wish)
        calls.append((wish.name, _object(bytes(wish.arguments))))
        after = _skip(text, end)
        if not text.startswith(CLOSE, after):
            raise _Unreadable
        place = text.find(OPEN, after + len(CLOSE))
    return content, calls


def _bare(text: str) -> list[tuple[str, str]]:
    found = PREFIX.match(text)
    place = found.end() if found else 0
    if text.startswith("[", place):
        listed = msgspec.json.decode(text[place:], type=list[_BareWish])
    else:
        listed = []
        while True:
            begin, end = _object_at(text, place)
            listed.append(msgspec.json.decode(text[begin:end], type=_BareWish))
            place = _skip(text, end)
            if place == len(text):
                break
            if text[place] != ";":
                raise _Unreadable
            place += 1
    if not listed or any(bool(bytes(wish.parameters)) == bool(bytes(wish.arguments)) for wish in listed):
        raise _Unreadable  # exactly one of the two
    return [(wish.name, _object(bytes(wish.parameters) or bytes(wish.arguments))) for wish in listed]


def _object_at(text: str, place: int) -> tuple[int, int]:
    """Begin and end of the JSON object at `place`."""
    begin = _skip(text, place)
    if not text.startswith("{", begin):
        raise _Unreadable
    return begin, SCANNER.raw_decode(text, begin)[1]


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _object(raw: bytes) -> str:
    """The JSON object in `raw`; some models wrap it in a string once more."""
    value = msgspec.json.decode(raw)
    if isinstance(value, str):
        msgspec.json.decode(value, type=dict)
        return value
    msgspec.convert(value, dict)
    return raw.decode()
