"""Trackers that need another package: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

from allranks.errors import RankError
from allranks.runtime.trackers.base import RunInfo, Tracker, Value

#: Tag by which a later attempt finds its MLflow run.
_TAG = "allranks.run"


class TensorBoard:
    """Writes event files into a directory, with torch's own writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._purge: int | None = None
        self._writer: Any = None

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a point of each curve, and flush."""
        for name, value in values.items():
            self._open().add_scalar(name, value, step)
        self._writer.flush()

    def config(self, values: dict[str, object]) -> None:
        """Show hyper-parameters as a text."""
        text = json.dumps(values, indent=2, default=str)
        self._open().add_text("config", f"```json\n{text}\n```")

    def resume(self, step: int) -> None:
        """Make TensorBoard hide the points after ``step`` of an earlier start."""
        self.close()
        self._purge = step + 1

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)
        return self._writer


def open_tensorboard(run: RunInfo) -> Tracker:
    """Write to ``tensorboard/`` in the run's directory; without a run, to a new directory."""
    _need("tensorboard")
    if run.folder is not None:
        return TensorBoard(run.folder / "tensorboard")
    return TensorBoard(Path("tensorboard", f"{run.name}-{time.strftime('%m%d-%H%M%S')}"))


class WeightsAndBiases:
    """Writes to a Weights & Biases run, which its own variables configure, such as WANDB_MODE=offline."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # W&B's own step counter only increases, but a training that resumes from a checkpoint goes back.
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Value]) -> None:
        """Write a point of each curve."""
        self._run.log({"step": step, **values})

    def config(self, values: dict[str, object]) -> None:
        """Set hyper-parameters."""
        self._run.config.update(values, allow_val_change=True)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_wandb(run: RunInfo) -> Tracker:
    """Start a run, or resume that of an earlier attempt. The project has the name of the job."""
    _need("wandb")
    import wandb

    options: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", run.name)}
    if run.folder is not None:
        options["dir"] = os.environ.get("WANDB_DIR", str(run.folder))
    if run.id is not None and "WANDB_RUN_ID" not in os.environ:
        options.update(id=re.sub(r"[^\w-]", "-", run.id), name=run.id, resume="allow")
    try:
        return WeightsAndBiases(wandb.init(**options))
    except Exception as error:
        raise _cannot_start("wandb", error, "wandb login, or without network: WANDB_MODE=offline") from error


class Mlflow:
    """Writes to an MLflow run: on the server MLFLOW_TRACKING_URI, or to files in the run's directory."""

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


def open_mlflow(run: RunInfo) -> Tracker:
    """Start a run in the experiment with the name of the job, or resume that of an earlier attempt."""
    _need("mlflow")
    from mlflow import MlflowClient

    folder = (run.folder or Path.cwd()).absolute()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
    try:
        client = MlflowClient(uri)
        return Mlflow(client, _mlflow_run(client, run))
    except Exception as error:
        raise _cannot_start("mlflow", error, f"check that {uri} can be reached: MLFLOW_TRACKING_URI") from error


def _mlflow_run(client: Any, run: RunInfo) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.name)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    if run.id is None:
        return str(client.create_run(number, run_name=run.name).info.run_id)
    found = client.search_runs([number], filter_string=f"tags.`{_TAG}` = '{run.id}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)
    return str(client.create_run(number, run_name=run.id, tags={_TAG: run.id}).info.run_id)


def _need(package: str) -> None:
    """Check that the package of a tracker is installed."""
    if util.find_spec(package) is None:
        raise RankError(
            f'trackers="{package}" needs the package {package}, which is not installed',
            why=f"{sys.executable} does not find it",
            fix=f"pip install {package}",
        )


def _cannot_start(tracker: str, error: Exception, fix: str) -> RankError:
    text = str(error).strip() or type(error).__name__
    return RankError(f"{tracker} cannot start", why=text.split("\n")[0], fix=fix)
