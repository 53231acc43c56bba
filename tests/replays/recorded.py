"""A run of a small agent with a tool, answered by a script: recorded in a second, and replayed without torch."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from lightningrl.agents import running_agents
from lightningrl.chat import ChatTemplate
from lightningrl.engines import make_engine
from lightningrl.gateway.assembly import make_gateway
from lightningrl.gateway.scripted import PLAIN
from lightningrl.gateway.server import bound
from lightningrl.recipe import dump_config, load_config
from lightningrl.store import open_store, wait
from lightningrl.store.place import url_of
from lightningrl.types import Rollout, Task

AGENT = '''
"""It asks for a number three times, and is told each time how far the sum is from the goal."""
import os
import requests

SYSTEM = "say one number"


def ask(messages):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    body = {"model": "policy", "messages": messages}
    answer = requests.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def check(total, goal):
    return f"{goal - total} to go"


def run(task):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"reach {task['goal']}"}]
    total = 0
    for turn in range(3):
        answer = ask(messages)
        total += int(answer)
        told = check(total, task["goal"])
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": told}]
    return {"total": total}


def reward(task, output):
    return 1.0 if output["total"] == task["goal"] else 0.0


def tasks(split, *, seed, count):
    return [{"id": str(goal), "input": {"goal": goal}} for goal in range(3, 3 + count)]
'''

SCRIPTS = '''
"""Scripts in the place of the model."""
from itertools import count

counted = count(1)


def ones(prompt, messages, tools):
    """One, each time; no number for the goal 99."""
    return "none" if messages[1]["content"] == "reach 99" else "1"


def counting(prompt, messages, tools):
    return str(next(counted))
'''

RECIPE = """
name = "sums"
[agent]
entry = "agent:run"
reward = "agent:reward"
workers = 1
timeout_s = 30.0
max_attempts = 1
[tasks]
source = "agent:tasks"
[model]
path = "PLAIN"
[engine]
name = "scripts:ones"
max_length = 100000
"""

GOALS = {"train-00000-000-00": 3, "train-00000-001-00": 4, "train-00001-000-00": 5, "exam-00001-greedy-0000": 3}
"""Rollout → goal. The first and the last one get the reward 1."""
FAILED = "train-00001-001-00"


@dataclass(frozen=True)
class Recorded:
    """The folder of a run, and that of its recipe."""

    run: Path
    recipe: Path

    def changed(self, folder: Path, before: str, after: str) -> str:
        """The override for a copy of the recipe in `folder` with another agent."""
        assert before in AGENT
        write(folder, agent=AGENT.replace(before, after))
        return f"root={folder}"


def write(folder: Path, *, agent: str = AGENT) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(agent)
    (folder / "scripts.py").write_text(SCRIPTS)
    (folder / "recipe.toml").write_text(RECIPE.replace("PLAIN", str(PLAIN)))


def record(folder: Path) -> Recorded:
    """Run the agent on `GOALS`, and on a goal with which it fails."""
    recorded = Recorded(run=folder / "run", recipe=folder / "recipe")
    write(recorded.recipe)
    asyncio.run(_record(recorded))
    return recorded


async def _record(recorded: Recorded) -> None:
    config, template = load_config(recorded.recipe), ChatTemplate.load(PLAIN)
    recorded.run.mkdir()
    (recorded.run / "config.toml").write_text(dump_config(config))
    store = await open_store(url_of(recorded.run), exclusive=True)
    engine = make_engine(config, "policy", folder=PLAIN, template=template)
    gateway = make_gateway(config, store=store, template=template, engines={"policy": engine})
    rollouts = [
        Rollout(
            id=rollout_id,
            group_id=rollout_id,
            task=Task(id=str(goal), input={"goal": goal}, split="heldout" if "exam" in rollout_id else "train"),
            sampling={"temperature": 0.0 if "greedy" in rollout_id else 1.0, "seed": goal},
        )
        for rollout_id, goal in {**GOALS, FAILED: 99}.items()
    ]
    with bound(config.gateway) as sock:
        async with running_agents(config, gateway, sock, recorded.run, store=store):
            await store.enqueue(rollouts)
            ended = await wait(store, [rollout.id for rollout in rollouts], timeout_s=60)
    await store.close()
    assert {rollout.id for rollout in ended if rollout.status == "succeeded"} == set(GOALS)
