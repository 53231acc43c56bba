"""Every fault of a publication is seen at once and named; `benchmarks/proof.py` measures how often."""

import asyncio

import pytest

from benchmarks.proof import NAMED, Arm, DTypeName, Fault, run


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
