"""A job array, on schedulers of all kinds: each task is a run of its own, and the run tells how they ended together."""

from __future__ import annotations

import re

from followed_runs import Followed, follow
from sites import Site, on
from trainings import SCRIPT, undisturbed

from allranks import contract
from exact_runs import weights_in

OPTIONS = ("--epochs", "2", "--quiet")
#: Tells which directory its task has; the task in ``$FAILS`` fails.
TASK = """\
import os, sys
names = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID")
(task,) = {os.environ[name] for name in names if name in os.environ}
print("in", os.environ["ALLRANKS_RUN_DIR"], flush=True)
if task == os.environ.get("FAILS"):
    print("no data here", file=sys.stderr, flush=True)
    sys.exit(7)
"""
#: The training, with a directory for the checkpoints of each task.
TRAIN = f"""\
{TASK}
import runpy
sys.argv += ["--folder", "checkpoints-" + task]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
TASKS = {"slurm": (0, 1), "pbs": (1, 2), "torque": (1, 2), "grid_engine": (1, 2)}


@on(*TASKS)
def test_each_task_is_a_run_of_its_own(site: Site) -> None:
    """Two ranks each; one array trains, and of two others the first and the last task fail.

    It takes more than 10 s: a task trains, and imports torch for that.
    """
    first, last = TASKS[site.kind]
    site.lab.script(TRAIN, "train.py")
    site.lab.script(TASK, "task.py")
    site.lab.env["OMP_NUM_THREADS"] = "1"  # Sums are rounded as their parts are shared by threads.
    array = ("--array", f"{first}-{last}", "--nproc-per-node", 2)
    failing = [
        (follow(site.lab, f"fails-{task}", "task.py", *array, "--env", f"FAILS={task}"), task) for task in (first, last)
    ]
    training = follow(site.lab, "whole", "train.py", *array, "--", *OPTIONS)
    for run, task in failing:
        assert run.end().rc == 7, run.stderr
        assert_tasks(site, run, {each: "7\n" if each == task else "0\n" for each in (first, last)})
        state, reason, code, ranks = _told(site, run)
        assert (state, code, ranks) == (f"FAILED  {site.native('FAILED')}", "7", "4 on 2 nodes")
        assert re.fullmatch(rf"task {task}: rank \d .*code 7", reason), reason
        name = run.folder.name
        what, why, see = run.stderr.splitlines()[-3:]
        blamed = re.fullmatch(rf"error: {name}, task {task}: rank (\d) .*code 7", what)
        assert blamed, what
        assert why == "  why: no data here"
        assert see == f"  see: runs/{name}/task-{task}/attempts/000/node-000/rank-{blamed[1]}.err"
    assert training.end().rc == 0, training.stderr
    logs = assert_tasks(site, training, {first: "0\n", last: "0\n"})
    assert _told(site, training) == [f"SUCCEEDED  {site.native('SUCCEEDED')}", "0", "4 on 2 nodes"]
    for task, log in logs.items():
        assert weights_in(log) == undisturbed(site.lab, *OPTIONS)
        assert (site.lab.folder / f"checkpoints-{task}").is_dir()


def assert_tasks(site: Site, run: Followed, ends: dict[int, str]) -> dict[int, str]:
    """Assert which job each task of a run was, and how it ended; return what its first rank has written."""
    logs = {}
    for task, end in ends.items():
        folder = run.folder / f"task-{task}"
        attempt = folder / contract.attempt_dir(0)
        assert (attempt / contract.JOB).read_text() == site.task(run.job, task) + "\n"
        assert (attempt / contract.EXIT).read_text() == end
        logs[task] = (attempt / "node-000" / "rank-0.out").read_text()
        assert logs[task].startswith(f"in {folder}\n")
    return logs


def _told(site: Site, run: Followed) -> list[str]:
    """Return the state, the reason, the exit code and the ranks that status says."""
    done = site.lab("status", run.folder.name)
    assert done.stderr == f"next: ls runs/{run.folder.name}/task-*/attempts/*/node-* for the logs of each task\n"
    return re.findall(r"^(?:state|reason|exit code|ranks) +(.*)$", done.stdout, re.MULTILINE)
