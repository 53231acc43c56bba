"""Every fault of a publication is seen at once and named; `benchmarks/proof.py` measures how often."""

import asyncio

import numpy as np
import pytest

from benchmarks.proof import NAMED, Arm, DTypeName, Fault, run
from lightningrl.data.forest import Lesson
from lightningrl.engine.proof import BLOCK, CACHED, PROBES, contexts_of
from lightningrl.types import Transition


def seen(arm: Arm, *, steps: int, seed: int = 0) -> tuple[int | None, str]:
    """The version at which the engine was accused, and of what."""
    found = asyncio.run(run(arm, seed=seed, steps=steps))
    return found["version"], found["error"] or ""


@pytest.mark.parametrize("rate", [1e-6, 1e-4])
@pytest.mark.parametrize("fault", ["old", "cache", "raw"])
def test_faults_are_seen_at_the_first_version_in_bfloat16(fault: Fault, rate: float) -> None:
    version, error = seen(Arm(fault=fault, rate=rate, dtype="bfloat16"), steps=1)
    assert version == 1 and NAMED[fault] in error


@pytest.mark.parametrize(
    ("fault", "rank", "rate"), [("half", 0, 1e-6), ("half", 8, 1e-4), ("adapter", 8, 1e-6), ("adapter", 8, 1e-4)]
)
def test_faults_are_seen_at_the_first_version_in_float32(fault: Fault, rank: int, rate: float) -> None:
    version, error = seen(Arm(fault=fault, rate=rate, dtype="float32", rank=rank), steps=1)
    assert version == 1 and NAMED[fault] in error


def test_half_of_the_tensors_are_seen_in_bfloat16() -> None:
    version, error = seen(Arm(fault="half", rate=1e-4, dtype="bfloat16"), steps=2)
    assert version is not None and NAMED["half"] in error


def test_a_narrower_dtype_is_seen_before_the_first_step() -> None:
    version, error = seen(Arm(fault="dtype", rate=1e-6, dtype="float32"), steps=1)
    assert version == 0 and NAMED["dtype"] in error


@pytest.mark.parametrize(("dtype", "rank", "rate"), [("float32", 0, 1e-4), ("float32", 8, 1e-6), ("bfloat16", 0, 1e-6)])
def test_a_healthy_engine_is_not_accused(dtype: DTypeName, rank: int, rate: float) -> None:
    assert seen(Arm(fault="none", rate=rate, dtype=dtype, rank=rank), steps=2) == (None, "")


@pytest.mark.parametrize(("tasks", "samples", "count"), [(8, 8, 4), (64, 1, 4), (1, 64, 4)])
def test_probes_of_one_long_template_share_no_block_with_each_other(tasks: int, samples: int, count: int) -> None:
    """A cached probe would otherwise find keys and values of another one, computed in another piece of the prompt."""
    rng = np.random.default_rng(0)
    template, seen = rng.integers(0, 1000, 400), set[bytes]()
    prompts = [np.concatenate([template, rng.integers(0, 1000, 20)]) for _ in range(tasks)]
    contexts = contexts_of([lesson(prompt, rng.integers(0, 1000, count)) for prompt in prompts for _ in range(samples)])
    assert len(contexts) > 0.9 * PROBES
    for context in contexts[:CACHED]:
        assert len(context) > BLOCK and context[:BLOCK].tobytes() not in seen
        seen.add(context[:BLOCK].tobytes())


def test_short_contexts_stay_contexts() -> None:
    contexts = contexts_of([lesson(np.array([1, 2]), np.array([3, 4, 5]))])
    assert [context.tolist() for context in contexts] == [[1, 2], [2, 3], [3, 4]]


def lesson(prompt: np.ndarray, completion: np.ndarray) -> Lesson:
    """A lesson that trains all tokens of a completion."""
    count = len(completion)
    return Lesson(
        rollout_id="rollout",
        group_id="group",
        transition=Transition(
            call_id="call",
            parent_call_id=None,
            agent="",
            policy_version=0,
            prompt_ids=prompt.astype(np.int32),
            completion_ids=completion.astype(np.int32),
            logprobs=np.zeros(count, np.float32),
            reward=None,
        ),
        advantages=np.ones(count, np.float32),
        weights=np.ones(count),
    )
