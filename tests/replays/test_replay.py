"""Does a replay go the same way, and does it say where a changed agent parts?"""

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from lightningrl.errors import UserError
from lightningrl.replays.recording import recording, trunk_of
from lightningrl.replays.replay import Regression, Replayed, replay, replay_all, succeeded
from tests.replays.recorded import FAILED, GOALS, Recorded


def quiet(what: str, done: int, total: int) -> None: ...


def one(recorded: Recorded, rollout: str, *overrides: str, attempt: int | None = None) -> Replayed:
    async def run() -> Replayed:
        async with recording(recorded.run, overrides) as opened:
            return await replay(opened, await trunk_of(opened, rollout, number=attempt), doing=quiet)

    return asyncio.run(run())


def every(run: Path, *overrides: str, split: str | None = None, step: int | None = None) -> Regression:
    async def replay_them() -> Regression:
        async with recording(run, overrides) as opened:
            chosen = await succeeded(opened, split=split, step=step, limit=None)
            return await replay_all(opened, chosen, doing=quiet)

    return asyncio.run(replay_them())


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path): path.read_bytes() for path in found if path.stat().st_size}  # readers leave an empty log


def test_an_unchanged_agent_goes_the_same_way_and_nothing_is_written_into_the_run(recorded: Recorded) -> None:
    before = files(recorded.run)
    found = every(recorded.run)
    assert {replay.rollout for replay in found.replays} == set(GOALS) and not found.parted
    assert all(replay.again.calls == 3 and replay.again.reward == replay.recorded.reward for replay in found.replays)
    assert files(recorded.run) == before


def test_a_failed_attempt_fails_again_in_the_same_way(recorded: Recorded) -> None:
    found = one(recorded, FAILED, attempt=1)
    assert found.same and "invalid literal for int()" in (found.again.error or "")


@pytest.mark.parametrize(
    ("before", "after", "kind", "call", "said"),
    [
        ('SYSTEM = "say one number"', 'SYSTEM = "say a number"', "request", 1, 'has "say a number" instead of'),
        ('f"{goal - total} to go"', 'f"{goal - total} left"', "request", 2, 'has "2 left" instead of "2 to go"'),
        ("range(3)", "range(4)", "request", 4, "it calls once more"),
        ("range(3)", "range(2)", "fewer calls", 3, "2 of 3 recorded calls"),
        ("return {", "raise ValueError(total)\n    return {", "error", None, "3"),
        ('{"total": total}', '{"total": 2 * total}', "output", None, '`{"total": 3}` → `{"total": 6}`'),
        ("else 0.0", "else 0.5", "reward", None, "0 → 0.5"),
    ],
    ids=["prompt", "tool", "one more call", "one call less", "error", "output", "reward"],
)
def test_a_changed_agent_parts_where_it_was_changed(
    recorded: Recorded, tmp_path: Path, before: str, after: str, kind: str, call: int | None, said: str
) -> None:
    rollout = "train-00000-001-00" if kind == "reward" else "train-00000-000-00"
    found = one(recorded, rollout, recorded.changed(tmp_path / "copy", before, after))
    assert found.parting is not None and not found.same
    assert (found.parting.kind, found.parting.call) == (kind, call), found.parting
    assert said in found.parting.example, found.parting.example


def test_all_that_part_in_one_place_are_one_group_with_an_example(recorded: Recorded, tmp_path: Path) -> None:
    found = every(
        recorded.run, recorded.changed(tmp_path / "copy", 'f"{goal - total} to go"', 'f"{goal - total} left"')
    )
    [(parting, group)] = found.groups()
    assert parting.call == 2 and len(group) == len(GOALS)
    assert found.as_json()["same"] == 0 and len(found.as_json()["parted"]) == 1


def test_errors_of_one_type_are_one_group_whatever_their_messages_say(recorded: Recorded, tmp_path: Path) -> None:
    found = every(
        recorded.run, recorded.changed(tmp_path / "copy", "return {", "raise KeyError(task['goal'])\n    return {")
    )
    [(parting, group)] = found.groups()
    assert (parting.why, parting.example) == ("KeyError", "3") and len(group) == len(GOALS)


def test_the_rollouts_can_be_chosen_by_split_and_step(recorded: Recorded) -> None:
    assert [replay.rollout for replay in every(recorded.run, split="heldout").replays] == ["exam-00001-greedy-0000"]
    assert [replay.rollout for replay in every(recorded.run, step=2).replays] == ["train-00001-000-00"]
    with pytest.raises(UserError, match="no rollout of step 7 and split `train` has succeeded"):
        every(recorded.run, split="train", step=7)


def test_a_store_of_an_older_version_is_replayed_and_left_as_it_is(recorded: Recorded, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded.run, run, ignore=shutil.ignore_patterns("*-shm"))
    with sqlite3.connect(run / "store.sqlite") as store:
        [version] = store.execute("pragma user_version").fetchone()
        store.execute("alter table calls drop column replays")
        [view] = store.execute("select sql from sqlite_master where name = 'whole_rollouts'").fetchone()
        store.execute("drop view whole_rollouts")
        store.execute("alter table rollouts drop column branch")
        store.execute(view)
        store.execute(f"pragma user_version = {version - 1}")
    assert not every(run).parted
    with sqlite3.connect(run / "store.sqlite") as store:
        assert store.execute("pragma user_version").fetchone() == (version - 1,)
