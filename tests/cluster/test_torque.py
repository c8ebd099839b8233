"""Runs on Torque, which asks for nodes in another way, says less of its jobs, and forgets them soon."""

from __future__ import annotations

from typing import Any

from followed_runs import follow, hosts_of
from pbs_cluster import StandInPbs
from ranks_told import PLACES, UP, expected, told, who

BOTH = ("torchrun", "direct")


def test_nodes_are_asked_for_with_processors_and_gpus(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(PLACES)
    flags = ("--nodes", 2, "--gpus-per-node", 2, "--cpus-per-node", 4)
    runs = [follow(torque_lab, name, "train.py", *flags, "--launcher", name) for name in BOTH]
    for run in runs:
        assert run.end().rc == 0, run.stderr
        known, hosts = torque.job(run.job), hosts_of(torque, run.job)
        assert known["Resource_List.nodes"] == "2:ppn=4:gpus=2"
        assert who(run.stdout) == expected([2, 2], hosts)
        assert told(torque_lab, run.folder) == ("SUCCEEDED  C (completed)", "SUCCEEDED", "0")


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
    job = run.wait_for_job()
    said = torque_lab("status").stdout
    assert f"reason   it is held: let it go with qrls {job}\n" in said
    assert told(torque_lab) == ("PENDING  H (held)", "PENDING", None)
    assert torque_lab("cancel").rc == 0
    assert run.end().rc == 143
    assert told(torque_lab)[1:] == ("CANCELLED", "143")


def test_an_unknown_queue_is_told_in_words(torque_lab: Any) -> None:
    torque_lab.script(PLACES)
    done = torque_lab("run", "train.py", "--on", "lab", "--queue", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-3:] == [
        "error: PBS refuses the job",
        "  why: Unknown queue MSG=cannot locate queue",
        "  fix: set scheduler.partition (nothere) to a queue that qstat -Q lists and you may use",
    ]
