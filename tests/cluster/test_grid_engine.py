"""What is peculiar to runs on a real Grid Engine; what all kinds do is in ``test_scenarios*.py``."""

from __future__ import annotations

import re
from typing import Any

import pytest
from followed_runs import follow
from grid_engine_cluster import GridEngineCluster
from left_behind import assert_nothing_lives
from ranks_told import PLACES, UP, expected, told, who
from trainings import OPTIONS, Training, assert_it_went_on_where_it_left, both, undisturbed

from allranks import contract
from exact_runs import weights_in
from terminals import Terminal

#: A rank that hears no warning.
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(1000)\n"
QUEUE = "choose another scheduler.partition; qconf -sql lists the queues"
RULE = "wait, or make resources.cpus_per_node the slots that it gives on each host: allocation_rule in qconf -sp four"
#: What a job asks for besides, and what keeps it waiting; ``{job}`` is its id.
WAITS = {
    "held": ("directives: ['-h']", "hqw (held)", "it is held: let it go with qrls {job}"),
    "closed": ("partition: closed.q", "qw (waiting)", f"its queue is disabled: wait, or {QUEUE}"),
    "gpus": (
        "resources: [gpu=5]",
        "qw (waiting)",
        "gpu=5,h_rt=300 is requested, and a host offers gpu=4: "
        "ask for less in scheduler.resources or scheduler.directives, or wait; see qhost -F",
    ),
    "uneven": ("directives: [-pe four 6]", "qw (waiting)", f"parallel environment four offers 0 slots: {RULE}"),
}


