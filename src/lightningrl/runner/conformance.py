"""Checks that every runner passes. A plugin's tests call them: `for check in CHECKS: await check(make, folder)`.

`make(agent, root)` returns a runner that has not been started. `folder` is an empty folder to write to.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lightningrl.config import AgentConfig
from lightningrl.errors import UserError
from lightningrl.leases import Outcome
from lightningrl.runner.base import Runner
from lightningrl.runner.environment import addresses
from lightningrl.types import Attempt, Reward, Rollout, Task

MakeRunner: TypeAlias = Callable[[AgentConfig, Path], Runner]
Check: TypeAlias = Callable[[MakeRunner, Path], Awaitable[None]]

AGENT = """
import time

def run(task):
    match task["do"]:
        case "raise":
            raise ValueError("no luck\\nat all")
        case "hang":
            time.sleep(1000)
        case "object":
            return {"answer": object()}
        case "mutate":
            task["answer"] = None
    return {"said": [task["do"], 1]}

async def run_async(task):
    return run(task)

def reward(task, output):
    match task.get("grade"):
        case "raise":
            return 1 / 0
        case "steps":
            return {"final": 1, "format": 0.25}
        case "no final":
            return {"format": 0.25}
        case grade if grade is not None:
            return float(grade) if grade in ("nan", "inf") else grade
    return 1.0 if output == {"said": [task["do"], 1]} and "answer" not in task else 0.0
"""


def attempt(
    input: Mapping[str, Any], *, name: str = "1", timeout_s: float = 20.0
) -> tuple[Rollout, Attempt, dict[str, str]]:
    """Arguments of `Runner.run` for a task with this input."""
    rollout = Rollout(
        id=f"rollout-{name}", group_id="group", task=Task(id=name, input=input, split="train"), timeout_s=timeout_s
    )
    env = addresses("http://127.0.0.1:9", key=f"token-{name}")
    return rollout, Attempt(id=f"attempt-{name}", rollout_id=rollout.id, number=1, token=f"token-{name}"), env


async def outcomes(
    make: MakeRunner, folder: Path, *inputs: Mapping[str, Any], entry: str = "agent:run", timeout_s: float = 20.0
) -> list[Outcome]:
    """The outcomes of these tasks when they run concurrently."""
    (folder / "agent.py").write_text(AGENT)
    agent = {"entry": entry, "reward": "agent:reward", "workers": 1, "concurrency": 8}
    runner = make(AgentConfig.model_validate(agent), folder)
    await runner.start()
    try:
        return await asyncio.gather(
            *(runner.run(*attempt(task, name=str(i), timeout_s=timeout_s)) for i, task in enumerate(inputs))
        )
    finally:
        await runner.close()


async def answers_and_rewards_come_back(make: MakeRunner, folder: Path) -> None:
    for entry in ("agent:run", "agent:run_async"):
        first, second = await outcomes(make, folder, {"do": "a"}, {"do": "b", "grade": "steps"}, entry=entry)
        assert first == Outcome(
            status="succeeded", output={"said": ["a", 1]}, rewards=(Reward(attempt_id="attempt-0", value=1.0),)
        )
        assert {(r.attempt_id, r.name, r.value, r.source) for r in second.rewards} == {
            ("attempt-1", "final", 1.0, "grader"),
            ("attempt-1", "format", 0.25, "grader"),
        }


async def the_grader_sees_the_task_as_it_was(make: MakeRunner, folder: Path) -> None:
    (outcome,) = await outcomes(make, folder, {"do": "mutate"})
    assert [r.value for r in outcome.rewards] == [1.0], outcome


async def an_agent_that_raises_fails_without_a_reward(make: MakeRunner, folder: Path) -> None:
    raised, unserialisable = await outcomes(make, folder, {"do": "raise"}, {"do": "object"})
    for outcome in (raised, unserialisable):
        assert outcome.status == "failed" and outcome.rewards == () and outcome.error
    assert raised.error and raised.error.splitlines()[0] == "AgentError: ValueError: no luck"
    assert 'raise ValueError("no luck\\nat all")' in raised.error, "the traceback follows"
    assert unserialisable.error and unserialisable.error.startswith("AgentError: ") and "hint: " in unserialisable.error


async def a_grader_that_fails_is_blamed_and_is_no_reward_of_zero(make: MakeRunner, folder: Path) -> None:
    grades = ["raise", "nan", "inf", "no final", "0.5", {"final": None}, [1]]
    graded = await outcomes(make, folder, *({"do": "a", "grade": grade} for grade in grades))
    for grade, outcome in zip(grades, graded, strict=True):
        assert outcome.status == "failed" and outcome.rewards == (), (grade, outcome)
        assert outcome.error and outcome.error.startswith("GraderError: "), (grade, outcome)
        assert outcome.output == {"said": ["a", 1]}, "the agent's answer is kept"


async def a_hang_ends_on_time_and_harms_no_other_attempt(make: MakeRunner, folder: Path) -> None:
    async with asyncio.timeout(15):
        hung, fine = await outcomes(make, folder, {"do": "hang"}, {"do": "a"}, timeout_s=1.0)
    assert hung.status == "timeout" and hung.rewards == () and hung.error and hung.error.startswith("AgentError: ")
    assert fine.status == "succeeded" and math.isclose(fine.rewards[0].value, 1.0)


async def broken_code_is_refused_at_the_start(make: MakeRunner, folder: Path) -> None:
    (folder / "agent.py").write_text(AGENT)
    (folder / "broken.py").write_text("import agent\nraise OSError('no disk')\n")
    (folder / "script.py").write_text("import sys\nsys.exit(3)\n")
    for entry, reward, text in [
        ("absent:run", "agent:reward", "absent"),
        ("agent:walk", "agent:reward", "walk"),
        ("agent:AGENT", "agent:reward", "AGENT"),
        ("broken:run", "agent:reward", "OSError: no disk"),
        ("script:run", "agent:reward", "SystemExit"),
        ("agent:run", "agent:praise", "praise"),
    ]:
        runner = make(AgentConfig.model_validate({"entry": entry, "reward": reward, "workers": 1}), folder)
        try:
            await runner.start()
        except UserError as error:
            assert text in error.message and error.hint, (entry, str(error))
        else:
            raise AssertionError(f"`{entry}` with `{reward}` was accepted")
        finally:
            await runner.close()


CHECKS: tuple[Check, ...] = (
    answers_and_rewards_come_back,
    the_grader_sees_the_task_as_it_was,
    an_agent_that_raises_fails_without_a_reward,
    a_grader_that_fails_is_blamed_and_is_no_reward_of_zero,
    a_hang_ends_on_time_and_harms_no_other_attempt,
    broken_code_is_refused_at_the_start,
)
