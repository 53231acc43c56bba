"""Tasks and the reward. Worlds and questions depend on (split, seed) alone."""

import random
from collections.abc import Mapping
from typing import Any

from questions import Question, random_question
from score import score


def tasks(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` tasks of `train`, `heldout` or `ood`.

    Names and compositions of `train` never occur in the others. Questions of `ood` take four steps.
    """
    return [
        as_task(question, f"{split}-{seed}-{index}")
        for index, question in enumerate(questions(split, seed=seed, count=count))
    ]


def ood(split: str, *, seed: int, count: int) -> list[dict[str, Any]]:
    """The same, but with `ood` as the held-out split."""
    return tasks("train" if split == "train" else "ood", seed=seed, count=count)


def questions(split: str, *, seed: int, count: int) -> list[Question]:
    """The same tasks as `Question`s."""
    return [random_question(random.Random(f"{split}-{seed}-{index}"), split) for index in range(count)]


def as_task(question: Question, task_id: str) -> dict[str, Any]:
    """A task's row. The agent reads `question` and searches in `world`; the grader reads the rest."""
    row = {"question": question.text, "world": question.world, "hops": len(question.chain)}
    return {"id": task_id, "input": {**row, "answer": question.answer}}


def reward(task_input: Mapping[str, Any], output: object) -> dict[str, float]:
    """`final` = 0.9 · F1 + 0.1 · format, and both parts."""
    answer = output.get("answer") if isinstance(output, Mapping) else output
    golds = (task_input["answer"], *task_input.get("aliases", ()))
    return score(answer if isinstance(answer, str) else "", golds)