def test_why_a_job_waits_and_how_it_is_cancelled(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """Grid Engine keeps no record of a job that was deleted before it started.

    It takes more than 10 s on a slow machine: Grid Engine has to say of each of four jobs why it waits.
    """
    grid_engine_lab.script(UP)
    runs = {}
    for name, (asked, *_) in WAITS.items():
        grid_engine_lab.job(f"script: train.py\nscheduler: {{{asked}}}\n", f"{name}.yaml")
        runs[name] = follow(grid_engine_lab, name, f"{name}.yaml")
        runs[name].wait_for_job()
    for name, (_, state, why) in WAITS.items():
        run = runs[name]
        line = f"reason   {why.format(job=run.job)}\n"
        grid_engine.wait_until(
            name, lambda run=run, line=line: line in grid_engine_lab("status", run.folder.name).stdout
        )
        assert told(grid_engine_lab, run.folder) == (f"PENDING  {state}", "PENDING", None)
        assert grid_engine_lab("cancel", run.folder.name).rc == 0
        assert run.end().rc == 143, run.stderr
        assert told(grid_engine_lab, run.folder)[1:] == ("CANCELLED", "143")
    assert grid_engine.states() == {}


def test_a_refused_job_is_told_in_words(grid_engine_lab: Any) -> None:
    grid_engine_lab.script(PLACES)
    done = grid_engine_lab("run", "train.py", "--on", "lab", "--pe", "nothing")
    assert (done.rc, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-3:] == [
        "error: Grid Engine refuses the job",
        '  why: the requested parallel environment "nothing" does not exist',
        "  fix: set scheduler.parallel_environment to one that qconf -spl lists",
    ]


def test_other_parallel_environments(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """One slot on each host, which the script may take itself; and one that puts both nodes on one host.

    It takes more than 10 s on a slow machine: Grid Engine runs three jobs.
    """
    grid_engine_lab.script(PLACES)
    slots = {"one": 1, "first": 1, "smp": 4}
    runs = {
        name: follow(grid_engine_lab, name, "train.py", "--nodes", 2, "--pe", name, "--cpus-per-node", count)
        for name, count in slots.items()
    }
    for name in ("one", "first"):
        done = runs[name].end()
        assert done.rc == 0, done.stderr
        hosts = [row[4] for row in who(done.stdout)]
        assert len({*hosts}) == 2
        assert who(done.stdout) == expected([1, 1], hosts)
    assert runs["smp"].end().rc == 1
    assert re.search(
        r"^  why: Grid Engine gave the hosts node\d\d, and the job needs 2 different ones: ", runs["smp"].stderr, re.M
    ), runs["smp"].stderr


def test_a_time_limit_changes_nothing(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """It takes more than 10 s: each attempt lasts until it is warned of its time limit."""
    single = Training(grid_engine_lab, grid_engine, ("--time", "80s"))
    trainings = [single, *both(grid_engine_lab, grid_engine, "--time", "80s")]
    firsts = [training.trains() for training in trainings]
    grid_engine_lab.script(DEAF)
    deaf = follow(grid_engine_lab, "deaf", "train.py", "--time", "20s").end()  # Room for a slow machine to start it.
    assert deaf.rc == 137, deaf.stderr
    assert told(grid_engine_lab, deaf.folder) == ("TIMEOUT  finished", "TIMEOUT", "137")
    assert "it reached its time limit: raise resources.time" in deaf.stderr
    for training, first in zip(trainings, firsts, strict=True):
        second, decision = training.trains(attempt=1), training.decision(0)
        # By exit code 99 under the same id; after that Grid Engine would not take the second node again.
        how = "requeue" if training is single else "dependent"
        assert (decision["again"], decision["how"], decision["job"]) == (True, how, second)
        assert (second == first) == (training is single)
    for training in trainings:
        found = weights_in(training.end())
        assert training is single or found == undisturbed(grid_engine_lab, *OPTIONS)
        assert_it_went_on_where_it_left(training)
    assert_nothing_lives(grid_engine, grid_engine_lab)


def test_a_node_that_dies_costs_an_attempt(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """Grid Engine lets the job stand until the node is back, so that the run continues in another one.

    It takes more than 10 s: until the death is noticed, and each attempt imports torch.
    """
    training = Training(grid_engine_lab, grid_engine, ("--nodes", "2", "--stop-timeout", "20"))
    first = training.trains()
    shown = grid_engine.run("qstat", "-g", "t", "-u", "*")
    first_host, *_ = re.findall(r"@(\S+)\s+MASTER", shown)
    (dead,) = {*re.findall(r"@(\S+)\s+SLAVE", shown)} - {first_host}
    grid_engine.kill_node(dead)
    second = training.trains(attempt=1)
    decision = training.decision(0)
    assert (decision["again"], decision["lost"], decision["how"], decision["job"]) == (True, True, "submit", second)
    why = "Grid Engine ends a job that has lost a node only when that is back"
    assert decision["why"] == f"node 1 ({dead}) was lost; {why}"
    assert second != first
    assert weights_in(training.end()) == undisturbed(grid_engine_lab, *OPTIONS)
    assert (training.state, training.attempts) == ("SUCCEEDED", 2)


def test_a_shell_and_what_is_run_in_it(
    grid_engine_lab: Any, grid_engine: GridEngineCluster, terminals: list[Terminal]
) -> None:
    """It takes more than 10 s on a slow machine: two shells on two nodes, and a run in one of them."""
    grid_engine_lab.env.update(SHELL="/bin/sh", PS1="ready> ")
    grid_engine_lab.script(PLACES)
    words = ("sh", "-c", "echo \"$NHOSTS hosts\" 'a b'; pwd; exit 4")
    done = grid_engine_lab("shell", "--on", "lab", "--nodes", "2", "--", *words)
    assert (done.rc, done.stdout) == (4, f"2 hosts a b\n{grid_engine_lab.folder}\n"), done.stderr
    terminal = Terminal(grid_engine_lab, "shell", "--on", "lab", "--nodes", "2")
    terminals.append(terminal)
    terminal.read_until("ready> |# |\\$ ")
    terminal.type("allranks run train.py --backend gloo\n")
    terminal.read_until(r"succeeded in")
    terminal.type("exit 3\n")
    assert terminal.wait() == 3
    assert sorted(row[0] for row in who(terminal.shown.replace("\r", ""))) == [0, 1]
    assert contract.RUN_DIR not in terminal.shown
    grid_engine.wait_until("the nodes to be given back", lambda: not grid_engine.states() or None)


@pytest.mark.usefixtures("checked")
def test_a_job_that_could_never_start_is_not_submitted(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    grid_engine_lab.script(PLACES)
    done = grid_engine_lab("run", "train.py", "--on", "lab", "--nodes", "5", "--exclude", "node[01-02]")
    assert done.rc == 3, done.stderr
    assert "it could never start: parallel environment four offers 8 slots" in done.stderr + done.stdout
    assert grid_engine.states() == {}
