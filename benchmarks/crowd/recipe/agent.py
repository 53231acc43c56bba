"""An agent that does nothing, or asks the model as often as its task says. A script stands in for the model."""

import asyncio
import json
import os
import urllib.request
from typing import Any


def run(task: dict[str, Any]) -> int:
    for _ in range(task.get("calls", 0)):
        ask()
    return task["number"]


def ask() -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "say a word"}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60).read()


def reward(task: dict[str, Any], output: int) -> float:
    return 1.0


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    return [{"id": str(number), "input": {"number": number}} for number in range(count)]


def script(prompt: str, messages: list[Any], tools: list[Any]) -> str:
    return "yes"


async def slow_script(prompt: str, messages: list[Any], tools: list[Any]) -> str:
    await asyncio.sleep(0.05)
    return "yes"
