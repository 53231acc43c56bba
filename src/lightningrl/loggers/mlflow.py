"""MLflow: curves, settings as parameters, `result.json` and `curve.png` as artifacts. `MLFLOW_TRACKING_URI` sets it up.

For rollouts as traces in MLflow, add the logger `otlp` and let it send to MLflow's `/v1/traces`.
"""

import os
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME  # pyright: ignore[reportMissingImports]

from lightningrl.loggers.base import Ended, Outcome, Row, Run

STATUS = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
LENGTH = 6000
"""Largest length of a parameter in MLflow, in characters."""
PARAMS = 100
"""Largest number of parameters in a request to MLflow."""


class MLflow:
    reads_rollouts = False

    def begin(self, run: Run) -> str:
        self._client, self._folder = MlflowClient(), run.folder
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        known = run.notes.read("run_id")
        if known is None:
            made = self._client.create_run(self._experiment(experiment), tags={MLFLOW_RUN_NAME: run.name})
            known = made.info.run_id
            run.notes.write({"run_id": known})
        else:
            self._client.update_run(known, status="RUNNING")
        self._id = known
        if run.notes.read("params"):
            return ""
        params = [Param(name, str(value)[:LENGTH]) for name, value in _flat(run.settings).items()]
        for start in range(0, len(params), PARAMS):
            self._client.log_batch(self._id, params=params[start : start + PARAMS])
        run.notes.write({"params": True})
        return f"run {self._id} of the experiment `{experiment}` at {self._client.tracking_uri}"

    def log(self, row: Row) -> None:
        at = int(row.at * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, x, at, row.step) for name, x in row.metrics.items()])

    def rollouts(self, batch: Sequence[Ended]) -> None:
        pass

    def end(self, outcome: Outcome) -> str:
        for name in ("result.json", "curve.png"):
            if (self._folder / name).exists():
                self._client.log_artifact(self._id, str(self._folder / name))
        if outcome.error:
            self._client.set_tag(self._id, "error", outcome.error[:LENGTH])
        self._client.set_terminated(self._id, STATUS[outcome.ending])
        return ""

    def _experiment(self, name: str) -> str:
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:  # another run has made it meanwhile
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return found.experiment_id


def _flat(settings: Mapping[str, object], *, prefix: str = "") -> dict[str, object]:
    """`{"loop": {"steps": 3}}` → `{"loop.steps": 3}`. Lists stay as they are."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
