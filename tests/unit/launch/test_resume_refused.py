"""What cannot be resumed, whichever scheduler it ran on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.clusters.base import Request
from allranks.clusters.registry import load_kind
from allranks.errors import LaunchError
from allranks.job.spec import Job
from allranks.launch.submit import prepare_resume
from allranks.runs.record import Record, Run
from allranks.runs.status import State, Status


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [("slurm", {}), ("pbs", {"flavour": "openpbs"}), ("pbs", {"flavour": "torque"}), ("grid_engine", {})],
)
def test_a_job_array(tmp_path: Path, kind: str, scheduler: dict[str, str]) -> None:
    job = Job.model_validate({"binary": "true", "cluster": "lab", "scheduler": {"array": "1-3", **scheduler}})
    folder = tmp_path / "run"
    folder.mkdir()
    plan = load_kind(kind).plan(Request(job, tmp_path, folder, {"PATH": ""}))
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    record = Record(
        id="run",
        name="n",
        cluster="lab",
        kind=kind,
        world_size=1,
        nnodes=1,
        host="h",
        stop_timeout=1.0,
        file_mode=0o600,
        status=Status(State.FAILED, "failed"),
        created=0.0,
    )
    with pytest.raises(LaunchError, match="run is a job array: its tasks cannot be resumed together"):
        prepare_resume(Run(folder, record), load_kind(kind))
