import json
import os
from pathlib import Path

import pytest

from lightningrl.config import TasksConfig
from lightningrl.data.tasks import derived_seed, load_tasks
from lightningrl.errors import UserError


def write(path: Path, *lines: str) -> TasksConfig:
    path.write_text("\n".join(lines) + "\n")
    return TasksConfig(source=path.name)


def row(number: int, split: str) -> str:
    return json.dumps({"input": {"n": number}, "split": split})


def test_a_file_gives_the_rows_of_a_split_again_and_again_in_an_order_that_follows_the_seed(tmp_path: Path) -> None:
    config = write(tmp_path / "tasks.jsonl", *(row(n, "train") for n in range(5)), row(9, "heldout"))
    first = [task.input["n"] for task in load_tasks(config, "train", seed=1, count=7, root=tmp_path)]
    assert sorted(first[:5]) == [0, 1, 2, 3, 4] and first[5:] == first[:2]
    assert first == [task.input["n"] for task in load_tasks(config, "train", seed=1, count=7, root=tmp_path)]
    orders = {
        tuple(task.input["n"] for task in load_tasks(config, "train", seed=seed, count=5, root=tmp_path))
        for seed in range(8)
    }
    assert len(orders) > 1
    assert [task.input["n"] for task in load_tasks(config, "heldout", seed=0, count=7, root=tmp_path)] == [9]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (b'{"input": ', "Input data was truncated"),
        (b"input: 1", "JSON is malformed: invalid character (byte 0)"),
        (b'{"input": {"n": "\xff"}}', "byte 18 is not UTF-8"),
        (b'{"input": {"n": NaN}}', "JSON is malformed: invalid character (byte 16)"),
        (b"[1]", "a `list`, not an object"),
        (b'{"question": 1}', "`input` is missing"),
        (b'{"input": "who?"}', "`input` is a `str`, not an object"),
        (
            b'{"input": {}, "split": "held-out"}',
            "there is no split `held-out`: did you mean `heldout`? known: `train`, `heldout`",
        ),
        (b'{"input": {}, "split": ["train"]}', "there is no split `['train']`"),
        (b"[" * 100_000, "too many brackets within brackets"),
    ],
)
def test_a_broken_line_is_named_once_and_the_rest_is_not_lost(tmp_path: Path, broken: bytes, reason: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(
        b"\r\n".join([row(0, "train").encode(), b" ", broken, row(1, "train").encode(), row(2, "heldout").encode()])
    )
    config = TasksConfig(source="tasks.jsonl")
    with pytest.warns(UserWarning) as caught:
        tasks = load_tasks(config, "train", seed=0, count=2, root=tmp_path)
    (said,) = [str(warning.message) for warning in caught]
    assert said.startswith(f"`{file}` line 3 is left out: {reason}") and "\nhint: a row is a line such as" in said
    assert sorted(task.input["n"] for task in tasks) == [0, 1]
    assert [task.input["n"] for task in load_tasks(config, "heldout", seed=0, count=2, root=tmp_path)] == [2], (
        "and not a word more"
    )


def test_a_line_ends_where_json_says_so(tmp_path: Path) -> None:
    config = write(tmp_path / "tasks.jsonl", "\ufeff" + json.dumps({"input": {"n": "a\u2028b"}}, ensure_ascii=False))
    assert load_tasks(config, "train", seed=0, count=1, root=tmp_path)[0].input == {"n": "a\u2028b"}


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    for number in range(2):
        config = write(tmp_path / "tasks.jsonl", row(number, "train"))
        os.utime(tmp_path / "tasks.jsonl", ns=(number, number))
        assert load_tasks(config, "train", seed=0, count=1, root=tmp_path)[0].input == {"n": number}


def test_a_file_that_gives_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task file at"):
        load_tasks(TasksConfig(source="nowhere.jsonl"), "train", seed=0, count=1, root=tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"cannot read the task file .*: Is a directory"):
        load_tasks(TasksConfig(source="folder.jsonl"), "train", seed=0, count=1, root=tmp_path)
    with pytest.raises(UserError, match="no task of split `heldout`"):
        load_tasks(write(tmp_path / "tasks.jsonl", row(0, "train")), "heldout", seed=0, count=1, root=tmp_path)
    with pytest.raises(UserError, match="no task of split `train`"):
        load_tasks(write(tmp_path / "blank.jsonl", "", " "), "train", seed=0, count=1, root=tmp_path)
    (tmp_path / "utf16.jsonl").write_text(row(0, "train"), encoding="utf-16")
    with (
        pytest.warns(UserWarning, match="line 1 is left out: byte 1 is not UTF-8"),
        pytest.raises(UserError, match="no task of split `train`"),
    ):
        load_tasks(TasksConfig(source="utf16.jsonl"), "train", seed=0, count=1, root=tmp_path)


def test_a_derived_seed_depends_on_every_part() -> None:
    seeds = {
        derived_seed(0, "a", 1),
        derived_seed(1, "a", 1),
        derived_seed(0, "b", 1),
        derived_seed(0, "a", 2),
        derived_seed(0, "a1"),
        derived_seed(0, "a"),
    }
    assert len(seeds) == 6
    assert derived_seed(0, "a", 1) == derived_seed(0, "a", 1)
    assert all(0 <= seed < 2**63 for seed in seeds)
