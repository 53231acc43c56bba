"""OpenAI's SDK, chat completions: a hand-written loop, then a second question."""

import json
import sys

from openai import OpenAI
from weather import AGAIN, QUESTION, SCHEMA, answer, forecast

STREAM = "stream" in sys.argv
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "description": "Forecast the weather.", "parameters": SCHEMA}}
]


def ask(client, messages):
    if not STREAM:
        return client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS).choices[0].message
    with client.chat.completions.stream(
        model="gpt-5", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
    ) as stream:
        for event in stream:
            assert event.type != "error"
        completion = stream.get_final_completion()
    assert completion.usage.completion_tokens > 0
    return completion.choices[0].message


def run(client, messages):
    while True:
        message = ask(client, messages)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": forecast(**json.loads(call.function.arguments))}
            )


client = OpenAI()
messages = [{"role": "developer", "content": "You know the weather."}, {"role": "user", "content": QUESTION}]
answer(run(client, messages))
messages.append({"role": "user", "content": AGAIN})
answer(run(client, messages))
