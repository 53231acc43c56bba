"""Loggers beside a whole run of the command line: whatever they do, the weights stay the same."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from lightningrl.loggers.running import CLOSE_S
from tests.conftest import SmallRecipe
from tests.loggers.collector import collecting

ERROR = Status.STATUS_CODE_ERROR
LOGGERS = """
import threading
import time
from pathlib import Path


class Quiet:
    reads_rollouts = True

    def begin(self, run): self.file = run.folder / "told.txt"; return ""
    def log(self, row): self.tell(f"row {row.step}")
    def rollouts(self, batch): self.tell(f"rollouts {len(batch)}")
    def end(self, outcome): self.tell(outcome.ending); return ""
    def tell(self, line):
        with self.file.open("a") as file: file.write(line + "\\n")


class Raises(Quiet):
    def rollouts(self, batch): raise ValueError("no space")


class Hangs(Quiet):
    def begin(self, run): threading.Event().wait(300)


class Slow(Quiet):
    def log(self, row): time.sleep(2.5); super().log(row)


def Broken(): raise RuntimeError("it cannot be made")
"""


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def names(*loggers: str) -> str:
    return f"loggers={json.dumps([f'shown:{name}' for name in loggers])}"


def test_loggers_that_raise_hang_or_are_slow_change_no_weight_and_delay_only_the_end(
    small_recipe: SmallRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_recipe.folder / "shown.py").write_text(LOGGERS)
    patient = "agent.timeout_s=100"  # a busy machine must not make an attempt fail
    with collecting() as collector, ThreadPoolExecutor() as pool:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        alone = pool.submit(small_recipe.train, patient, "--run-dir", "alone")
        began = time.monotonic()
        every = f"loggers={json.dumps(['otlp', *(f'shown:{name}' for name in ('Quiet', 'Raises', 'Hangs', 'Slow'))])}"
        train = ("train", str(small_recipe.path), "--json", patient, every, "--run-dir", "shown")
        done = small_recipe.cli(*train, timeout_s=200)
        seconds = time.monotonic() - began
        alone.result()
    assert done.returncode == 0, done.stderr
    run, result = small_recipe.folder / "shown", json.loads(done.stdout)
    assert weights(run) == weights(small_recipe.folder / "alone")
    assert seconds - result["seconds"] > CLOSE_S, "training itself did not wait for `Hangs`"
    assert "`shown:Raises` was dropped after 5 failures: ValueError: no space" in done.stderr
    assert "`shown:Hangs` did not finish within 15 s" in done.stderr
    told = (run / "told.txt").read_text()
    assert "row 2" in told and "rollouts" in told and "complete" in told
    ended = [span for span in collector.spans if span.name == "invoke_agent" and span.status.code != ERROR]
    assert len(ended) == result["rollouts"], "one attempt of each has succeeded"
    traces = {span.trace_id for span in ended}
    calls = [span for span in collector.spans if span.name.startswith("chat ") and span.trace_id in traces]
    assert len(calls) == 2 * len(ended)


@pytest.mark.parametrize(
    ("loggers", "said", "hint"),
    [
        ('["wandd"]', "unknown logger `wandd` in `loggers.0`", "wandb"),
        ('["mlflow"]', "needs `mlflow`, which is not installed", 'pip install "lightningrl[mlflow]"'),
        ('["shown:Nothing"]', "has no `Nothing`", "check the name"),
    ],
)
def test_a_logger_that_cannot_work_ends_the_command_before_anything_is_made(
    small_recipe: SmallRecipe, loggers: str, said: str, hint: str
) -> None:
    (small_recipe.folder / "shown.py").write_text(LOGGERS)
    done = small_recipe.cli("train", str(small_recipe.path), "--run-dir", "run", f"loggers={loggers}")
    assert done.returncode == 2
    assert said in done.stderr and hint in done.stderr
    assert not (small_recipe.folder / "run").exists()
