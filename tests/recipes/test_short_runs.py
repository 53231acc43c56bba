"""`make recipes` notices a recipe that did not learn, or whose calls are forked instead of bridged."""

from dataclasses import replace

import pytest

from benchmarks.recipes import Row

LEARNT = Row(
    before=0.2,
    after=0.5,
    standard_errors=6.0,
    tasks=100,
    rollouts=1552,
    failed=0,
    calls_per_rollout=3.0,
    bridged=0.6,
    partly=0.0,
    rendered=0.3,
    forked=0.1,
    partly_reasons={},
    fork_reasons={"as the agent means it": 1552},
    prompt_tokens=50.0,
    reused_tokens=40.0,
    sampled_tokens=5.0,
    seconds=60.0,
    cpu_s={},
)
MEANT = {"as the agent means it": "it asks once more, without tools"}


def test_a_recipe_that_learnt_and_whose_forks_are_meant_passes() -> None:
    assert LEARNT.broken(MEANT) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            replace(LEARNT, after=0.2001, standard_errors=1.9),
            "did not rise beyond chance: 0.200 → 0.200 is +1.9 standard errors",
        ),
        (replace(LEARNT, standard_errors=float("nan")), "did not rise beyond chance"),
        (replace(LEARNT, fork_reasons={"as the agent means it": 1553}), "1553 calls in 1552 rollouts were forked"),
        (replace(LEARNT, fork_reasons={"another reason": 1}), "1 calls in 1552 rollouts were forked"),
        (replace(LEARNT, partly_reasons={"another reason": 2}), "2 calls were bridged only partly: another reason"),
    ],
)
def test_each_problem_is_reported(row: Row, said: str) -> None:
    (complaint,) = row.broken(MEANT)
    assert said in complaint
