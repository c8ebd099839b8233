"""Slurm's words are told in plain English, and none is lost."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_recorded import shown

from allranks.clusters.slurm_words import state_of, why_pending
from allranks.runs.status import State

STATES = {
    State.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    State.RUNNING: "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED",
    State.SUCCEEDED: "COMPLETED",
    State.FAILED: "FAILED LAUNCH_FAILED",
    State.CANCELLED: "CANCELLED CANCELLED+ CANCELLED_by_1000",
    State.TIMEOUT: "TIMEOUT DEADLINE",
    State.PREEMPTED: "PREEMPTED",
    State.NODE_FAIL: "NODE_FAIL BOOT_FAIL RECONFIG_FAIL",
    State.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    State.UNKNOWN: "REVOKED NEWER_THAN_WE",
}
#: Reasons of the recorded jobs: whether waiting is in vain, and what is told.
RECORDED = {
    "pending-begin-time": (False, "its time to start has not come; after a requeue that takes up to two minutes"),
    "pending-dependency": (False, "it waits for another job"),
    "pending-held": (False, "it is held: let it go with scontrol release 1"),
    "pending-node-down": (
        False,
        "nodes that it needs are down, drained or reserved (node04): sinfo --list-reasons shows why",
    ),
    "pending-partition-down": (False, "its partition is down: choose another scheduler.partition, or wait"),
    "pending-partition-limit": (
        True,
        "it asks for more time than its partition gives a job, and so it will never start: lower resources.time",
    ),
    "pending-partition-node-limit": (
        True,
        "it asks for more nodes, or fewer, than its partition gives a job, and so it will never start: "
        "change resources.nodes",
    ),
    "pending-qos-limit": (
        True,
        "it asks for more time than its QOS gives a job, and so it will never start: "
        "lower resources.time, or choose another scheduler.qos",
    ),
    "pending-resources": (False, "the nodes that it needs are in use"),
    "failed-no-output-folder": (
        False,
        "Slurm could not start the script: its work directory, or that of its output, is not there on the node",
    ),
    "node-fail": (False, "a node failed"),
    "out-of-memory": (False, "it used more memory than it requested: raise resources.memory"),
    "preempted": (False, "its nodes were taken for a job with precedence"),
    "timeout": (False, "it reached its time limit: raise resources.time"),
    "failed": (False, None),
    "running": (False, None),
    "completed": (False, None),
}
LIMITS = {
    "QOSGrpGRES": (False, "the jobs of its QOS have reached the limit of its QOS on GPUs"),
    "AssocGrpCPURunMinutesLimit": (
        False,
        "the jobs of its account have reached the limit of its account on minutes of CPUs",
    ),
    "AssocGrpMemMinutes": (
        False,
        "its account has used up its minutes of memory: use another scheduler.account, or ask the site's support",
    ),
    "QOSMaxGRESPerUser": (False, "your jobs have reached the limit of its QOS on GPUs"),
    "QOSMaxSubmitJobPerUserLimit": (False, "your jobs have reached the limit of its QOS on jobs that run or wait"),
    "AssocMaxJobsLimit": (False, "your jobs have reached the limit of its account on jobs that run"),
    "MaxNodePerAccount": (False, "the jobs of your account have reached the limit of its QOS on nodes"),
    "AssociationTimeLimit": (False, "the jobs of its account have reached the limit of its account on time"),
    "QOSMaxGRESMinutesPerJob": (
        True,
        "it asks for more minutes of GPUs than its QOS gives a job, and so it will never start: "
        "lower resources.gpus_per_node, or choose another scheduler.qos",
    ),
    "AssocMaxCpuPerNode": (
        True,
        "it asks for more CPUs than its account gives a job on a node, and so it will never start: "
        "lower resources.cpus_per_node, or choose another scheduler.qos",
    ),
    "QOSMinCpuNotSatisfied": (
        True,
        "its QOS demands more CPUs than it asks for, and so it will never start: raise resources.cpus_per_node",
    ),
}
#: Reasons with blanks in them, as squeue shows them; some were seen on a real cluster.
WITH_BLANKS = {
    "ReqNodeNotAvail, UnavailableNodes:gpu_[1,3-5],big1": (
        "nodes that it needs are down, drained or reserved (gpu_[1,3-5],big1): sinfo --list-reasons shows why"
    ),
    "ReqNodeNotAvail, May be reserved for other job": (
        "nodes that it needs are down, drained or reserved: sinfo --list-reasons shows why"
    ),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        "nodes that it needs are down, drained or reserved: sinfo --list-reasons shows why"
    ),
    "launch failed requeued held": (
        "it could not be started or was requeued, and is held (launch failed requeued held): "
        "let it go with scontrol release {job}"
    ),
    "job requeued in held state": (
        "it could not be started or was requeued, and is held (job requeued in held state): "
        "let it go with scontrol release {job}"
    ),
}


@pytest.mark.parametrize(("state", "native"), [(s, word) for s, words in STATES.items() for word in words.split()])
def test_states_stay_distinct(state: State, native: str) -> None:
    assert state_of(native.replace("_by_", " by "), "None")[0] is state


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_reasons(name: str) -> None:
    job = shown(name)
    assert (bool(job.why and job.why.hopeless), job.reason) == RECORDED[name]


@pytest.mark.parametrize("word", LIMITS)
def test_limits(word: str) -> None:
    reason = why_pending(word)
    assert (reason.hopeless, str(reason)) == LIMITS[word]


@pytest.mark.parametrize("word", WITH_BLANKS)
@pytest.mark.parametrize("blank", [" ", "_"])
def test_reasons_of_several_words(word: str, blank: str) -> None:
    assert str(state_of("PENDING", word.replace(" ", blank))[1]) == WITH_BLANKS[word]


def test_no_limit_that_slurm_can_name_is_unknown() -> None:
    things = ("Cpu", "CPU", "Memory", "Mem", "Node", "GRES", "License", "BB", "Billing", "Energy", "Unknown")
    ends = ("", "Limit", "Minutes", "RunMinutes", "PerJob", "PerNode", "PerUser", "MinutesPerJob", "PerJobLimit")
    words = [
        f"{who}{kind}{thing}{end}"
        for who, kind, thing, end in product(("QOS", "Assoc"), ("Grp", "Max", "Min"), things, ends)
    ]
    assert [word for word in words if "Slurm says" in str(why_pending(word))] == []
    hopeless = {word for word in words if why_pending(word).hopeless}
    assert hopeless == {word for word in words if "Min" in word[:8] or "PerJob" in word or "PerNode" in word}


def test_a_state_that_says_why_itself() -> None:
    assert str(state_of("REQUEUE_HOLD", "None")[1]) == (
        "it was requeued and is held: let it go with scontrol release {job}"
    )


def test_who_cancelled_a_job() -> None:
    assert str(state_of("CANCELLED by 1000", "None")[1]) == "it was cancelled by the user with id 1000"


@given(st.text("abcXYZ_:,.{}()[]% ", min_size=1))
def test_an_unknown_word_is_kept(word: str) -> None:
    reason = state_of("PENDING", word)[1]
    assert reason is not None
    assert (reason.text, reason.hopeless) == (f"Slurm says {word}", False)
    assert str(state_of(f"NEWER_{word}", "")[1]) == f"Slurm says NEWER_{word}"
