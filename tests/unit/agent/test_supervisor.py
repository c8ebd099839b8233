"""The supervisor of a batch job as a process, with a scheduler's commands that do what the real ones do to it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from batch_orders import NODE, ORDERS

from allranks import contract


def test_commands_that_are_run_after_the_ranks_outlive_a_requeue(tmp_path: Path) -> None:
    """Slurm signals all processes of a job that it requeues: scontrol must be there to get its answer."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scontrol = """case "$1 $2" in
  "show hostnames") echo n1 ;;
  "requeue 7") kill -TERM $$; kill -HUP $$; kill -INT $$; touch requeued ;;
  *) echo "JobState=RUNNING PreemptTime=None" ;;
esac"""
    for name, text in {"scontrol": scontrol, "srun": "exit 75", "sbatch": "touch submitted; echo 8"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    orders = replace(ORDERS, module="allranks.agent.slurm_job")
    (tmp_path / contract.BATCH_ORDERS).write_text(orders.to_json())
    (tmp_path / contract.NODE_ORDERS).write_text(replace(NODE, run_dir=str(tmp_path)).to_json())
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": "."}
    environ = {**job, contract.RUN_DIR: str(tmp_path), "PATH": f"{commands}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "allranks.agent", "--supervise", "start"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    why = "it was stopped on request, and is to be continued"
    assert (done.returncode, done.stdout, done.stderr) == (75, f"allranks: another attempt follows: {why}\n", "")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("requeued", "submitted")) == ["requeued"]
