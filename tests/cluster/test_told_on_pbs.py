"""What a person is told of runs on PBS: while they wait and run, how they ended, and when PBS does not answer."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
from followed_runs import Followed, follow, hosts_of
from left_behind import assert_nothing_lives
from pbs_cluster import PbsCluster, StandInPbs
from ranks_told import GOES, UP, told

from waiting import PATIENCE

BOTH = ("torchrun", "direct")
#: Rank 1 fails in a way of its own; the others would continue for long.
FAILING = """\
import os, signal, sys, time
if os.environ["RANK"] == "1":
    print("no data here", file=sys.stderr, flush=True)
    {end}
time.sleep(100)
"""
ENDS = {
    "exits": ("sys.exit(7)", 7, "exited with code 7"),
    "dies": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
}


NO_FILE = "cp: cannot stat '/nowhere/file': No such file or directory"
FAILS_ON_SECOND = '[ "$ALLRANKS_NODE_RANK" = 0 ] || exit 4'
#: What is set up, and what is told of it: which exit code, what failed on which node, and why; in which file.
SET_UPS = {
    "script": (
        "{setup: [echo hello, cp /nowhere/file .]}",
        1,
        ": line 2 of environment.setup failed: cp /nowhere/file .",
        NO_FILE,
    ),
    "node": (
        f"{{node_setup: [cp /nowhere/file . || true, '{FAILS_ON_SECOND}']}}",
        4,
        ": on {second}: line 2 of environment.node_setup failed: exit 4",
        NO_FILE,
    ),
    "python": ("{python: /nowhere/python}", 127, "", "/nowhere/python: No such file or directory"),
}


@pytest.mark.parametrize("launcher", BOTH)
def test_a_set_up_that_fails_is_told_in_its_own_words(pbs_lab: Any, pbs: PbsCluster, launcher: str) -> None:
    pbs_lab.script(UP)
    runs = []
    for kind, (environment, *_) in SET_UPS.items():
        launch = f"{{launcher: {launcher}, stop_timeout: 1}}"
        job = f"script: train.py\nresources: {{nodes: 2}}\nlaunch: {launch}\nenvironment: {environment}\n"
        pbs_lab.job(job, f"{kind}.yaml")
        runs.append(follow(pbs_lab, kind, f"{kind}.yaml"))
    for run in runs:
        _, code, failed, cause = SET_UPS[run.name]
        assert run.end().rc == code
        what, why, *_, see = run.stderr[run.stderr.rindex("error: ") :].splitlines()
        failed = failed.format(second=hosts_of(pbs, run.job)[1])
        assert what.startswith(f"error: {run.folder.name} FAILED{failed}")
        assert why.endswith(cause) if failed else cause in why
        number = run.job.partition(".")[0]
        logs = {"script": f"pbs-{number}.out", "node": "attempts/000/node-001/agent.log"}
        log = re.escape(logs[run.name]) if run.name in logs else r"attempts/000/node-00[01]/agent\.log"
        assert re.fullmatch(rf"  see: runs/{run.folder.name}/{log}", see)
    assert_nothing_lives(pbs, pbs_lab)


REFUSED = {
    "--queue nothere": [
        "error: PBS refuses the job",
        "  why: Unknown queue",
        "  fix: set scheduler.partition (nothere) to a queue that qstat -Q lists and you may use",
    ],
    "--queue gpuq --time 3h": [
        "error: PBS refuses the job",
        "  why: Job violates queue and/or server resource limits",
        "  fix: lower resources.time (03:00:00), resources.nodes, resources.cpus_per_node, resources.gpus_per_node or "
        "resources.memory, or choose another scheduler.partition (gpuq); qstat -Q -f shows the limits of the queues",
    ],
    "--queue closedq": [
        "error: PBS refuses the job",
        "  why: Unauthorized Request",
        "  fix: its queue may not take your jobs: set scheduler.partition (closedq) to a queue that qstat -Q lists "
        "and you may use",
    ],
    "--constraint nosuch=2": [
        "error: PBS refuses the job",
        "  why: Unknown resource: nosuch",
        "  fix: change scheduler.constraint, scheduler.resources or scheduler.directives",
    ],
    "--exclude pbs01": [
        "error: scheduler.exclude: PBS cannot leave hosts out",
        "  why: it has no option for that",
        "  fix: name those to use in scheduler.include, or a feature that they have in scheduler.constraint",
    ],
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_pbs_refuses_is_told_in_words(pbs_lab: Any, flags: str) -> None:
    pbs_lab.script(UP)
    done = pbs_lab("run", "train.py", "--on", "lab", *flags.split())
    assert (done.rc, done.stdout) == (2 if "exclude" in flags else 1, "")
    assert done.stderr.splitlines()[-3:] == REFUSED[flags]
    if "exclude" not in flags:
        assert told(pbs_lab) == ("FAILED  not started", "FAILED", "1")


#: Jobs that wait: how they are requested, PBS's letter, and why they wait.
OUT_OF_TIME = "it reached its time limit: raise resources.time"
WAITING = {
    "many": (
        "resources: {nodes: 5}",
        "Q (queued)",
        "it asks for more nodes than there are, and so it will never start: lower resources.nodes",
    ),
    "held": ("scheduler: {directives: ['-h']}", "H (held)", "it is held: let it go with qrls {job}"),
}


def test_why_a_job_waits_and_what_becomes_of_it_when_it_is_cancelled(pbs_lab: Any, pbs: PbsCluster) -> None:
    """It takes more than 10 s on a slow machine: two jobs that wait are asked about and cancelled in turn."""
    pbs_lab.script(UP)
    runs = []
    for name, (asked, _, _) in WAITING.items():
        pbs_lab.job(f"script: train.py\n{asked}\n", f"{name}.yaml")
        runs.append(follow(pbs_lab, name, f"{name}.yaml"))
    for run in runs:
        _, native, words = WAITING[run.name]
        why = words.format(job=run.wait_for_job())
        pbs.wait_until(f"status to say why {run.name} waits", lambda run=run, why=why: _reason(run) == why)
        assert told(pbs_lab, run.folder) == (f"PENDING  {native}", "PENDING", None)
        assert pbs_lab("cancel", run.name).rc == 0
        assert run.end().rc == 143, run.stderr
        assert f"allranks: {run.folder.name} was cancelled" in run.stderr
        assert told(pbs_lab, run.folder) == ("CANCELLED  F (finished)", "CANCELLED", "143")
        assert pbs.job(run.job)["job_state"] == "F"


def test_a_follower_tells_why_its_job_waits(pbs_lab: Any, pbs: PbsCluster) -> None:
    pbs_lab.script(UP)
    run = follow(pbs_lab, "many", "train.py", "--nodes", 5)
    words = WAITING["many"][2]
    run.wait_for_job()
    assert run.process.stderr
    lines = iter(run.process.stderr.readline, b"")
    assert f"allranks: {run.folder.name}: waiting: {words}\n".encode() in lines
    run.process.send_signal(signal.SIGINT)
    assert run.end().rc == 130
    assert pbs.job(run.job)["job_state"] == "F"


def _reason(run: Followed) -> str | None:
    said = re.search(r"^reason +(.*)$", run.lab("status", run.folder.name).stdout, re.MULTILINE)
    return said and said[1]


def test_the_end_is_known_where_pbs_keeps_no_history(standin_lab: Any, standin: StandInPbs) -> None:
    """It takes more than 10 s on a slow machine: four runs on two nodes each."""
    standin.set(history=False)
    standin_lab.script("import sys\nsys.exit(int(sys.argv[1]))\n")
    runs = [
        (follow(standin_lab, f"{name}-{code}", "train.py", "--nodes", 2, "--launcher", name, "--", code), code)
        for name in BOTH
        for code in (0, 7)
    ]
    states = {0: ("SUCCEEDED", "SUCCEEDED", "0"), 7: ("FAILED", "FAILED", "7")}
    for run, code in runs:
        assert run.end().rc == code, run.stderr
        assert standin.job(run.job) == {}
        assert told(standin_lab, run.folder) == states[code]
        assert code == 0 or re.search(r"^error: rank [01] on pbs0\d exited with code 7$", run.stderr, re.MULTILINE)


def test_a_job_that_was_cancelled_is_told_of_without_history(standin_lab: Any, standin: StandInPbs) -> None:
    standin.set(history=False, kill_delay=PATIENCE)
    standin_lab.script(UP)
    run = follow(standin_lab, "up", "train.py").wait_for_ranks()
    assert standin_lab("cancel", timeout=PATIENCE).rc == 0
    assert run.end().rc == 143
    assert standin.job(run.job) == {}
    assert told(standin_lab)[1:] == ("CANCELLED", "143")


def test_a_time_limit_is_told_of_without_history(standin_lab: Any, standin: StandInPbs) -> None:
    """It takes more than 10 s: until the limit, which leaves a slow machine the time to start the run."""
    standin.set(history=False, kill_delay=PATIENCE)
    standin_lab.script(UP)
    run = follow(standin_lab, "up", "train.py", "--time", "15s").end()
    assert (run.rc, f"error: {run.folder.name} TIMEOUT: {OUT_OF_TIME}\n" in run.stderr) == (143, True), run.stderr
    assert standin.job(run.job) == {}
    assert told(standin_lab)[1:] == ("TIMEOUT", "143")


def test_a_qstat_that_fails_now_and_then_does_not_matter(standin_lab: Any, standin: StandInPbs) -> None:
    standin_lab.script(GOES)
    run = follow(standin_lab, "train", "train.py", "--nodes", 2).wait_for_ranks(2)
    standin.fail_next("qstat", times=3, words="qstat: End of File", code=1)
    (standin_lab.folder / "part").write_text("0")
    (standin_lab.folder / "part").rename(standin_lab.folder / "go")
    assert run.end().rc == 0, run.stderr
    assert told(standin_lab) == ("SUCCEEDED  F (finished)", "SUCCEEDED", "0")


def test_a_server_that_is_down_for_a_while(standin_lab: Any, standin: StandInPbs) -> None:
    standin_lab.script(GOES)
    run = follow(standin_lab, "train", "train.py", "--nodes", 2).wait_for_ranks(2)
    standin.pause_server()
    assert told(standin_lab) == ("UNKNOWN  PBS does not answer", "UNKNOWN", None)
    assert "cannot connect to server pbsctl (errno=15010)" in str(_reason(run))
    done = standin_lab("cancel")
    assert (done.rc, "error: PBS cannot be reached\n" in done.stderr) == (1, True), done.stderr
    (standin_lab.folder / "part").write_text("0")
    (standin_lab.folder / "part").rename(standin_lab.folder / "go")
    standin.wait_until("the end of the script", lambda: (run.folder / "attempts/000/exit").exists())
    assert run.process.poll() is None
    standin.resume_server()
    assert run.end().rc == 0, run.stderr
    assert told(standin_lab) == ("SUCCEEDED  F (finished)", "SUCCEEDED", "0")
