"""Launcher direct on a real Slurm: no agent sees the ranks end, and yet it is told which failed first, and why."""

from __future__ import annotations

import re
from typing import Any

from slurm_cluster import SlurmCluster

from waiting import PATIENCE

#: Rank 1 fails in a way of its own; the others would continue for long.
FAILING = """\
import os, signal, sys, time
if os.environ["RANK"] == "1":
    print("no data here", file=sys.stderr, flush=True)
    {end}
time.sleep(100)
"""
FLAGS = ("--on", "lab", "--launcher", "direct")


def test_a_rank_that_died_of_a_signal_without_a_name_is_named(lab: Any) -> None:
    code, how = 168, "was killed by signal 40"
    lab.script(FAILING.format(end="os.kill(os.getpid(), signal.SIGRTMIN + 6)"))
    done = lab("run", "train.py", *FLAGS, "--nodes", "2")
    assert done.rc == code
    log = f"runs/{lab.run().name}/attempts/000/node-001/rank-1.err"
    said = (
        f"error: rank 1 on node02 {how}\n  why: no data here\n"
        f"  fix: allranks logs {lab.run().name} --rank 1 shows all that it printed\n  see: {log}\n"
    )
    assert done.stderr.endswith(said)
    status = lab.record()["status"]
    assert (status["state"], status["rank"], status["exit_code"]) == ("FAILED", 1, code)


def test_its_log_may_be_elsewhere(lab: Any) -> None:
    lab.script(FAILING.format(end="sys.exit(7)"))
    (lab.folder / "my logs").mkdir()
    lab.job(
        "script: train.py\ncluster: lab\nlaunch: {launcher: direct, nproc_per_node: 2}\n"
        "scheduler: {output: my logs/%x-%j.out, error: 'my logs/%j 100%%.err'}\n"
    )
    done = lab("run", "job.yaml")
    assert (done.rc, "error: rank 1 exited with code 7\n" in done.stderr) == (7, True), done.stderr


#: Fails only in its second attempt; both times the other rank is ended from outside.
SECOND = """\
import os, sys, time
if os.environ["ALLRANKS_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    sys.exit(7)
print("up", flush=True)
time.sleep(100)
"""


def test_what_an_earlier_attempt_ended_with_does_not_count(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: a requeued job waits 11 s."""
    lab.script(SECOND)
    process = lab.popen("run", "train.py", *FLAGS, "--nodes", "2")
    slurm.wait_until("both ranks", lambda: lab.runs() and _that_are_up(lab) == 2)
    slurm.run("scontrol", "requeue", (lab.run() / "attempts" / "000" / "job").read_text().strip())
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7, err.decode() + _said(lab)
    assert "error: rank 1 on node02 exited with code 7\n" in err.decode()
    assert "Terminated" in _said(lab).partition("DUE TO JOB REQUEUE")[2], "there was nothing to be mistaken for it"
    assert re.search(r"^attempts +2$", lab("status").stdout, re.MULTILINE)
    assert lab("logs", "--attempt", "1", "--rank", "1").stdout.endswith("] up\n")
    assert lab("logs", "--rank", "1").stdout == ""


def _that_are_up(lab: Any) -> int:
    return sum(log.read_text() == "up\n" for log in lab.run().glob("attempts/000/node-*/rank-*.out"))


def _said(lab: Any) -> str:
    (log,) = lab.run().glob("slurm-*.out")
    return str(log.read_text())
