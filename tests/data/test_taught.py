"""What a step taught survives the way to the disk and back, or is absent."""

from pathlib import Path

import numpy as np
import pytest

from lightningrl.data.taught import Taught, load_taught, save_taught, taught_file
from lightningrl.errors import UserError

TAUGHT = Taught(
    values={"a": 0.1, "b": -2.0, "c": 1 / 3},
    entropies={"c": np.array([0.5, 0.25, 0.0], np.float32), "a": np.array([1.5], np.float32)},
    logprobs_after={"c": np.array([-1.0, -2.0, -3.5], np.float32)},
)


def same(one: Taught, other: Taught) -> bool:
    def tokens(taught: Taught) -> list[list[tuple[str, list[float]]]]:
        return [[(k, v.tolist()) for k, v in each.items()] for each in (taught.entropies, taught.logprobs_after)]

    return one.values == other.values and tokens(one) == tokens(other)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = taught_file(tmp_path, step=3, policy="writer")
    assert path == tmp_path / "taught" / "step-00003-writer.npz"
    save_taught(path, TAUGHT)
    found = load_taught(path)
    assert found is not None
    assert same(found, TAUGHT)
    assert found.entropies["c"].dtype == found.logprobs_after["c"].dtype == np.float32


@pytest.mark.parametrize("taught", [Taught(), Taught(values={"a": 1.0}), Taught(entropies=TAUGHT.entropies)])
def test_each_part_may_be_empty(tmp_path: Path, taught: Taught) -> None:
    save_taught(tmp_path / "x.npz", taught)
    found = load_taught(tmp_path / "x.npz")
    assert found is not None
    assert same(found, taught)


def test_same_content_gives_same_bytes_and_leaves_no_draft(tmp_path: Path) -> None:
    path = taught_file(tmp_path, step=0, policy="policy")
    save_taught(path, TAUGHT)
    first = path.read_bytes()
    save_taught(path, TAUGHT)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_damage_is_reported_and_absence_is_none(tmp_path: Path) -> None:
    assert load_taught(tmp_path / "none.npz") is None
    path = tmp_path / "x.npz"
    save_taught(path, TAUGHT)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-30], b"text"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="damaged"):
            load_taught(path)


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_a_changed_byte_in_the_list_of_entries_is_damage_or_does_no_harm(tmp_path: Path, flip: int) -> None:
    path = tmp_path / "x.npz"
    save_taught(path, TAUGHT)
    whole = path.read_bytes()
    for place in range(whole.index(b"PK\1\2"), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        try:
            found = load_taught(path)
        except UserError as error:
            assert "damaged" in error.message, place
        else:
            assert found is not None and same(found, TAUGHT), place
