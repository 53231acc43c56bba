"""A recipe that a tiny model learns in seconds: repeat the colour in the question."""

from pathlib import Path

import pytest

AGENT = '''
from functools import cache

from openai import OpenAI

client = cache(OpenAI)
COLOURS = ("red", "green", "blue", "black", "white", "grey", "pink", "brown")
SYSTEM = "say the colour"


def run(task):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    return client().chat.completions.create(model="policy", messages=messages, max_tokens=4).choices[0].message.content


def reward(task, answer):
    return float(answer == task["colour"])


def tasks(split, *, seed, count):
    made = []
    for index in range(count):
        colour, thing = COLOURS[(seed + index) % len(COLOURS)], ("cat", "hat")[split == "heldout"]
        made.append({"input": {"question": f"the {thing} {index} is {colour}", "colour": colour}})
    return made


def teacher(prompt, messages, tools):
    """Gives a wrong answer to every fourth question."""
    words = messages[-1]["content"].split()
    return "grey" if int(words[2]) % 4 == 3 else words[-1]


def conversations(*, seed, count):
    rows = [task["input"] for task in tasks("train", seed=seed, count=count)]
    return [{"messages": [*asked(row["question"]), {"role": "assistant", "content": row["colour"]}]} for row in rows]


def asked(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def strangers(*, seed, count):
    """Without the agent's system prompt."""
    return [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "red"}]}] * count
'''
RECIPE = """
name = "colours"
[agent]
entry = "parrot:run"
reward = "parrot:reward"
workers = 1
concurrency = 32
[tasks]
source = "parrot:tasks"
[model]
path = "warmstart"
[engine]
slots = 32
max_length = 64
[warmstart]
teacher = "parrot:teacher"
count = 200
steps = 60
batch = 8
learning_rate = 1e-2
shape = {hidden = 32, layers = 2, heads = 2, kv_heads = 1, head_size = 16, intermediate = 64}
"""


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """The recipe's folder."""
    (tmp_path / "parrot.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path
