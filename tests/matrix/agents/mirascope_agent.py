"""Mirascope: a response that is resumed with the results of its tools."""

import sys

from mirascope import llm
from weather import QUESTION, answer, forecast

call = llm.call("openai/gpt-4o", tools=[llm.tool(forecast)])(lambda: QUESTION)
if "stream" in sys.argv:
    response = call.stream()
    response.finish()
else:
    response = call()
while response.tool_calls:
    response = response.resume(response.execute_tools())
    if "stream" in sys.argv:
        response.finish()
answer(response.text())
