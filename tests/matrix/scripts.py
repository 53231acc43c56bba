"""The models of the matrix: scripts that read messages and tools, call the tool, then report its result.

The arguments have unusual white space and escapes, which no serialiser would write. The final answer must contain a
code that only the tool knows. Each answer is logged in `$MATRIX_SAID`, one JSON object a line, so that a test can
compare it with the captured tokens.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Answer = str | dict[str, Any]

ZURICH = '{"note":null,  "city" : "Zürich ❄","metric":true, "days":2 }'
OSLO = '{ "days": 3,"metric":false,"note":"say \\"cold\\" — \\u00e9\\n","city":"Oslo"}'
CODE = re.compile(r"code-[0-9a-f]+/\d+")


def noted(script: Callable[[str, Messages, Messages], Answer]) -> Callable[[str, Messages, Messages], Answer]:
    """A script that logs its answers."""

    def speak(prompt: str, messages: Messages, tools: Messages) -> Answer:
        said = script(prompt, messages, tools)
        line = json.dumps({"prompt": prompt, "said": {"content": said} if isinstance(said, str) else said})
        with open(os.environ["MATRIX_SAID"], "a", encoding="utf-8") as file:
            file.write(line + "\n")  # one write a line: scripts may run at the same time
        return said

    return speak


@noted
def weather(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """Call the tool, then report its result. To a second question, repeat the result."""
    if messages[-1]["role"] == "tool":
        return {"reasoning": "The tool has answered.", "content": f"The forecast is {_codes(messages)}."}
    if _codes(messages):
        return f"As I said: {_codes(messages)}."
    return {"reasoning": "I have to look.", "content": "Let me look.", "tool_calls": [_call("forecast", ZURICH)]}


@noted
def parallel(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """Two parallel calls, then both results."""
    if messages[-1]["role"] == "tool":
        return f"The forecasts are {_codes(messages)}."
    return {"content": "Let me look twice.", "tool_calls": [_call("forecast", ZURICH), _call("forecast", OSLO)]}


@noted
def silent(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """As `weather`, but without text beside the tool call and without reasoning."""
    if _codes(messages):
        return f"The forecast is {_codes(messages)}."
    return {"tool_calls": [_call("forecast", ZURICH)]}


@noted
def handoff(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """An agent that can hand over does so; an agent with the tool calls it twice in parallel."""
    names = [tool["function"]["name"] for tool in tools]
    transfer = next((name for name in names if name.startswith("transfer_to")), None)
    if transfer is not None:
        return {"content": "Somebody else knows.", "tool_calls": [_call(transfer, "{ }")]}
    if _codes(messages):
        return f"The forecasts are {_codes(messages)}."
    return {"reasoning": "Two places.", "tool_calls": [_call("forecast", ZURICH), _call("forecast", OSLO)]}


@noted
def structured(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """Call the tool, then give a structured answer: by a tool for final answers if there is one, otherwise as JSON."""
    if not _codes(messages):
        return {"reasoning": "First the tool.", "tool_calls": [_call("forecast", ZURICH)]}
    form = f'{{"codes":["{_codes(messages)}"] , "sure" : true,"doubt":null}}'
    final = next((tool["function"]["name"] for tool in tools if "final" in tool["function"]["name"]), None)
    return form if final is None else {"tool_calls": [_call(final, form)]}


@noted
def team(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """A forecaster with a tool, an editor without tools, and a selector that chooses between them."""
    if "role play game" in prompt or "select the next role" in prompt:
        return "editor" if "code-" in prompt else "forecaster"
    if not tools and "forecaster" not in messages[0]["content"]:
        return f"Printed: {_codes(messages)}. DONE"
    if _codes(messages):
        return f"The forecast is {_codes(messages)}."
    return {"content": "Let me look.", "tool_calls": [_call("forecast", ZURICH)]}


@noted
def smol(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """For smolagents: tool calls, the last for the final answer; or Python code."""
    codes = _codes(messages)
    if tools:
        if not codes:
            return {"content": "Let me look.", "tool_calls": [_call("forecast", ZURICH)]}
        return {"tool_calls": [_call("final_answer", f'{{"answer" :"The forecast is {codes}."}}')]}
    if not codes:
        code = 'found = forecast(city="Zürich ❄", days=2, metric=True, note=None)\nprint(found)'
    else:
        code = f'final_answer("The forecast is {codes}.")'
    return f"Thought: I write code.\n<code>\n{code}\n</code>"


@noted
def react(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """For an agent with raw prompts and the stop string `Observation:`."""
    if found := CODE.findall(prompt):
        return f" I know.\nFinal Answer: The forecast is {found[-1]}."
    return f" I have to look.\nAction: forecast\nAction Input: {ZURICH}\nObservation: none, this is cut off"


def _call(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}


def _codes(messages: Messages) -> str:
    """The codes in the conversation, all from the tool."""
    others = [message["content"] for message in messages if message["role"] != "assistant"]
    found = [code for content in others for code in CODE.findall(content)]
    return " and ".join(dict.fromkeys(found))
