"""Which tools does an answer call? Three spellings are parsed: those of Hermes (and Qwen), Llama 3 and Mistral.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them
    llama     {"name": …, "parameters": {…}}, and nothing else; several with `;` in between
    mistral   [{"name": …, "arguments": {…}}, …], and nothing else

The JSON of arguments is kept byte for byte. A call that cannot be parsed is text: a guess would be trained.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

Spelling = Literal["hermes", "llama", "mistral"]

BARE_TOKENS = ("<|python_tag|>", "[TOOL_CALLS]")
"""Control tokens before calls without tags, for tokenizers that show them."""
PREFIX = re.compile(rf"\s*(?:{'|'.join(map(re.escape, BARE_TOKENS))})?\s*")
SCANNER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model writes tool calls: `begin` name `middle` arguments (`between` name `middle` arguments)* `end`."""

    spelling: Spelling
    begin: str
    middle: str
    between: str | None
    """None: an answer has one call at most."""
    end: str


HERMES = ToolFormat(
    spelling="hermes",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)
"""Also assumed for templates that show no tool calls."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _Wish(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _BareWish(msgspec.Struct, forbid_unknown_fields=True):
    """An object with any other key is an answer in JSON, not a call."""

    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()
    type: str = "function"
    id: str = ""


class _Unreadable(Exception):
    pass


def parse(text: str, spelling: Spelling = "hermes") -> tuple[str, list[tuple[str, str]]]:
    """The text before the first tool call, and (name, arguments) of each call.

    `<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>` gives `('', [('add', '{"a":  1}')])`.
    One call that cannot be parsed makes the whole answer text.
    """
    try:
        return _marked(text) if spelling == "hermes" else ("", _bare(text))
    except (_Unreadable, ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return text, []


def may_be_bare(lead: str) -> bool:
    """Can an answer that begins with `lead`, which has no white space in front, be a call without tags?"""
    return lead[0] in "{[" or any(lead.startswith(token) or token.startswith(lead) for token in BARE_TOKENS)


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with, short of the whole marker."""
    place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while place >= 0:
        if marker.startswith(text[place:]):
            return len(text) - place
        place = text.find(marker[0], place + 1)
    return 0


def recognised(text: str, *, mark: str, count: int) -> ToolFormat | None:
    """The format of `text`, a rendering of `count` calls; None if this module does not parse it. The names of the calls
    and their only keys are `mark` and a number.
    """
    names = [f"{mark}{place}" for place in range(count)]
    arguments = [rf'\{{\s*"{name}"\s*:\s*{place}\s*\}}' for place, name in enumerate(names)]
    first, last = re.search(arguments[0], text), re.search(arguments[-1], text)
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
        raise _Unreadable  # a call has either `parameters` or `arguments`
    return [(wish.name, _object(bytes(wish.parameters) or bytes(wish.arguments))) for wish in listed]


def _object_at(text: str, place: int) -> tuple[int, int]:
    """Start and end of the JSON object at `place`."""
    begin = _skip(text, place)
    if not text.startswith("{", begin):
        raise _Unreadable
    return begin, SCANNER.raw_decode(text, begin)[1]


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _object(raw: bytes) -> str:
    """The JSON object in `raw`. Some models wrap it in a JSON string."""
    value = msgspec.json.decode(raw)
    if isinstance(value, str):
        msgspec.json.decode(value, type=dict)
        return value
    msgspec.convert(value, dict)
    return raw.decode()
