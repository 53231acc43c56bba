"""The models for agents on Node and for coding agents; as in `scripts.py`."""

import json

from scripts import ZURICH, Answer, Messages, _call, _codes, noted

SHELLS = {"Bash": "command", "exec_command": "cmd", "run_shell_command": "command"}
"""Shell tool → its argument, for Claude Code, Codex, Gemini CLI."""
ERRAND = "Run what there is to run."


@noted
def structured(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """Call the tool, then give a structured answer: by the tool `json` if there is one, otherwise as JSON."""
    if not _codes(messages):
        return {"reasoning": "First the tool.", "tool_calls": [_call("forecast", ZURICH)]}
    form = f'{{"codes":["{_codes(messages)}"] , "sure" : true,"doubt":null}}'
    return {"tool_calls": [_call("json", form)]} if "json" in _names(tools) else form


@noted
def shell(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """Run two commands, one after the other, then report their output. To a second question, repeat the report."""
    if "complexity_score" in prompt:  # Gemini CLI asks which model to use
        return '{"complexity_reasoning": "Two commands.",  "complexity_score": 1}'
    found = _codes(messages)
    if found.count("code-") == 2:
        return {"reasoning": "That is all.", "content": f"It printed {found}."}
    return {"reasoning": "I need a shell.", "content": "Let me look.", "tool_calls": [_run(tools, 2 if found else 1)]}


@noted
def errand(prompt: str, messages: Messages, tools: Messages) -> Answer:
    """For Claude Code: a subagent on a smaller model runs both commands in parallel."""
    found = _codes(messages)
    if any(ERRAND in message["content"] for message in messages if message["role"] == "user"):
        return f"It printed {found}." if found else {"tool_calls": [_run(tools, 1), _run(tools, 2)]}
    if found:
        return f"I was told {found}."
    sent = {
        "description": "Look",
        "prompt": ERRAND,
        "subagent_type": "general-purpose",
        "model": "haiku",
        "run_in_background": False,
    }
    return {"content": "I send somebody.", "tool_calls": [_call("Agent", json.dumps(sent, indent=1))]}


def _run(tools: Messages, number: int) -> dict[str, str]:
    """A command that prints the code, which only its environment knows."""
    name = next(name for name in _names(tools) if name in SHELLS)
    command = json.dumps(f'echo "$MATRIX_CODE/{number}" | tee -a trace.txt')
    return _call(name, f'{{"{SHELLS[name]}"  :{command}}}')


def _names(tools: Messages) -> list[str]:
    return [tool["function"]["name"] for tool in tools]
