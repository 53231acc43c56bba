"""TensorBoard: curves and settings, as event files in `tensorboard/` of the run's folder. Nothing leaves the machine.

tensorboardX writes them: it is light, and TensorBoard itself is only needed to look at the files.
"""

from collections.abc import Sequence

import msgspec
import tensorboardX  # pyright: ignore[reportMissingImports]

from lightningrl.loggers.base import Ended, Outcome, Row, Run


class TensorBoard:
    """Show it with `tensorboard --logdir runs`."""

    reads_rollouts = False

    def begin(self, run: Run) -> str:
        folder = run.folder / "tensorboard"
        self._writer = tensorboardX.SummaryWriter(str(folder), flush_secs=10)
        self._writer.add_text("settings", _code(run.settings), 0)
        return f"tensorboard --logdir {folder}"

    def log(self, row: Row) -> None:
        for name, value in row.metrics.items():
            self._writer.add_scalar(name, value, row.step, walltime=row.at)

    def rollouts(self, batch: Sequence[Ended]) -> None:
        pass

    def end(self, outcome: Outcome) -> str:
        said = _code(outcome.result) if outcome.result else f"{outcome.ending} {outcome.error}".strip()
        self._writer.add_text("result", said, 0)
        self._writer.close()
        return ""


def _code(value: object) -> str:
    """Markdown of the JSON of `value`: TensorBoard shows an indented text as it is."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "".join(f"    {line}\n" for line in text.splitlines())
