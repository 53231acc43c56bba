"""Each logger with its real package, offline. What was logged is read back by the package itself."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl import plugins
from lightningrl.loggers import Logger, Notes, Row, Run
from lightningrl.loggers.conformance import CHECKS
from lightningrl.loggers.content import VARIABLE
from lightningrl.loggers.examples import COMPLETE, STOPPED, ended, failed, row, run_in

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the packages are for their authors
NAMES = ("wandb", "trackio", "mlflow", "tensorboard")
BATCH = [ended("train-00000-000-00"), failed("train-00000-000-01"), ended("exam-00000-sampled-0000")]
EXAM = Row(step=1, at=row(1).at, metrics={"heldout/sampled/reward/mean": 0.5})


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trackio reads its variable when it is imported."""
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))


def made(name: str) -> Logger:
    return plugins.load(name, kind="logger")()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_a_loggers_promises(name: str, check: Callable[..., None], tmp_path: Path) -> None:
    check(lambda: made(name), tmp_path)


def log_twice(name: str, folder: Path) -> Run:
    """A run with one step and an exam, that is stopped and resumed for another step."""
    run = run_in(folder)
    first = made(name)
    first.begin(run)
    first.log(row(1))
    first.log(EXAM)
    if first.reads_rollouts:
        first.rollouts(BATCH)
    first.end(STOPPED)
    time.sleep(1.1)  # the second of the start names TensorBoard's files
    second = made(name)
    second.begin(replace(run, notes=Notes(folder, "checked")))
    second.log(row(2))
    (folder / "result.json").write_text(json.dumps(COMPLETE.result))
    second.end(COMPLETE)
    return run


def test_tensorboard_shows_curves_settings_and_result(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore[reportMissingImports]

    log_twice("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(point.step, pytest.approx(point.value)) for point in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2)]
    assert [point.step for point in events.Scalars("heldout/sampled/reward/mean")] == [1]
    assert events.Scalars("reward/mean")[0].wall_time == row(1).at
    shown = events.Tensors("result/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "heldout_after" in shown
    assert "•••" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()


def test_mlflow_shows_curves_parameters_status_and_files_of_one_run(tmp_path: Path) -> None:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    run = log_twice("mlflow", tmp_path)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("checked")
    [shown] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(shown.info.run_id, "reward/mean")
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (1, 0.1, round(row(1).at * 1000)),
        (2, 0.2, round(row(2).at * 1000)),
    ]
    assert shown.data.params["agent.env.KEY"] == "•••"
    assert (shown.info.status, shown.info.run_name) == ("FINISHED", run.name)
    assert [file.path for file in client.list_artifacts(shown.info.run_id)] == ["result.json"]


def test_mlflow_gets_the_parameters_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    run, log_batch = run_in(tmp_path), MlflowClient.log_batch

    def fail(*arguments: object, **named: object) -> None:
        raise OSError("the service is down")

    logger = made("mlflow")
    monkeypatch.setattr(MlflowClient, "log_batch", fail)
    with pytest.raises(OSError, match="down"):
        logger.begin(run)
    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    assert "experiment `checked`" in logger.begin(run)
    experiment = MlflowClient().get_experiment_by_name("checked")
    [shown] = MlflowClient().search_runs([experiment.experiment_id])
    assert shown.data.params["agent.env.KEY"] == "•••", "in the same run"


def test_trackio_shows_curves_and_traces_of_one_run(tmp_path: Path) -> None:
    import trackio  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    run = log_twice("trackio", tmp_path)
    [shown] = [found for found in trackio.Api().runs("checked") if found.name == run.name]
    lines = SQLiteStorage.get_logs("checked", run.name)
    points = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    assert points == [(1, 0.1), (2, 0.2)]
    assert shown.config["agent"]["env"]["KEY"] == "•••"
    traces = SQLiteStorage.get_traces("checked", run.name)
    assert {trace["metadata"]["rollout"] for trace in traces} == {one.rollout.id for one in BATCH}
    [whole] = [trace for trace in traces if trace["metadata"]["rollout"] == "train-00000-000-00"]
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [span["kind"] for span in whole["spans"]] == ["generation", "tool", "generation"]


def test_trackio_sends_no_text_to_another_machine_unless_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightningrl.loggers.trackio import Trackio

    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:1")
    told = str(Trackio()._trace(BATCH[0])._to_dict("p", "r"))
    assert "weather" in told and "21 °C" not in told and "How warm" not in told
    monkeypatch.setenv(VARIABLE, "true")
    assert "21 °C" in str(Trackio()._trace(BATCH[0])._to_dict("p", "r"))


@pytest.mark.parametrize("texts", [False, True])
def test_wandb_has_curves_settings_and_a_table_in_its_offline_run(
    texts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if texts:
        monkeypatch.setenv(VARIABLE, "true")
    log_twice("wandb", tmp_path)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "the same run, twice"
    records = [record for file in files for record in wandb_records(file)]
    points = [line for record in records for line in [wandb_items(record.history.item)] if "reward/mean" in line]
    assert [(line["step"], line["reward/mean"]) for line in points] == [(1, 0.1), (2, 0.2)]
    configs = str([record for record in records if record.HasField("run")])
    assert "hunter" not in configs and "checked" in configs
    [table] = [json.loads(file.read_text()) for file in (tmp_path / "wandb").rglob("*.table.json")]
    shown = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    assert [(line["rollout"], line["step"], line["reward"]) for line in shown] == [
        ("train-00000-000-00", 1, 0.75),
        ("train-00000-000-01", 1, None),
        ("exam-00000-sampled-0000", 0, 0.75),
    ]
    assert ("output" in shown[0]) is texts


def test_wandb_shows_the_rollouts_of_a_run_that_was_killed_and_all_in_one_table(tmp_path: Path) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    killed = made("wandb")
    killed.begin(run_in(tmp_path))
    killed.rollouts(BATCH)
    wandb.finish()
    for later in ([], [], [ended("train-00001-000-00")]):
        time.sleep(1.1)  # the second of the start names wandb's folders
        logger = made("wandb")
        logger.begin(run_in(tmp_path))
        logger.rollouts(later)
        logger.end(STOPPED)
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").rglob("*.table.json")]
    assert sorted(len(table["data"]) for table in tables) == [3, 4], "nothing is shown again without a new rollout"


BLOCK = 32 * 1024
FIRST, LAST = (1, 2), (1, 4)
"""Kinds of fragments that begin and end a record: a whole one is both."""


def wandb_records(file: Path) -> list[Any]:
    """The records of a run that wandb has written offline: a log in LevelDB's format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts = (b"" if kind in FIRST else parts) + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in LAST:
            found.append(Record.FromString(parts))
    return found


def wandb_items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_without_a_key_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    from lightningrl.errors import UserError

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    with pytest.raises(UserError, match="no API key"):
        made("wandb")
    wandb.teardown()


def test_all_four_follow_a_run_at_the_same_time(tmp_path: Path) -> None:
    from lightningrl.loggers import make_loggers, shown_by
    from tests.loggers.recorded import config, exam, step

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (exam(0), step(0), step(1))))
    (tmp_path / "result.json").write_text('{"heldout_after": 0.5}')
    said: list[str] = []
    settings = config(*NAMES)
    with shown_by(make_loggers(settings), settings, tmp_path, say=said.append, close_s=60):
        pass
    assert not [line for line in said if "dropped" in line or "finish" in line]
    rows = {name: json.loads((tmp_path / "loggers" / f"{name}.json").read_text())["rows"] for name in NAMES}
    assert rows == {name: {"sampled": 0, "step": 2} for name in NAMES}
