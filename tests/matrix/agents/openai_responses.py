"""OpenAI's SDK, responses: `previous` relies on server-side state; `items` sends all items back."""

import json
import sys

from openai import OpenAI
from weather import AGAIN, QUESTION, SCHEMA, answer, forecast

STREAM, PREVIOUS = "stream" in sys.argv, "previous" in sys.argv
TOOLS = [
    {
        "type": "function",
        "name": "forecast",
        "description": "Forecast the weather.",
        "parameters": SCHEMA,
        "strict": True,
    }
]


def ask(client, **what):
    if not STREAM:
        return client.responses.create(model="gpt-5", instructions="You know the weather.", tools=TOOLS, **what)
    with client.responses.stream(model="gpt-5", instructions="You know the weather.", tools=TOOLS, **what) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        return stream.get_final_response()


def run(client, items, last):
    while True:
        if PREVIOUS and last is not None:
            last = ask(client, input=items, previous_response_id=last.id)
        elif PREVIOUS:
            last = ask(client, input=items)
        else:
            last = ask(client, input=items, store=False, include=["reasoning.encrypted_content"])
        calls = [item for item in last.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": forecast(**json.loads(call.arguments))}
            for call in calls
        ]
        if PREVIOUS:
            items = results
        else:
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in last.output]
            items += results
        if not calls:
            return items, last


client = OpenAI()
items, last = run(client, [{"role": "user", "content": QUESTION}], None)
answer(last.output_text)
items, last = run(client, [*items, {"role": "user", "content": AGAIN}], last)
answer(last.output_text)
