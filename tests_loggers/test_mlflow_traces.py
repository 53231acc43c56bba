"""OTLP against a real server: MLflow in a process of its own. Its API tells the tree of spans that it shows."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

from lightningrl.loggers import Notes
from lightningrl.loggers.content import VARIABLE
from lightningrl.loggers.examples import COMPLETE, ended, failed, reported, run_in
from lightningrl.loggers.otlp import OTLP

pytestmark = pytest.mark.filterwarnings("default")
START_S = 240.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder)]
    env = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


@pytest.mark.timeout(300)
def test_mlflow_shows_attempts_as_trees_of_calls_and_tools(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MlflowClient(tracking_uri=server)
    experiment = client.create_experiment("traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-mlflow-experiment-id={experiment}")
    monkeypatch.setenv(VARIABLE, "true")
    plain, told = ended("train-00000-000-00"), ended("train-00000-000-01")
    logger = OTLP()
    logger.begin(replace(run_in(tmp_path), notes=Notes(tmp_path, "otlp")))
    logger.rollouts([plain, replace(told, spans=reported(told.attempts[0])), failed("train-00000-000-02")])
    assert logger.end(COMPLETE).startswith("10 spans")

    traces = {trace.info.trace_metadata["mlflow.trace.session"]: trace for trace in shown(client, experiment)}
    name = tmp_path.name
    assert set(traces) == {f"{name}/train-00000-000-0{number}" for number in range(3)}
    whole = traces[f"{name}/train-00000-000-00"]
    assert tree(whole) == [
        ("invoke_agent", "AGENT", ""),
        ("chat small", "CHAT_MODEL", "invoke_agent"),
        ("execute_tool weather", "TOOL", "invoke_agent"),
        ("chat small", "CHAT_MODEL", "invoke_agent"),
    ]
    assert whole.info.token_usage == {"input_tokens": 10, "output_tokens": 4, "total_tokens": 14}
    [root] = [span for span in whole.data.spans if span.parent_id is None]
    assert [event.attributes["gen_ai.evaluation.score.value"] for event in root.events] == [0.75]
    assert tree(traces[f"{name}/train-00000-000-01"]) == [
        ("invoke_agent", "AGENT", ""),
        ("plan", None, "invoke_agent"),
        ("chat small", "CHAT_MODEL", "plan"),
        ("execute_tool weather", "TOOL", "plan"),
        ("chat small", "CHAT_MODEL", "invoke_agent"),
    ]
    assert {"b7ad6b7169203331", "00f067aa0ba902b7", "53995c3f42cd8ad8"} <= {
        span.span_id for span in traces[f"{name}/train-00000-000-01"].data.spans
    }
    assert "ERROR" in str(traces[f"{name}/train-00000-000-02"].info.status)


def shown(client: MlflowClient, experiment: str) -> list[Any]:
    """The three traces; MLflow may show them a little later."""
    deadline = time.monotonic() + 30
    while len(found := client.search_traces(locations=[experiment])) < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def tree(trace: Any) -> list[tuple[str, str | None, str]]:
    """(name, type, name of the span above) in the order of their start."""
    names = {span.span_id: span.name for span in trace.data.spans}
    spans = sorted(trace.data.spans, key=lambda span: span.start_time_ns)
    return [(span.name, span.span_type, names.get(span.parent_id, "")) for span in spans]
