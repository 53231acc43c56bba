"""A run's folder: `config.toml`, `metrics.jsonl`, `store.sqlite`, `checkpoints/`, `model/`, `curve.png`."""

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightningrl.config import Config
from lightningrl.errors import UserError
from lightningrl.progress import Exam
from lightningrl.recipe import dump_config, load_config

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything about one run lies."""

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

    @property
    def resume_command(self) -> str:
        """What a person types to go on."""
        return shlex.join(["lightningrl", "train", str(self.config), "--run-dir", str(self.path), "--resume"])

    def rows(self) -> list[dict[str, Any]]:
        """What `metrics.jsonl` holds; a last line that was cut off by a crash is left out."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True) if self.metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def new_folder(config: Config, path: Path | None = None) -> RunFolder:
    """Begin a run. A folder that holds one already is left alone."""
    path = path or RUNS / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder(path)
    if folder.config.exists():
        raise UserError(
            f"`{path}` holds a run already", hint="go on with it by `--resume`, or give another `--run-dir`"
        )
    path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(dump_config(config), encoding="utf-8")
    return folder


def resumed_folder(config: Config, path: Path | None = None) -> RunFolder:
    """Find the run to go on with: `path`, or the newest of this name. Its settings must be the ones it began with."""
    if path is None:
        begun = [path for path in sorted(RUNS.glob(f"{config.name}-*")) if (path / "checkpoints").exists()]
        named = [path for path in begun if load_config(path / "config.toml").name == config.name]
        if not named:
            raise UserError(
                f"no run of `{config.name}` in `{RUNS}/` to resume", hint="leave out `--resume` to begin one"
            )
        path = named[-1]
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UserError(f"`{path}` holds no run", hint="leave out `--resume` to begin one")
    before = load_config(folder.config).model_dump()
    changed = [name for name, value in config.model_dump().items() if before[name] != value]
    if changed:
        raise UserError(
            f"settings of `{', '.join(changed)}` are not those that `{path}` began with",
            hint=f"resume with the same ones: {folder.resume_command}",
        )
    return folder


class Journal:
    """A watcher that writes `metrics.jsonl`, one row an event; a resumed run shows some events again, which are not
    written twice.
    """

    def __init__(self, folder: RunFolder, *, version: int) -> None:
        kept = [row for row in folder.rows() if row["step"] < version]
        draft = folder.metrics.with_suffix(".draft")
        draft.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        draft.replace(folder.metrics)
        self._path = folder.metrics
        self._written = {_name(row) for row in kept}

    def doing(self, what: str, done: int = 0, total: int = 0) -> None:
        pass

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._write({"kind": "step", "step": step, **metrics})

    def examined(self, exam: Exam) -> None:
        self._write(
            {
                "kind": "exam",
                "step": exam.version,
                "mode": exam.mode,
                "reward/mean": exam.mean,
                "tasks": len(exam.rewards),
            }
        )

    def _write(self, row: dict[str, Any]) -> None:
        if _name(row) in self._written:
            return
        self._written.add(_name(row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["kind"], row["step"], row.get("mode")
