"""The loader reads MuSiQue's files as they are downloaded; here small ones of the same layout."""

import json
from pathlib import Path
from typing import Any

import pytest


def row(number: int, *, answerable: bool = True) -> dict[str, Any]:
    """A question in the form of the data set."""
    paragraphs = [
        {"idx": 0, "title": "Green", "paragraph_text": "Green is an album by Steve Hillage.", "is_supporting": True},
        {
            "idx": 1,
            "title": "Steve Hillage",
            "paragraph_text": "Miquette Giraudy is his partner.",
            "is_supporting": True,
        },
        {"idx": 2, "title": f"Other {number}", "paragraph_text": "It rains.", "is_supporting": False},
    ]
    steps = [
        {"id": 1, "question": "Green >> performer", "answer": "Steve Hillage", "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> spouse", "answer": "Miquette Giraudy", "paragraph_support_idx": 1},
    ]
    return {
        "id": f"2hop__{number}",
        "paragraphs": paragraphs,
        "question": "Who is the spouse of the Green performer?",
        "question_decomposition": steps,
        "answer": "Miquette Giraudy",
        "answer_aliases": ["Miquette"],
        "answerable": answerable,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, numbers in (("train", (1, 2)), ("dev", (3,))):
        lines = [json.dumps(row(number)) for number in numbers]
        (tmp_path / f"musique_ans_v1.0_{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_questions_become_tasks_that_reward_and_search_understand(rag: Any, folder: Path) -> None:
    first, second = rag.musique.load(folder / "musique_ans_v1.0_train.jsonl")
    assert first["input"]["question"] == "Who is the spouse of the Green performer?"
    assert first["input"]["hops"] == 2
    assert first["id"] != second["id"]
    assert rag.tasks.reward(first["input"], "<answer>Miquette</answer>")["final"] == 1.0
    library = rag.search.library_of(first["input"])
    assert len(library.passages) == 4, "a paragraph of two questions counts once"
    assert library.search("Green performer album") == "- Green: Green is an album by Steve Hillage."


def test_tasks_of_the_folder_in_the_environment_follow_from_the_seed(
    rag: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSIQUE", str(folder))
    rows = rag.musique.tasks("train", seed=1, count=5)
    assert len(rows) == 5
    assert rows == rag.musique.tasks("train", seed=1, count=5)
    assert [row["id"] for row in rag.musique.tasks("heldout", seed=1, count=1)] == ["2hop__3-1"]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"id": "2hop__9", "question": ', "Expecting value"),
        ("[]", "not an object"),
        ('{"id": "2hop__9"}', "`question` is missing"),
        (json.dumps({**row(9), "answer": 3}), "`answer` is missing or not of type `str`"),
        (json.dumps({**row(9), "paragraphs": [{"idx": 0}]}), "a paragraph needs a `title`"),
        ("\udcff", "Expecting value"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(rag: Any, tmp_path: Path, broken: str, reason: str) -> None:
    file = tmp_path / "musique.jsonl"
    file.write_text(
        "\n".join([json.dumps(row(1)), "", broken, json.dumps(row(2))]), encoding="utf-8", errors="surrogateescape"
    )
    with pytest.warns(UserWarning, match=r"musique\.jsonl` line 3 is left out: .*" + reason):
        rows = rag.musique.load(file)
    assert [row["id"] for row in rows] == ["2hop__1-1", "2hop__2-4"]
    assert len(rag.musique.paragraphs(str(file))) == 4


def test_unanswerable_questions_are_skipped(rag: Any, tmp_path: Path) -> None:
    file = tmp_path / "musique.jsonl"
    file.write_text("\n".join([json.dumps(row(1)), json.dumps(row(1, answerable=False))]))
    assert len(rag.musique.load(file)) == 1


def test_a_file_without_a_question_is_named(rag: Any, tmp_path: Path) -> None:
    file = tmp_path / "musique.jsonl"
    file.write_text("")
    with pytest.raises(ValueError, match=r"musique\.jsonl"):
        rag.musique.load(file)


def test_a_missing_folder_is_named(rag: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSIQUE", raising=False)
    with pytest.raises(ValueError, match="MUSIQUE"):
        rag.musique.tasks("train", seed=0, count=1)
