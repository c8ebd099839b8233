"""A job array on PBS: each task is a training of its own, and the run tells how they ended together."""

from __future__ import annotations

import re
from typing import Any

from pbs_cluster import PbsCluster, StandInPbs
from pbs_runs import Followed, follow

from allranks import contract
from exact_runs import SCRIPT, undisturbed, weights_in

OPTIONS = ("--epochs", "2", "--quiet")
TASKS = (1, 2, 3)
#: The training, with a folder for the checkpoints of each task. The task in ``$FAILS`` fails before.
TRAIN = f"""\
import os, runpy, sys
task = os.environ.get("PBS_ARRAY_INDEX") or os.environ["PBS_ARRAYID"]
print("in", os.environ["ALLRANKS_RUN_DIR"], flush=True)
if task == os.environ.get("FAILS"):
    print("no data here", file=sys.stderr, flush=True)
    sys.exit(7)
sys.argv += ["--folder", sys.argv.pop() + "-" + task]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_each_task_trains_in_a_folder_of_its_own(pbs_lab: Any, pbs: PbsCluster) -> None:
    _check(pbs_lab, pbs)


def test_tasks_of_torque(torque_lab: Any, torque: StandInPbs) -> None:
    _check(torque_lab, torque)


def _check(lab: Any, pbs: PbsCluster) -> None:
    """Train in three tasks; again, as the second one fails; both at once."""
    lab.script(TRAIN)
    lab.job("script: train.py\nlaunch: {nproc_per_node: 2}\n")
    lab.env["OMP_NUM_THREADS"] = "1"  # Sums are rounded as their parts are shared by threads.
    array = ("job.yaml", "--array", "1-3")
    whole = follow(lab, "whole", *array, "--", *OPTIONS, "whole")
    failing = follow(lab, "failing", *array, "--env", "FAILS=2", "--", *OPTIONS, "failing")
    assert whole.end().rc == 0, whole.stderr
    assert failing.end().rc == 7, failing.stderr
    for run in (whole, failing):
        for task in TASKS:
            _check_task(lab, run, task, fails=run is failing and task == 2)
    native = f"{pbs.finished} ({'completed' if pbs.flavour == 'torque' else 'finished'})"
    assert _told(lab, whole) == [f"SUCCEEDED  {native}", "0"]
    assert _told(lab, failing) == [f"FAILED  {native}", "7"]
    name = failing.folder.name
    what, why, see = failing.stderr.splitlines()[-3:]
    blamed = re.fullmatch(rf"error: {name}, task 2: rank (\d) .*exit code 7", what)
    assert blamed, what
    assert why == "  why: no data here"
    assert see == f"  see: runs/{name}/task-2/attempts/000/node-000/rank-{blamed[1]}.err"


def _check_task(lab: Any, run: Followed, task: int, *, fails: bool) -> None:
    folder = run.folder / f"task-{task}"
    attempt = folder / contract.attempt_dir(0)
    assert (attempt / contract.JOB).read_text() == run.job.replace("[]", f"[{task}]") + "\n"
    assert (attempt / contract.EXIT).read_text() == ("7\n" if fails else "0\n")
    log = (attempt / "node-000" / "rank-0.out").read_text()
    assert log.startswith(f"in {folder}\n")
    assert fails or weights_in(log) == undisturbed(lab, *OPTIONS)
    assert (lab.folder / f"{run.name}-{task}").is_dir() != fails


def _told(lab: Any, run: Followed) -> list[str]:
    """Return the state and the exit code that status says."""
    done = lab("status", run.folder.name)
    assert done.stderr == f"next: ls runs/{run.folder.name}/task-*/attempts/*/node-* for the logs of each task\n"
    return re.findall(r"^(?:state|exit code) +(.*)$", done.stdout, re.MULTILINE)
