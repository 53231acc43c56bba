"""Which tools does an answer ask for? `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write it."""

import re

import msgspec

OPEN = "<tool_call>"
BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class _Wish(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text before the first tool call, and (name, arguments) of each: the arguments' JSON byte for byte as it was written.

    `('', [('add', '{"a":  1}')])` for `<tool_call>{"name": "add", "arguments": {"a":  1}}</tool_call>`.
    One block that cannot be read makes the whole answer plain text: a guess at what was meant would be trained.
    """
    start = text.find(OPEN)
    blocks = BLOCK.findall(text)
    if start < 0 or len(blocks) != text.count(OPEN):
        return text, []
    try:
        wishes = [msgspec.json.decode(block, type=_Wish) for block in blocks]
        calls = [(wish.name, _object(wish.arguments)) for wish in wishes]
    except (msgspec.DecodeError, RecursionError):
        return text, []
    return text[:start].rstrip(), calls


def _object(raw: msgspec.Raw) -> str:
    """The JSON object in `raw`; some models wrap it in a string once more."""
    value = msgspec.json.decode(raw)
    if isinstance(value, str):
        msgspec.json.decode(value, type=dict)
        return value
    msgspec.convert(value, dict)
    return bytes(raw).decode()
