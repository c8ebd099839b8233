"""The supervisor of a batch job as a process, with a scheduler's commands that do what the real ones do to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from allranks import contract
from allranks.record.files import copy_node_code
from node_orders import NODE, ORDERS


def supervise(run: Path, commands: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the supervisor of Slurm's job 7 on one node; ``commands`` are Slurm's, by their names."""
    folder = run / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    orders = ORDERS._replace(module="allranks.agent.slurm_job")
    (run / contract.BATCH_SPEC).write_text(orders.to_json())
    (run / contract.NODE_SPEC).write_text(NODE._replace(run_dir=str(run)).to_json())
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": "."}
    environ = {**job, contract.RUN_DIR: str(run), "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "allranks.agent", "--supervise", "start"]
    return subprocess.run(command, cwd=run, env=environ, capture_output=True, text=True, check=False)


def test_commands_that_are_run_after_the_ranks_outlive_a_requeue(tmp_path: Path) -> None:
    """Slurm signals all processes of a job that it requeues: scontrol must be there to get its answer."""
    scontrol = """case "$1 $2" in
  "show hostnames") echo n1 ;;
  "requeue 7") kill -TERM $$; kill -HUP $$; kill -INT $$; touch requeued ;;
  *) echo "JobState=RUNNING PreemptTime=None" ;;
esac"""
    done = supervise(tmp_path, {"scontrol": scontrol, "srun": "exit 75", "sbatch": "touch submitted; echo 8"})
    why = "it was stopped on request, and is to be continued"
    assert (done.returncode, done.stdout, done.stderr) == (75, f"allranks: another attempt follows: {why}\n", "")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("requeued", "submitted")) == ["requeued"]


@pytest.mark.parametrize(
    ("code", "events"),
    [
        (0, [("start", "RUNNING"), ("end", "SUCCEEDED")]),
        (1, [("start", "RUNNING"), ("failure", "FAILED")]),
        (75, [("start", "RUNNING"), ("requeue", "PENDING")]),
        (143, [("start", "RUNNING"), ("end", "CANCELLED")]),
    ],
)
def test_it_notifies_of_the_start_and_the_end_of_an_attempt(
    tmp_path: Path, code: int, events: list[tuple[str, str]]
) -> None:
    commands = {
        "scontrol": 'case "$2" in hostnames) echo n1;; *) echo "JobState=RUNNING";; esac',
        "srun": f"exit {code}",
    }
    orders = {"on": ["start", "failure", "requeue", "end"], "command": ["/bin/sh", "-c", "cat >>got; echo >>got"]}
    run = tmp_path / "train-1"
    run.mkdir()
    (run / contract.NOTIFY_FILE).write_text(json.dumps({**orders, "webhook": False}))
    copy_node_code(run / contract.CODE, parts=(*contract.NODE_CODE, *contract.DIAGNOSIS_CODE))
    done = supervise(run, commands)
    assert (done.returncode, done.stderr) == (code, "")
    got = [json.loads(line) for line in (run / "got").read_text().splitlines()]
    assert [(each["event"], each["state"]) for each in got] == events
    assert {(each["run"], each["job"], each["attempt"]) for each in got} == {("train-1", "7", 1)}
