"""Trackio: curves, settings, and traces of sample rollouts. `TRACKIO_*` sets it up; by default all stays here."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from lightningrl.loggers.base import Ended, Outcome, Row, Run
from lightningrl.loggers.content import content_allowed, plain, said, shown_attempt
from lightningrl.loggers.samples import Samples
from lightningrl.tracing import spans_of, united
from lightningrl.types import Span

KINDS = {"llm": "generation", "tool": "tool"}


class Trackio:
    """Show it with `trackio show`. Text of rollouts leaves the machine only if the user allows it."""

    reads_rollouts = True

    def __init__(self) -> None:
        self._samples = Samples()
        remote = any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        self._texts = content_allowed() or not remote

    def begin(self, run: Run) -> str:
        with redirect_stdout(sys.stderr):  # it prints, and `--json` has stdout
            self._run = trackio.init(
                project=run.project, name=run.name, config=dict(run.settings), resume="allow", embed=False
            )
        return f"trackio show --project {run.project}"

    def log(self, row: Row) -> None:
        self._run.log(dict(row.metrics), step=row.step)

    def rollouts(self, batch: Sequence[Ended]) -> None:
        for step, ended in self._samples.of(batch):
            if shown_attempt(ended) is not None:
                self._run.log({"rollout": self._trace(ended)}, step=step)

    def end(self, outcome: Outcome) -> str:
        self._run.log({f"result/{name}": value for name, value in outcome.result.items() if _number(value)})
        with redirect_stdout(sys.stderr):
            self._run.finish()
        return ""

    def _trace(self, ended: Ended) -> trackio.Trace:
        """The longest conversation of the shown attempt, and all of its calls and tools."""
        attempt = shown_attempt(ended)
        calls = [call for call in ended.calls if call.attempt_id == attempt]
        recorded = [span for span in ended.spans if span.attempt_id == attempt]
        talks = [(*messages, *([answer] if answer else [])) for _, messages, answer in said(calls)]
        longest = max(talks, key=len, default=())
        metadata = {
            "rollout": ended.rollout.id,
            "task": ended.rollout.task.id,
            "split": ended.rollout.task.split,
            "reward": ended.reward,
            "status": "ok" if ended.rollout.status == "succeeded" else "error",
        }
        return trackio.Trace(
            messages=[plain(message) for message in longest] if self._texts else [],
            metadata=metadata,
            spans=[self._span(span) for span in united(recorded, spans_of(calls))],
        )

    def _span(self, span: Span) -> dict[str, Any]:
        texts = {"input": span.input, "output": span.output, "error": span.error} if self._texts else {}
        return {
            "id": span.id,
            "name": span.name,
            "kind": KINDS.get(span.kind, "span"),
            "start_time": span.started_at,
            "end_time": span.ended_at,
            "duration_ms": (span.ended_at - span.started_at) * 1000,
            "status": "error" if span.status == "error" else "ok",
            "metadata": {"call": span.call_id},
            **texts,
        }


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
