"""MLflow: on the server of MLFLOW_TRACKING_URI, else in files of the run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from allranks.runtime.trackers.base import Place, Tracker, Value, cannot_start, need

#: Tag of a run of MLflow by which a later attempt finds it.
_TAG = "allranks.run"


class Mlflow:
    """Writes to a run of MLflow.

    Args:
        client: an ``MlflowClient``.
        run: its id.
    """

    def __init__(self, client: Any, run: str) -> None:
        self._client = client
        self._run = run

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a point of each curve, in one message."""
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        points = [Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=points)

    def config(self, values: dict[str, object]) -> None:
        """Set hyper-parameters, which MLflow does not let change later."""
        for name, value in values.items():
            self._client.log_param(self._run, name, value)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


def open_mlflow(place: Place) -> Tracker:
    """Start a run in the experiment named as the job, or go on with that of an earlier attempt.

    Raises:
        RankError: MLflow is not installed, or its server does not answer.
    """
    need("mlflow", "mlflow")
    from mlflow import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or _local_store(place)
    try:
        client = MlflowClient(uri)
        return Mlflow(client, _run(client, place))
    except Exception as error:
        raise cannot_start("mlflow", error, f"check that {uri} can be reached: MLFLOW_TRACKING_URI") from error


def _run(client: Any, place: Place) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", place.name)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    if place.run is None:
        return str(client.create_run(number, run_name=place.name).info.run_id)
    found = client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{place.run}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)
    return str(client.create_run(number, run_name=place.run, tags={_TAG: place.run}).info.run_id)


def _local_store(place: Place) -> str:
    """Give the address of a database in the run's folder, or where the script was started."""
    return f"sqlite:///{(place.folder or Path.cwd()).absolute() / 'mlflow.db'}"
