"""A ReAct agent: raw completions, with a stop string before the tool's result."""

import json
import sys

from openai import OpenAI
from weather import QUESTION, answer, forecast

client = OpenAI()
text = f"Question: {QUESTION}\nThought:"
for _ in range(3):
    said = client.completions.create(
        model="gpt-3.5-turbo-instruct", prompt=text, stop=["Observation:"], max_tokens=400, stream="stream" in sys.argv
    )
    text += "".join(chunk.choices[0].text for chunk in said) if "stream" in sys.argv else said.choices[0].text
    if "Final Answer:" in text:
        break
    arguments = text.rpartition("Action Input:")[2]
    text += f"Observation: {forecast(**json.loads(arguments))}\nThought:"
answer(text.rpartition("Final Answer:")[2].strip())
