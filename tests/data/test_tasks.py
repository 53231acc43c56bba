import json
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
    orders = {tuple(task.input["n"] for task in load_tasks(config, "train", seed=seed, count=5, root=tmp_path)) for seed in range(8)}
    assert len(orders) > 1
    assert [task.input["n"] for task in load_tasks(config, "heldout", seed=0, count=7, root=tmp_path)] == [9]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    config = write(tmp_path / "tasks.jsonl", row(0, "train"), '{"input": ', row(1, "train"))
    with pytest.raises(UserError, match="line 2 is not a task"):
        load_tasks(config, "train", seed=0, count=1, root=tmp_path)


def test_a_missing_file_or_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task file at"):
        load_tasks(TasksConfig(source="nowhere.jsonl"), "train", seed=0, count=1, root=tmp_path)
    with pytest.raises(UserError, match="no task of split `heldout`"):
        load_tasks(write(tmp_path / "tasks.jsonl", row(0, "train")), "heldout", seed=0, count=1, root=tmp_path)


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
