"""Supervised learning that can stop, resume, and return to an earlier step."""

from pathlib import Path

import pytest

from lightningrl.models.tiny import build_model, build_tokenizer
from lightningrl.trainer.imitation import Example, Imitation, imitator, mean_loss, whole
from lightningrl.trainer.local import LocalTrainer
from tests.conftest import TEXTS


@pytest.fixture
def trainer() -> LocalTrainer:
    tokenizer = build_tokenizer(TEXTS, vocab_size=300)
    return imitator(build_model(len(tokenizer), hidden=32, layers=2, intermediate=64), tokenizer=tokenizer, threads=1)


SHOWN = [[Example(prompt_ids=[1, 2, number], completion_ids=[number, 3])] for number in range(10, 30)]


def course(trainer: LocalTrainer, *, steps: int = 30, seconds: float = 1e9, size: int = 8) -> Imitation:
    return Imitation(trainer, SHOWN, peak=1e-2, steps=steps, size=size, seed=0, seconds=seconds)


def test_it_returns_to_a_saved_step_and_repeats_the_same_steps(trainer: LocalTrainer, tmp_path: Path) -> None:
    made = course(trainer)
    made.advance(10)
    kept = made.save(tmp_path / "kept")
    first, reached = made.advance(15), mean_loss(trainer, SHOWN)
    made.back_to(kept, tmp_path / "kept")
    assert made.step == 10 and mean_loss(trainer, SHOWN) > reached
    assert (made.advance(15), mean_loss(trainer, SHOWN)) == (first, reached)


def test_it_ends_after_its_steps_or_seconds(trainer: LocalTrainer) -> None:
    made = course(trainer, steps=5)
    made.advance(99)
    assert (made.step, made.left) == (5, 0)
    hurried = course(trainer, steps=10**9, seconds=0.2)
    hurried.advance(10**9)
    assert 0 < hurried.step < 10**6


def test_a_batch_may_be_larger_than_the_demonstrations(trainer: LocalTrainer) -> None:
    made = course(trainer, steps=3, size=100)
    made.advance(3)
    assert made.step == 3


def test_whole_learns_the_rest_of_a_conversation() -> None:
    turns = [
        Example(prompt_ids=[1, 2], completion_ids=[3, 4]),
        Example(prompt_ids=[1, 2, 3, 4, 5, 6], completion_ids=[7, 8]),
    ]
    unlike = Example(prompt_ids=[1, 9, 3, 4, 5, 6], completion_ids=[8])
    for read in (turns, [*turns, unlike]):
        assert whole(read, prompt=False) == Example(prompt_ids=[1, 2], completion_ids=[3, 4, 5, 6, 7, 8])
        assert whole(read, prompt=True) == Example(prompt_ids=[1], completion_ids=[2, 3, 4, 5, 6, 7, 8])
