"""A run whose records are in PostgreSQL: the same weights, and every command that reads a run finds them."""

import json
import sqlite3
from pathlib import Path

import pytest

from lightningrl.cli.folder import RunFolder
from lightningrl.recipe import load_config
from lightningrl.store.place import records_at, settle, url_of
from tests.conftest import SmallRecipe
from tests.postgres import Postgres


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_in_postgres_learns_the_same_and_is_resumed_and_read(
    small_recipe: SmallRecipe, postgres: Postgres
) -> None:
    url, _, _ = postgres.url().partition("&schema=")
    short = ("tasks.heldout=4", "loop.steps=1")
    wishes = (*short, f'store.url="{url}"')
    small_recipe.train("--run-dir", "plain", *short)
    small_recipe.train("--run-dir", "Shared Run", *wishes)
    shared = small_recipe.folder / "Shared Run"
    assert weights(shared) == weights(small_recipe.folder / "plain")
    assert not (shared / "store.sqlite").exists()
    assert "schema=run-shared-run-" in (shared / "store.url").read_text()
    assert (shared / "store.url").stat().st_mode & 0o777 == 0o600

    listed = [json.loads(small_recipe.cli("rollouts", run, "--json").stdout) for run in ("Shared Run", "plain")]
    assert listed[0]["counts"] == listed[1]["counts"]
    stable = ("id", "status", "reward", "sampled_tokens")
    assert [[line[name] for name in stable] for line in listed[0]["rollouts"]] == [
        [line[name] for name in stable] for line in listed[1]["rollouts"]
    ]
    shown = small_recipe.cli("show", "Shared Run")
    assert shown.returncode == 0 and "train-00000-" in shown.stdout
    resumed = small_recipe.cli("train", str(small_recipe.path), "--run-dir", "Shared Run", "--resume", *wishes)
    assert resumed.returncode == 0, resumed.stderr


def test_the_store_of_a_run_is_found_by_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert records_at(run) is None and url_of(run) == f"sqlite://{run}/store.sqlite"
    settle(run, "")
    sqlite3.connect(run / "store.sqlite").execute("CREATE TABLE t (x)")
    for path in (run, run / "store.sqlite"):
        assert records_at(path) == (run / "store.sqlite", f"sqlite://{run}/store.sqlite")
    settle(run, "postgresql:///db?schema=mine")
    settle(run, "postgresql:///other")
    assert records_at(run) == (run / "store.url", "postgresql:///db?schema=mine") == (run / "store.url", url_of(run))


def test_the_settings_of_a_run_in_a_database_are_readable_for_its_owner_only(
    small_recipe: SmallRecipe, tmp_path: Path
) -> None:
    for name, wishes in {"shared": ['store.url="postgresql://me:password@host/db"'], "plain": []}.items():
        folder = RunFolder(tmp_path / name)
        folder.make(load_config(small_recipe.path, wishes))
        assert ("password" in folder.config.read_text()) == bool(wishes)
        assert (folder.config.stat().st_mode & 0o077 == 0) == bool(wishes)


@pytest.mark.parametrize(
    ("url", "kept"), [("postgresql:///db", "?schema=run-r-"), ("postgresql:///db?host=/x", "&schema=run-r-")]
)
def test_each_run_gets_a_schema_of_its_own(tmp_path: Path, url: str, kept: str) -> None:
    found: set[str] = set()
    for parent in ("a", "b"):
        run = tmp_path / parent / "R"
        run.mkdir(parents=True)
        settle(run, url)
        assert url_of(run).startswith(url + kept)
        found.add(url_of(run))
    assert len(found) == 2
