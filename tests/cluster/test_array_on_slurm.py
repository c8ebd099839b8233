"""A job array on a real Slurm: each task is a training of its own, and the run tells how they ended together."""

from __future__ import annotations

import re
from typing import Any

import pytest

from allranks import contract
from exact_runs import SCRIPT, undisturbed, weights_in

OPTIONS = ("--epochs", "2", "--quiet")
#: The training, with a folder for the checkpoints of each task. The task in ``$FAILS`` fails before.
TRAIN = f"""\
import os, runpy, sys
task = os.environ["SLURM_ARRAY_TASK_ID"]
if task == os.environ.get("FAILS"):
    print("no data here", file=sys.stderr, flush=True)
    sys.exit(7)
sys.argv += ["--folder", "checkpoints-" + task]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_each_task_trains_in_a_folder_of_its_own(lab: Any) -> None:
    done = _run(lab)
    assert done.rc == 0, done.stderr
    assert _told(lab) == ["SUCCEEDED  COMPLETED", "0"]
    run, job = lab.run(), lab.record()["handle"]["job_id"]
    for task in (0, 1):
        attempt = run / f"task-{task}" / contract.attempt_dir(0)
        assert (attempt / contract.JOB).read_text() == f"{job}_{task}\n"
        log = (attempt / "node-000" / "rank-0.out").read_text()
        assert weights_in(log) == undisturbed(lab, *OPTIONS)
        assert (lab.folder / f"checkpoints-{task}").is_dir()


@pytest.mark.parametrize("task", [0, 1])
def test_a_task_that_fails_is_told_of(lab: Any, task: int) -> None:
    done = _run(lab, FAILS=str(task))
    assert done.rc == 7
    assert _told(lab) == ["FAILED  FAILED", "7"]
    run = lab.run()
    what, why, see = done.stderr.splitlines()[-3:]
    blamed = re.fullmatch(rf"error: {run.name}, task {task}: rank (\d) .*exit code 7", what)
    assert blamed, what
    assert why == "  why: no data here"
    assert see == f"  see: runs/{run.name}/task-{task}/attempts/000/node-000/rank-{blamed[1]}.err"
    codes = [(run / f"task-{each}" / contract.attempt_dir(0) / contract.EXIT).read_text() for each in (0, 1)]
    assert codes == ["7\n" if each == task else "0\n" for each in (0, 1)]


def _run(lab: Any, **env: str) -> Any:
    """Run two tasks of two ranks to their end."""
    lab.script(TRAIN)
    lab.job("script: train.py\nlaunch: {nproc_per_node: 2}\n")
    lab.env["OMP_NUM_THREADS"] = "1"  # Sums are rounded as their parts are shared by threads.
    return lab("run", "job.yaml", "--on", "lab", "--array", "0-1", "--", *OPTIONS, timeout=120, **env)


def _told(lab: Any) -> list[str]:
    """Return the state and the exit code that status says."""
    done = lab("status")
    assert done.stderr == f"next: ls runs/{lab.run().name}/task-*/attempts/*/node-* for the logs of each task\n"
    return re.findall(r"^(?:state|exit code) +(.*)$", done.stdout, re.MULTILINE)
