"""Anthropic's SDK: a hand-written loop, with a system prompt in blocks and a cache marker that moves."""

import sys

import anthropic
from weather import AGAIN, QUESTION, SCHEMA, answer, forecast

TOOLS = [{"name": "forecast", "description": "Forecast the weather.", "input_schema": SCHEMA}]
SYSTEM = [{"type": "text", "text": "You know the weather.", "cache_control": {"type": "ephemeral"}}]


def ask(client, messages):
    marked = [*messages[:-1], mark(messages[-1])]
    what = {"model": "claude-sonnet-4-5", "max_tokens": 1000, "system": SYSTEM, "tools": TOOLS, "messages": marked}
    if "stream" not in sys.argv:
        return client.messages.create(**what)
    with client.messages.stream(**what) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def mark(message):
    """The cache marker is on the last block of the last message."""
    blocks = message["content"]
    return {**message, "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}


def run(client, messages):
    while True:
        said = ask(client, messages)
        messages.append({"role": "assistant", "content": said.content})
        if said.stop_reason != "tool_use":
            return "".join(block.text for block in said.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": forecast(**block.input)}
            for block in said.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


client = anthropic.Anthropic()
messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
answer(run(client, messages))
messages.append({"role": "user", "content": [{"type": "text", "text": AGAIN}]})
answer(run(client, messages))
