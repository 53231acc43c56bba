"""What are the habits of a chat template? `study` renders small conversations with marks in them, to find out."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightningrl.chat.rendering import MARK
from lightningrl.chat.tools import HERMES, ToolFormat, recognised
from lightningrl.chat.turns import Arguments

Turn: TypeAlias = dict[str, Any]
Render: TypeAlias = Callable[[list[Turn], Sequence[Mapping[str, Any]], bool], str]
"""(turns, tools, open_turn) → text. It raises whatever a template may raise."""

THINKING = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<seed:think>", "</seed:think>"))
"""The tags that open models put around their reasoning."""

USER: Turn = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}

SHORT_ID = 9
"""Length of the tool call ids that Mistral's templates insist on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The habits of one template."""

    opening: str
    """The reasoning at the end of the generation prompt, e.g. `<think>` and a line break; "" if there is none."""
    think: tuple[str, str] | None
    """The tags around reasoning; None: the template has none."""
    opens_thought: bool
    """The generation prompt ends within reasoning."""
    tool_format: ToolFormat
    reads_calls: bool
    """The template writes tool calls in a spelling of `chat.tools`. False: in another one, or not at all."""
    shows_tools: bool
    """False: the prompt does not depend on the tools."""
    shows_results: bool
    """False: the template refuses or hides the results of tools."""
    system: Literal["anywhere", "first", "never"]
    """Where system messages may stand."""
    users_in_a_row: bool
    """User messages may follow each other."""
    developer: bool
    """The role `developer` has a meaning of its own."""
    short_ids: bool
    """Tool call ids must have nine characters."""


def study(render: Render, source: str) -> Traits:
    """The habits of the template with this source. Raises what the template raises for a plain conversation."""
    think = next((tags for tags in THINKING if tags[1] in source), None)
    closed, opening = render([USER], (), False), _opening(render([USER], (), True), think)
    tool_format = _tool_format(render, opening, think)
    short_ids = not _can(render, _called("call_0123456789")) and _can(render, _called("a" * SHORT_ID))
    system: Turn = {"role": "system", "content": MARK}
    reply: Turn = {"role": "assistant", "content": "y"}
    stands: Literal["anywhere", "first", "never"] = "never"
    if _shows(render, [system, USER]):
        stands = "anywhere" if _shows(render, [USER, reply, system, USER]) else "first"
    return Traits(
        opening=opening,
        think=think,
        opens_thought=think is not None and opening != "" and think[1] not in opening,
        tool_format=tool_format or HERMES,
        reads_calls=tool_format is not None,
        shows_results=_shows(render, _called("a" * SHORT_ID if short_ids else "call_0123456789")),
        shows_tools=_attempt(render, [USER], (TOOL,)) != closed,
        system=stands,
        users_in_a_row=_can(render, [USER, USER]),
        developer="developer" in source,
        short_ids=short_ids,
    )


def _opening(prompt: str, think: tuple[str, str] | None) -> str:
    """The reasoning at the end of a prompt: its opening tag, or both tags."""
    if think is None:
        return ""
    begin, end = map(re.escape, think)
    found = re.search(rf"{begin}\s*({end}\s*)?\Z", prompt)
    return found.group() if found else ""


def _tool_format(render: Render, opening: str, think: tuple[str, str] | None) -> ToolFormat | None:
    """The format of tool calls, from a rendering of two calls, or of one if the template allows only one. None:
    `chat.tools` does not parse it.
    """
    for count in (2, 1):
        calls = [_call(str(place) * SHORT_ID, f"{MARK}{place}", {f"{MARK}{place}": place}) for place in range(count)]
        text = _attempt(render, [USER, {"role": "assistant", "content": "", "tool_calls": calls}], (TOOL,))
        prompt = (_attempt(render, [USER], (TOOL,), open_turn=True) or "").removesuffix(opening)
        if text is not None and text.startswith(prompt):
            said = text.removeprefix(prompt)
            end = think[1] if think is not None and think[1] in said else ""
            return recognised(said.partition(end)[2].lstrip() if end else said, mark=MARK, count=count)
    return None


def _called(call_id: str) -> list[Turn]:
    asked: Turn = {"role": "assistant", "content": "", "tool_calls": [_call(call_id, "look", {"at": "z"})]}
    return [USER, asked, {"role": "tool", "content": MARK, "tool_call_id": call_id}]


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": Arguments(arguments, json.dumps(arguments))},
    }


def _can(render: Render, turns: list[Turn]) -> bool:
    return _attempt(render, turns, ()) is not None


def _shows(render: Render, turns: list[Turn]) -> bool:
    return MARK in (_attempt(render, turns, ()) or "")


def _attempt(
    render: Render, turns: list[Turn], tools: Sequence[Mapping[str, Any]], *, open_turn: bool = False
) -> str | None:
    """The rendering; None: the template refuses."""
    try:
        return render(turns, tools, open_turn)
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None
