"""A run's folder says what its steps taught."""

from pathlib import Path

from lightningrl.data.taught import Taught, save_taught, taught_file
from lightningrl.look.taught import taught_of


def test_a_step_that_was_not_recorded_is_none(tmp_path: Path) -> None:
    save_taught(taught_file(tmp_path, step=3, policy="policy"), Taught(values={"a": 0.5}))
    found = taught_of(tmp_path, 3, "policy")
    assert found is not None
    assert found.values == {"a": 0.5}
    assert taught_of(tmp_path, 2, "policy") is None
    assert taught_of(tmp_path, 3, "critic") is None
