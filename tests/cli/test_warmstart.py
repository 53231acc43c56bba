"""The command line that every recipe's `warmstart.py` has, on a recipe of five sentences."""

import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lightningrl.cli.warmstart import Warmstart, main
from lightningrl.models.tiny import build_tokenizer
from lightningrl.trainer.imitation import Example, whole
from tests.conftest import TEXTS

ABOUT = """Makes a model of five sentences.

python make.py               writes `warmstart`
python make.py --out other   writes another one
"""
Make = Callable[..., tuple[int, str]]


def demonstrations(*, seed: int, count: int, perfect: bool) -> list[str]:
    texts = TEXTS[:1] if perfect else TEXTS
    return [texts[(seed + number) % len(texts)] for number in range(count)]


def tokenizer_for(shown: Sequence[str]) -> Any:
    return build_tokenizer(shown, vocab_size=300)


def examples(text: str, tokenizer: Any) -> list[Example]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return [Example(prompt_ids=ids[:1], completion_ids=ids[1:])]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Make:
    recipe = Warmstart(
        folder=tmp_path / "warmstart",
        demonstrations=demonstrations,
        tokenizer_for=tokenizer_for,
        examples=examples,
        count=20,
        steps=2,
        batch=4,
        hidden=32,
        layers=2,
        shape={"intermediate": 64},
    )

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["make.py", *arguments])
        with pytest.raises(SystemExit) as done:
            main(recipe, about=ABOUT)
        said = capsys.readouterr()
        return int(done.value.code or 0), said.out + said.err

    return run


def weights(make: Make, folder: Path, *arguments: str) -> str:
    """Their hash, made into `folder`."""
    code, said = make(*arguments, "--out", str(folder))
    assert code == 0, said
    return sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_command_makes_the_same_weights_and_another_seed_or_order_others(make: Make, tmp_path: Path) -> None:
    first = weights(make, tmp_path / "first")
    assert weights(make, tmp_path / "again") == first
    assert len({first, weights(make, tmp_path / "other", "--seed", "1"), weights(make, tmp_path / "reordered", "--order", "1")}) == 3


def test_it_goes_on_from_a_folder_with_the_tokenizer_that_is_there_until_time_is_up(make: Make, tmp_path: Path) -> None:
    first = weights(make, tmp_path / "first")
    on = ("--continue", str(tmp_path / "first"), "--perfect")  # a tokenizer of its own would know fewer words
    assert weights(make, tmp_path / "on", *on, "--steps", "1000000000", "--seconds", "0.3") != first
    assert (tmp_path / "on" / "tokenizer.json").read_text() == (tmp_path / "first" / "tokenizer.json").read_text()
    assert weights(make, tmp_path / "kept", *on, "--seconds", "1e-9") == first


def test_reading_learns_the_rest_of_a_conversation_before_its_answers(make: Make, tmp_path: Path) -> None:
    assert weights(make, tmp_path / "read", "--reading", "1") != weights(make, tmp_path / "unread")
    turns = [Example(prompt_ids=[1, 2], completion_ids=[3, 4]), Example(prompt_ids=[1, 2, 3, 4, 5, 6], completion_ids=[7, 8])]
    unlike = Example(prompt_ids=[1, 9, 3, 4, 5, 6], completion_ids=[8])
    for read in (turns, [*turns, unlike]):
        assert whole(read, prompt=False) == Example(prompt_ids=[1, 2], completion_ids=[3, 4, 5, 6, 7, 8])
        assert whole(read, prompt=True) == Example(prompt_ids=[1], completion_ids=[2, 3, 4, 5, 6, 7, 8])


def test_a_folder_without_a_model_is_told_of(make: Make, tmp_path: Path) -> None:
    code, said = make("--continue", str(tmp_path / "nothing"))
    assert code == 2
    assert "no model folder at" in said and "hint:" in said


def test_help_shows_the_recipes_own_numbers_and_words(make: Make) -> None:
    code, said = make("--help")
    assert code == 0
    assert [line for line in ABOUT.splitlines() if line not in said] == []
    assert "[default: 20]" in said
