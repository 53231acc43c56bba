"""The loader reads Calc-X's files as they are downloaded; here small ones with the same columns."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

CHAIN = '<gadget id="calculator">37 * 48</gadget>\n<output>1776</output>\n<result>1776</result>'
ROWS = [
    {
        "id": "gsm8k__a",
        "source_ds": "gsm8k",
        "question": "Ann has 37 boxes of 48 eggs. How many eggs?",
        "chain": CHAIN,
        "result": "1776",
    },
    {
        "id": "ape210k__b",
        "question": "What is two thirds?",
        "chain": "",
        "result": "2/3",
        "result_float": 0.6666,
        "equation": "x=2/3",
    },
    {
        "id": "ape210k__c",
        "question": "One and three quarters?",
        "chain": "",
        "result": "1_3/4",
        "result_float": 1.75,
        "equation": "x=1(3/4)",
    },
    {"id": "math_qa__d", "question": "Which? A) 1 B) 2", "chain": "", "result": "B", "result_float": 2.0},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[0]))
    return tmp_path


def test_rows_become_tasks_that_reward_understands(math: Any, folder: Path) -> None:
    rows = math.calc_x.load(folder, "train")
    assert [row["id"] for row in rows] == ["gsm8k__a", "ape210k__b", "ape210k__c", "math_qa__d"]
    assert [row["input"]["answer"] for row in rows] == ["1776", "2/3", "1.75", "B"]
    assert rows[0]["input"]["question"] == ROWS[0]["question"]
    for row, answer in zip(rows, ("1776", "0.66667", "7/4", "so it is B"), strict=True):
        assert math.tasks.reward(row["input"], {"answer": answer}) == 1.0
        assert math.tasks.reward(row["input"], {"answer": "3"}) == 0.0


def test_a_broken_line_is_named_and_the_others_are_read(math: Any, folder: Path) -> None:
    lines = (folder / "train.jsonl").read_bytes().splitlines()
    bad = [
        b'{"question": "half a li',
        b"[]",
        b'{"question": "what?"}',
        b'{"question": "what?", "result": 4}',
        b'{"question": "\xff", "result": "4"}',
    ]
    (folder / "train.jsonl").write_bytes(b"\n".join([lines[0], bad[0], b"", *bad[1:], *lines[1:]]))
    with pytest.warns(UserWarning) as caught:
        rows = math.calc_x.load(folder, "train")
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    file = folder / "train.jsonl"
    broken = [str(warning.message).partition("\nhint: ")[0] for warning in caught]
    assert [line.partition(" is left out: ")[0] for line in broken] == [
        f"`{file}` line {place}" for place in (2, 4, 5, 6, 7)
    ]
    assert broken[1].endswith("a `list`, not an object") and broken[2].endswith("`result` is missing, not a text")
    assert math.calc_x.load(folder, "train") == rows, "without a second warning"


def test_parquet_files_of_the_hub_are_read(math: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    columns = [
        {"id": row["id"], "question": row["question"], "chain": row["chain"], "result": row["result"]} for row in ROWS
    ]
    datasets.Dataset.from_list([*columns, {**columns[0], "result": None}]).to_parquet(
        tmp_path / "data" / "train-00000-of-00001.parquet"
    )
    with pytest.warns(
        UserWarning, match=r"train-00000-of-00001.parquet` row 5 is left out: `result` is null, not a text"
    ):
        rows = math.calc_x.load(tmp_path, "train")
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]


def test_tasks_of_the_folder_in_the_environment_follow_from_the_seed(
    math: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALC_X", str(folder))
    first = math.calc_x.tasks("train", seed=0, count=6)
    assert len(first) == 6 and {row["id"] for row in first[:4]} == {row["id"] for row in ROWS}
    assert math.calc_x.tasks("train", seed=0, count=6) == first
    assert any(math.calc_x.tasks("train", seed=seed, count=6) != first for seed in (1, 2, 3))
    assert [row["id"] for row in math.calc_x.tasks("heldout", seed=0, count=1)] == ["gsm8k__a"]


def test_a_missing_folder_or_file_is_named(math: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALC_X", raising=False)
    with pytest.raises(ValueError, match="`CALC_X` is not set\nhint: "):
        math.calc_x.tasks("train", seed=0, count=1)
    monkeypatch.setenv("CALC_X", str(tmp_path))
    with pytest.raises(ValueError, match=r"no file for the split `heldout`\nhint: it is called validation\*.jsonl"):
        math.calc_x.tasks("heldout", seed=0, count=1)
    (tmp_path / "train.jsonl").write_text("nothing\n")
    with (
        pytest.warns(UserWarning, match="line 1 is left out"),
        pytest.raises(ValueError, match=r"no row of .* can be read\nhint: "),
    ):
        math.calc_x.tasks("train", seed=0, count=1)
