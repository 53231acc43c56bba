"""A run's folder: `config.toml`, `metrics.jsonl`, `store.sqlite`, `checkpoints/`, `model/`, `curve.png`."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.cli.report import mean_interval
from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.look.journal import MetricsFile
from lightningrl.look.runs import resume_command
from lightningrl.progress import Exam
from lightningrl.recipe import dump_config, load_config
from lightningrl.store.place import settle

RUNS = Path("runs")
PLACE: dict[str, Any] = {
    "loggers": True,
    "gateway": {"host", "port", "public_url", "hosts", "certificate", "certificate_key"},
    "agent": {"workers", "concurrency", "labels", "lease_s"},
}
"""Settings of where agents run, how they reach the run and what shows it. They may change when it is resumed, e.g. by
`--listen`.
"""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    def make(self, config: Config) -> None:
        """Make the folder with the settings of its run; of a run that is resumed, they stay as they are."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.config.exists():
            if config.store.url:
                self.config.touch(mode=0o600)  # the URL may have a password in it
            self.config.write_text(dump_config(config), encoding="utf-8")
            settle(self.path, config.store.url)

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        return resume_command(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, without a last line that a crash cut off."""
        return MetricsFile(self.metrics).rows()


def dated(name: str) -> Path:
    """The folder of a new run: `runs/NAME-20260101-120000`."""
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def new_folder(config: Config, path: Path | None = None) -> RunFolder:
    """The folder of a new run, not yet made. Raises `UserError` if it has a run already."""
    path = path or dated(config.name)
    folder = RunFolder(path)
    if folder.config.exists():
        raise UserError(
            f"`{path}` holds a run already", hint="continue it with `--resume`, or give another `--run-dir`"
        )
    return folder


def resumed_folder(config: Config, path: Path | None = None) -> RunFolder:
    """The folder of the run to continue: `path`, or the latest run of this recipe. Settings must not have changed, but
    for `PLACE`.
    """
    if path is None:
        begun = [path for path in sorted(RUNS.glob(f"{config.name}-*")) if (path / "checkpoints").exists()]
        named = [path for path in begun if load_config(path / "config.toml").name == config.name]
        if not named:
            hint = "leave out `--resume` to start one"
            raise UserError(f"no run of `{config.name}` in `{RUNS}/` to resume", hint=hint)
        path = named[-1]
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UserError(f"`{path}` holds no run", hint="leave out `--resume` to start one")
    before = load_config(folder.config).model_dump(exclude=PLACE)
    changed = [name for name, value in config.model_dump(exclude=PLACE).items() if before[name] != value]
    if changed:
        raise UserError(
            f"settings of `{', '.join(changed)}` differ from those of `{path}`",
            hint=f"resume with the settings of the run: {folder.resume_command}",
        )
    return folder


class Journal:
    """A watcher that writes one row per event to `metrics.jsonl`, each with its time. A resumed run repeats some; they
    are written once. Each start of the run has a row of its own.
    """

    def __init__(self, folder: RunFolder, *, version: int) -> None:
        kept = [row for row in folder.rows() if row["kind"] == "began" or row["step"] < version]
        draft = folder.metrics.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        draft.replace(folder.metrics)
        self._path = folder.metrics
        self._written = {_name(row) for row in kept}
        self._append({"kind": "began", "step": version})

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def voided(self, step: int, why: str) -> None:
        self._write({"kind": "void", "step": step, "why": why})

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._write({"kind": "step", "step": step, **metrics})

    def examined(self, exam: Exam) -> None:
        low, high = mean_interval(exam)
        rewards = {"reward/mean": exam.mean, "reward/low": low, "reward/high": high}
        row = {"kind": "exam", "step": exam.version, "mode": exam.mode, **rewards}
        self._write({**row, "tasks": len(exam.rewards)})

    def _write(self, row: dict[str, Any]) -> None:
        if _name(row) not in self._written:
            self._written.add(_name(row))
            self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "at": round(time.time(), 3)}) + "\n")


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["step"], row.get("mode")
