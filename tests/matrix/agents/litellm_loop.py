"""LiteLLM: a hand-written loop over OpenAI, Anthropic or Gemini."""

import json
import sys

import litellm
from weather import QUESTION, SCHEMA, answer, forecast

MODEL = {"openai": "openai/gpt-4o", "anthropic": "anthropic/claude-sonnet-4-5", "gemini": "gemini/gemini-2.5-flash"}[
    sys.argv[1]
]
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "description": "Forecast the weather.", "parameters": SCHEMA}}
]


def ask(messages):
    if "stream" not in sys.argv:
        return litellm.completion(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    chunks = list(litellm.completion(model=MODEL, messages=messages, tools=TOOLS, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


messages = [{"role": "system", "content": "You know the weather."}, {"role": "user", "content": QUESTION}]
while True:
    message = ask(messages)
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": forecast(**json.loads(call.function.arguments))}
        )
answer(message.content)
