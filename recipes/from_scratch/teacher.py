"""Plays a model that can do the task. `lightningrl warmstart recipe.toml` makes a model that imitates it."""

import re
from typing import Any


def teacher(prompt: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
    """The next answer in the agent's conversation: a text, or a list of tool calls."""
    word, link, person = re.findall(r"the (\w+) of the (\w+) of (\w+)", messages[1]["content"])[0]
    found = [message["content"] for message in messages if message["role"] == "tool"]
    if len(found) == 2:
        return found[1]
    fact = f"{word} of {found[0]}" if found else f"{link} of {person}"
    return [{"name": "look_up", "arguments": {"fact": fact}}]
