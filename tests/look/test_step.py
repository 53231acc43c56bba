"""Steps are computed once, as long as their records are the same."""

import asyncio

import numpy as np
import pytest

from lightningrl.config import AlgorithmConfig
from lightningrl.look import step as module
from lightningrl.look.step import PolicyStep, Steps, StepTaught
from tests.algorithms.rollouts import call, rollout


def taught(tokens: int) -> StepTaught:
    one = rollout("a", 1.0, call("a/0", prompt=np.arange(tokens).tolist(), tokens=0))
    policy = PolicyStep(algorithm=AlgorithmConfig(), own=frozenset(), trajectories={"a": one}, accounts={}, taught=None)
    return StepTaught(policies={"policy": policy})


class Made:
    """Counts how often a step is made."""

    def __init__(self, tokens: int = 1) -> None:
        self.times, self.tokens = 0, tokens

    async def __call__(self) -> StepTaught:
        self.times += 1
        await asyncio.sleep(0.01)
        return taught(self.tokens)


async def test_people_who_ask_at_the_same_time_wait_for_one_computation() -> None:
    steps, made = Steps(), Made()
    found = await asyncio.gather(*(steps.of(3, state=True, make=made) for _ in range(5)))
    assert made.times == 1 and all(one is found[0] for one in found)


async def test_a_step_with_new_records_is_computed_again() -> None:
    steps, made = Steps(), Made()
    for state in ("half", "half", "more", "complete", "complete"):
        await steps.of(3, state=state, make=made)
    assert made.times == 3


async def test_the_steps_that_nobody_has_looked_at_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2**20)
    half = module.MOST_BYTES // 8 + 1
    steps = Steps()
    made = [Made(half) for _ in range(3)]
    for step in (0, 1, 0, 2, 0, 1):
        await steps.of(step, state=True, make=made[step])
    assert [one.times for one in made] == [3, 2, 1]
