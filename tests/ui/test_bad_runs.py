"""A run that is damaged, away, deleted or started again: the page shows the others, and what can be read of it."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightningrl.store.sqlite import SQLiteStore
from lightningrl.types import Rollout, Task
from lightningrl.ui import live, shelf
from lightningrl.ui.export import exported
from tests.ui.conftest import ROWS, Page, make_run, write_rows
from tests.ui.test_api import events, get


def unread(run: Path) -> None:
    for file in run.glob("store.sqlite*"):
        file.unlink()


def damaged_store(run: Path) -> None:
    unread(run)
    (run / "store.sqlite").write_bytes(b"no database" * 1000)


def database_that_is_away(run: Path) -> None:
    unread(run)
    (run / "store.url").write_text("sqlite:///no/such/folder/store.sqlite\n")


def unknown_database(run: Path) -> None:
    unread(run)
    (run / "store.url").write_text("nosuch://host/run\n")


def garbage_in_the_metrics(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00\x00garbage\n[]\n{}\n")


def empty_result(run: Path) -> None:
    (run / "result.json").write_text("")


def old_result(run: Path) -> None:
    (run / "result.json").write_text("{}")


def empty_process(run: Path) -> None:
    (run / "process.json").write_text("")


STORES = (damaged_store, database_that_is_away, unknown_database)
FILES = (garbage_in_the_metrics, empty_result, old_result, empty_process)


@pytest.mark.parametrize("harm", [*STORES, *FILES])
async def test_a_bad_run_is_shown_beside_the_others(run: Path, page: Page, harm: Callable[[Path], None]) -> None:
    harm(await make_run(run.parent / "bad"))
    async with page(run.parent) as client:
        lines = {line["run"]: line for line in (await get(client, "/api/runs"))["runs"]}
        assert lines["one"]["rollouts"] == 2 and lines["one"]["error"] is None
        assert lines["bad"]["step"] == 2
        assert (lines["bad"]["rollouts"] is None) == bool(lines["bad"]["error"]) == (harm in STORES)
        assert (await get(client, "/api/runs/bad"))["splits"] == ([] if harm in STORES else ["train"])
        told = await get(client, "/api/runs/bad/metrics")
        assert len(told["rows"]) == len(ROWS) and told["complete"]


async def test_records_that_come_back_are_read(run: Path, page: Page) -> None:
    kept = (run / "store.sqlite").read_bytes()
    damaged_store(run)
    async with page(run) as client:
        assert (await get(client, "/api/runs/one"))["error"]
        (run / "store.sqlite").write_bytes(kept)
        assert (await get(client, "/api/runs/one"))["rollouts"] == 2


async def test_a_run_that_is_started_again_in_its_folder_is_another_one(
    run: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    async with page(run.parent) as client:
        before = await get(client, "/api/runs/one")
        assert (await get(client, "/api/runs/one/rollouts"))["total"] == before["rollouts"] == 2
        stream = events(client)
        first = await anext(stream)
        shutil.rmtree(run)
        assert "there is no run" in (await get(client, "/api/runs/one", status=404))["error"]["message"]
        again = await make_run(run.parent / "elsewhere" / "one")
        config = again / "config.toml"
        config.write_text(config.read_text().replace("group_size = 4", "group_size = 8"))
        write_rows(again, ROWS[:3])
        store = await SQLiteStore.open(again / "store.sqlite")
        await store.enqueue([Rollout(id="new", group_id="new", task=Task(id="t8", input={}, split="heldout"))])
        await store.close()
        again.rename(run)
        assert (await get(client, "/api/runs/one/rollouts"))["total"] == 3
        after = await get(client, "/api/runs/one")
        assert after["rollouts"] == 3 and sorted(after["splits"]) == ["heldout", "train"] and after["step"] == 1
        assert after["settings"]["loop"]["group_size"] == 8
        seen = await asyncio.wait_for(anext(stream), 60)
        assert seen["rollouts"] != first["rollouts"] and seen["metrics"] != first["metrics"]
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_given_folder_that_is_deleted_shows_nothing_else(run: Path, page: Page) -> None:
    await make_run(run.parent / "two")
    async with page(run, run.parent / "two" / "store.sqlite") as client:
        assert {line["run"] for line in (await get(client, "/api/runs"))["runs"]} == {"one", "two"}
        shutil.rmtree(run)
        assert [line["run"] for line in (await get(client, "/api/runs"))["runs"]] == ["two"]
    async with page(run) as client:
        assert (await get(client, "/api/runs"))["runs"] == [], "the folder is away from the start"


async def test_folders_are_searched_for_lists_and_for_unknown_names_alone(
    run: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []
    is_run = shelf.is_run
    monkeypatch.setattr(shelf, "is_run", lambda folder: looked.append(folder) or is_run(folder))
    await make_run(run.parent / "two")
    async with page(run.parent) as client:
        await get(client, "/api/runs")
        looked.clear()
        await get(client, "/api/runs/one/metrics")
        assert set(looked) == {run}
        await make_run(run.parent / "three")
        assert (await get(client, "/api/runs/three"))["run"] == "three"


async def test_viewers_hear_of_changes_again_after_a_look_has_failed(
    run: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_of, broken = live.state_of, False

    def state(folder: Path) -> Any:
        if broken:
            raise ZeroDivisionError
        return state_of(folder)

    monkeypatch.setattr(live, "EVERY_S", 0.05)
    monkeypatch.setattr(live, "state_of", state)
    async with page(run) as client:
        stream = events(client)
        await anext(stream)
        broken = True
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        broken = False
        again = events(client)
        assert (await anext(again))["state"] == "stopped"
        await again.aclose()  # type: ignore[attr-defined]


async def test_a_run_whose_settings_cannot_be_read_is_exported(run: Path) -> None:
    (run / "config.toml").write_text("[nosuch]\nsetting = 1\n")
    assert b"<title>" in await exported(run)


async def test_a_run_of_an_older_version_that_is_resumed_did_not_begin_then(run: Path, page: Page) -> None:
    write_rows(run, ROWS[2:])
    async with page(run) as client:
        told = await get(client, "/api/runs/one/metrics")
        assert [event["kind"] for event in told["events"]] == ["resumed", "warning"]
        assert (await get(client, "/api/runs/one"))["began_at"] > 1e9, "of the oldest file, not of the resume"
