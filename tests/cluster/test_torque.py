"""Runs on Torque, which asks for nodes in another way, says less of its jobs, and forgets them soon."""

from __future__ import annotations

import signal
from typing import Any

from left_behind import assert_nothing_lives
from pbs_cluster import StandInPbs
from pbs_runs import UP, follow, hosts_of
from ranks_told import WHO, expected, told, who

BOTH = ("torchrun", "direct")
FAILING = """\
import os, sys, time
if os.environ["RANK"] == "2":
    print("no data here", file=sys.stderr, flush=True)
    sys.exit(7)
time.sleep(100)
"""


def test_ranks_are_where_they_were_asked_for(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(WHO)
    flags = ("--nodes", 2, "--gpus-per-node", 2, "--cpus-per-node", 4)
    runs = [follow(torque_lab, name, "train.py", *flags, "--launcher", name) for name in BOTH]
    for run in runs:
        assert run.end().rc == 0, run.stderr
        known, hosts = torque.job(run.job), hosts_of(torque, run.job)
        assert known["Resource_List.nodes"] == "2:ppn=4:gpus=2"
        assert who(run.stdout) == expected([2, 2], hosts)
        assert told(torque_lab, run.folder) == ("SUCCEEDED  C (completed)", "SUCCEEDED", "0")


def test_the_rank_that_failed_first_is_named(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(FAILING)
    flags = ("--nodes", 2, "--nproc-per-node", 2)
    runs = [follow(torque_lab, name, "train.py", *flags, "--launcher", name) for name in BOTH]
    for run in runs:
        assert run.end().rc == 7
        name = run.folder.name
        assert run.stderr.splitlines()[-4:] == [
            f"error: rank 2 on {hosts_of(torque, run.job)[1]} ended with exit code 7",
            "  why: no data here",
            f"  fix: allranks logs {name} --rank 2",
            f"  see: runs/{name}/attempts/000/node-001/rank-2.err",
        ]
        assert told(torque_lab, run.folder) == ("FAILED  C (completed)", "FAILED", "7")
    assert_nothing_lives(torque, torque_lab)


def test_nothing_is_left_of_a_job_that_is_cancelled(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(UP)
    flags = ("--nodes", 2)
    runs = {name: follow(torque_lab, name, "train.py", *flags, "--launcher", name) for name in BOTH}
    deleted = follow(torque_lab, "qdel", "train.py", *flags)
    for run in (*runs.values(), deleted):
        run.wait_for_ranks(torque, 2)
    assert torque_lab("cancel", runs["torchrun"].folder.name, timeout=60).rc == 0
    runs["direct"].process.send_signal(signal.SIGINT)
    torque.run("qdel", deleted.job)
    for run, code in ((runs["torchrun"], 143), (runs["direct"], 130), (deleted, 143)):
        assert run.end(60).rc == code, run.stderr
        assert f"error: {run.folder.name} was cancelled\n" in run.stderr
        assert told(torque_lab, run.folder) == ("CANCELLED  C (completed)", "CANCELLED", str(code))
    assert_nothing_lives(torque, torque_lab)


def test_the_end_is_known_when_torque_has_forgotten_it(torque_lab: Any, torque: StandInPbs) -> None:
    torque.set(keep_completed=0.0)
    torque_lab.script("import sys\nsys.exit(int(sys.argv[1]))\n")
    codes = {"torchrun": 7, "direct": 0}
    runs = [follow(torque_lab, name, "train.py", "--launcher", name, "--", code) for name, code in codes.items()]
    for run, state in zip(runs, ("FAILED", "SUCCEEDED"), strict=True):
        code = codes[run.name]
        assert run.end().rc == code, run.stderr
        assert torque.job(run.job) == {}
        assert told(torque_lab, run.folder)[1:] == (state, str(code))


def test_a_job_that_waits(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(UP)
    torque_lab.job("script: train.py\nscheduler: {directives: ['-h']}\n")
    run = follow(torque_lab, "held", "job.yaml")
    job = run.wait_for_job(torque)
    said = torque_lab("status").stdout
    assert f"reason   it is held: let it go with qrls {job}\n" in said
    assert told(torque_lab) == ("PENDING  H (held)", "PENDING", None)
    assert torque_lab("cancel").rc == 0
    assert run.end(30).rc == 143
    assert told(torque_lab)[1:] == ("CANCELLED", "143")


def test_an_unknown_queue_is_told_in_words(torque_lab: Any) -> None:
    torque_lab.script(WHO)
    done = torque_lab("run", "train.py", "--on", "lab", "--queue", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-3:] == [
        "error: PBS refuses the job",
        "  why: Unknown queue MSG=cannot locate queue",
        "  fix: set scheduler.partition (nothere) to a queue that qstat -Q lists and you may use",
    ]
