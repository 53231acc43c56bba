"""Weights & Biases: curves, settings, result and a table of sample rollouts. `WANDB_*` and `wandb login` set it up."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import wandb  # pyright: ignore[reportMissingImports]

from lightningrl.errors import UserError
from lightningrl.loggers.base import Ended, Outcome, Row, Run
from lightningrl.loggers.content import content_allowed, error_type
from lightningrl.loggers.samples import Samples

COLUMNS = ("rollout", "step", "split", "task", "status", "reward", "attempts", "calls", "sampled_tokens", "error_type")
TEXTS = ("input", "output")


class WeightsAndBiases:
    """Works with `WANDB_MODE=offline`, too; `wandb sync` then uploads the run."""

    reads_rollouts = True

    def __init__(self) -> None:
        offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
        if not offline and not wandb.api.api_key:
            hint = "run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            raise UserError("the logger `wandb` has no API key", hint=hint)
        self._samples = Samples()
        self._texts = content_allowed()

    def begin(self, run: Run) -> str:
        name = run.notes.read("id") or secrets.token_hex(4)
        run.notes.write({"id": name})
        self._notes = run.notes
        # wandb would read the terminal's output, and write into its live display.
        quiet = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=None if wandb.setup().settings.project else run.project,
            name=run.name,
            id=name,
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            settings=quiet,
        )
        # Exams come between steps, and a step may be logged after its exam.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return self._run.url if not self._run.offline else f"wandb sync {Path(self._run.dir).parent}"

    def log(self, row: Row) -> None:
        self._run.log({**row.metrics, "step": row.step})

    def rollouts(self, batch: Sequence[Ended]) -> None:
        table = self._notes.read("table", [])
        self._notes.write({"table": [*table, *(self._line(step, ended) for step, ended in self._samples.of(batch))]})

    def end(self, outcome: Outcome) -> str:
        table = self._notes.read("table", [])
        if len(table) > self._notes.read("shown", 0):
            columns = [*COLUMNS, *(TEXTS if self._texts else ())]
            data = [line[: len(columns)] for line in table]
            self._run.log({"rollouts": wandb.Table(columns=columns, data=data)})
            self._notes.write({"shown": len(table)})
        self._run.summary.update({"ending": outcome.ending, **outcome.result})
        self._run.finish(exit_code=0 if outcome.ending == "complete" else 1)
        return ""

    def _line(self, step: int, ended: Ended) -> list[Any]:
        task, last = ended.rollout.task, ended.attempts[-1] if ended.attempts else None
        tokens = sum(len(call.completion_ids) for call in ended.calls if call.replays is None)
        told = [ended.rollout.status, ended.reward, len(ended.attempts), len(ended.calls), tokens]
        line = [ended.rollout.id, step, task.split, task.id, *told, error_type(last.error) if last else ""]
        texts = [msgspec.json.encode(value).decode() for value in (task.input, last.output if last else None)]
        return [*line, *texts]
