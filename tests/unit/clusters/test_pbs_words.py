"""PBS' words are told in plain English, and none is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pbs_recorded import recorded

from allranks.clusters.pbs_words import reason_of, state_of, waits_for, why_pending
from allranks.runs.status import State

STATES = {State.PENDING: "QHWT", State.RUNNING: "RBESU", State.UNKNOWN: "FXCM?"}
#: Reasons of the recorded jobs: whether waiting is in vain, and what is told.
RECORDED = {
    "held": (False, "it is held: let it go with qrls 263.pbsctl"),
    "begin": (False, "its time to start has not come"),
    "dependent": (False, "it waits for job 265.pbsctl"),
    "log-folder-missing-kd": (
        False,
        "it could not be started too often and is held: ask the site's support",
    ),
    "stopped-queue": (False, "its queue starts no jobs: choose another scheduler.partition, or wait"),
    "busy": (
        False,
        "too little of what it asks for is free: CPUs (32 requested, 18 free, 32 in all): "
        "wait, or change resources.cpus_per_node",
    ),
    "never-ngpus": (
        False,
        "too little of what it asks for is free: GPUs: wait, or change resources.gpus_per_node",
    ),
    "never": (
        True,
        "it asks for more nodes than there are, and so it will never start: lower resources.nodes",
    ),
    "never-ncpus": (
        True,
        "it asks for more CPUs than PBS has (99 requested, 32 free, 32 in all), and so it will never start: "
        "lower resources.cpus_per_node",
    ),
    "never-host": (
        True,
        "no node has host nosuch, and so it will never start: change scheduler.include",
    ),
    "running": (False, None),
    "completed": (False, None),
    "failed": (False, None),
}
LIMITS = {
    "Queue gpuq job limit has been reached.": "jobs have reached the limit of queue gpuq on jobs that run",
    "Server job limit has been reached.": "jobs have reached the limit of the server on jobs that run",
    "User has reached queue gpuq running job limit.": "your jobs have reached the limit of queue gpuq on jobs that run",
    "User has reached server running job limit.": "your jobs have reached the limit of the server on jobs that run",
    "Project has reached queue gpuq's running limit.": (
        "the jobs of your project have reached the limit of queue gpuq on jobs that run"
    ),
    "Queue gpuq per-user limit reached on resource ngpus": "your jobs have reached the limit of queue gpuq on GPUs",
    "Server per-group limit reached on resource ncpus": (
        "the jobs of your group have reached the limit of the server on CPUs"
    ),
    "would exceed user ada's limit on resource mem in complex": (
        "your jobs have reached the limit of the server on memory"
    ),
    "would exceed project lab's limit on resource ngpus in queue gpuq": (
        "the jobs of your project have reached the limit of queue gpuq on GPUs"
    ),
    "would exceed overall limit on resource nodect in queue gpuq": (
        "jobs have reached the limit of queue gpuq on nodes"
    ),
    "Node has reached job run limit": "jobs have reached the limit of a node on jobs that run",
}
#: Written as the scheduler of OpenPBS writes them, and that of Torque, not recorded.
COMMENTS = {
    "Not enough free nodes available": "the nodes that it needs are in use",
    "Not enough of the right type of nodes available": (
        "the nodes that it asks for are in use, or there are none such: pbsnodes -aSj shows the nodes"
    ),
    "Queue not an execution queue.": "its queue only hands jobs on: choose another scheduler.partition, or wait",
    "Job would conflict with reservation or top job": (
        "its nodes are kept for a reservation or for jobs before it: a shorter resources.time may fit in before"
    ),
    "Job would break strict sorted order": "jobs with a higher priority are before it",
    "Job would not finish before dedicated time": (
        "the nodes are kept for dedicated time: a shorter resources.time may fit in before"
    ),
    "Job will run in primetime only": "it waits for prime time",
    "Job only runs in nonprimetime": "it waits for the hours outside prime time",
    "Job will cross into primetime": "it waits for the hours outside prime time",
    "Draining system to allow starving job to run": "jobs with a higher priority are before it",
    "Number of concurrent running subjobs limit reached": "as many tasks of its array run as it allows at a time",
    "Node is in an ineligible state: offline": (
        "nodes that it needs are down, offline or in use: pbsnodes -aSj shows the nodes"
    ),
    "Insufficient amount of resource: host ": "hosts that it needs are down or in use: pbsnodes -aSj shows the nodes",
    "Insufficient amount of queue resource: ngpus (R: 8 A: 0 T: 16)": (
        "too little of what it asks for is free in its queue: GPUs (8 requested, 0 free, 16 in all): "
        "wait, or change resources.gpus_per_node"
    ),
    "Insufficient amount of server resource: matlab_lic (R: 1 A: 0 T: 4)": (
        "too little of what it asks for is free in its server: matlab_lic (1 requested, 0 free, 4 in all): "
        "wait, or change scheduler.constraint or scheduler.resources"
    ),
    "Insufficient amount of resource: ncpus (R: 100 A: 8 T: 8)": (
        "it asks for more CPUs than a node has (100 requested, 8 free, 8 in all): lower resources.cpus_per_node"
    ),
    "host set gpu01 has too few free resources": "no group of nodes that belong together has room for it",
    "Can't fit in the largest placement set, and can't span placement sets": (
        "no group of nodes that belong together has room for it"
    ),
    "PBS Error: Resource temporarily unavailable": "PBS tried to start it and failed: ask the site's support",
}
HOLDS = {
    "u": "it is held: let it go with qrls {job}",
    "o": "an operator holds it: ask the site's support",
    "s": "PBS or an administrator holds it: ask the site's support",
    "us": "PBS or an administrator holds it: ask the site's support",
    "p": "it is held: its password is not valid: ask the site's support",
    "": "it is held: let it go with qrls {job}",
}


@pytest.mark.parametrize(("state", "letter"), [(state, letter) for state, word in STATES.items() for letter in word])
def test_states(state: State, letter: str) -> None:
    found, native = state_of(letter)
    assert found is state
    assert native == "?" if letter == "?" else re.fullmatch(rf"{letter} \([a-z ]+\)", native)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_reasons(name: str) -> None:
    job = recorded(name)
    assert (bool(job.why and job.why.hopeless), job.reason) == RECORDED[name]


@pytest.mark.parametrize("comment", LIMITS)
def test_limits(comment: str) -> None:
    assert str(why_pending(f"Not Running: {comment}")) == LIMITS[comment]


@pytest.mark.parametrize("comment", COMMENTS)
def test_comments(comment: str) -> None:
    assert str(why_pending(f"Not Running: {comment}")) == str(why_pending(comment)) == COMMENTS[comment]


def test_what_can_never_run_is_hopeless() -> None:
    told = str(why_pending("Can Never Run: Insufficient amount of resource: mem (R: 2tb A: 1tb T: 1tb)"))
    assert told == (
        "it asks for more memory than PBS has (2tb requested, 1tb free, 1tb in all), and so it will never start: "
        "lower resources.memory"
    )
    assert not why_pending("Not Running: Insufficient amount of resource: mem (R: 2tb A: 1tb T: 4tb)").hopeless


@pytest.mark.parametrize("held", HOLDS)
def test_holds(held: str) -> None:
    assert str(reason_of("H", "", held, "")) == HOLDS[held]


def test_a_hold_for_another_job_is_no_hold_of_a_person() -> None:
    assert str(reason_of("H", "", "s", "afterok:5.pbs@pbs:6.pbs@pbs,beforeany:9.pbs@pbs")) == (
        "it waits for jobs 5.pbs, 6.pbs"
    )
    assert waits_for("beforeok:5.pbs@pbs") == waits_for("on:2") == waits_for("") == ""
    assert str(reason_of("H", "Job held by ada on Sun Nov 22 03:09:10 2026", "u", "beforeok:5.pbs")) == HOLDS["u"]


def test_a_job_that_was_moved() -> None:
    assert str(reason_of("M", "", "", "")) == "it was moved to another server, which alone knows its state"


def test_a_job_that_is_new() -> None:
    assert str(why_pending("")) == "PBS has not considered it yet"


@given(st.text("abcXYZ_:,.{}()[]% ", min_size=1).filter(str.strip))
def test_an_unknown_comment_is_kept(comment: str) -> None:
    reason = reason_of("Q", comment, "", "")
    assert reason is not None
    assert (reason.text, reason.hopeless) == (f"PBS says {comment}", False)
    assert why_pending(f"Can Never Run: {comment}").hopeless
    assert str(reason_of("?", comment, "", "")) == "PBS says ?"
