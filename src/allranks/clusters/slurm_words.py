"""Slurm's words in plain English: states of jobs, and why a job waits.

The words are those of Slurm's manual (squeue(1), "Job Reason Codes"), which only ever grew. Words of a kind, such as
``QOSMaxCpuPerUserLimit``, are taken apart by one rule. A word that is not known is handed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.clusters.reason import Reason
from allranks.runs.status import State

_RELEASE = "let it go with scontrol release {job}"
_SITE = "ask the site's support"
_NODES = "sinfo --list-reasons tells why"

#: Slurm's word for a state: ours, and what it means where the word does not say it.
_STATES: dict[str, tuple[State, Reason | None]] = {
    "PENDING": (State.PENDING, None),
    "CONFIGURING": (State.PENDING, Reason("its nodes are being made ready")),
    "REQUEUED": (State.PENDING, Reason("it was requeued")),
    "REQUEUE_FED": (State.PENDING, Reason("it was requeued to another cluster of the federation")),
    "REQUEUE_HOLD": (State.PENDING, Reason("it was requeued and is held", _RELEASE)),
    "SPECIAL_EXIT": (State.PENDING, Reason("it was requeued and is held, marked as failed", _RELEASE)),
    "RESV_DEL_HOLD": (State.PENDING, Reason("it is held: its reservation is gone", "see scheduler.reservation")),
    "RUNNING": (State.RUNNING, None),
    "COMPLETING": (State.RUNNING, Reason("it is ending")),
    "RESIZING": (State.RUNNING, Reason("its size is being changed")),
    "SIGNALING": (State.RUNNING, Reason("it is being sent a signal")),
    "STAGE_OUT": (State.RUNNING, Reason("its files are being copied out of the burst buffer")),
    "STOPPED": (State.RUNNING, Reason("it is stopped and keeps its nodes")),
    "SUSPENDED": (State.RUNNING, Reason("it is suspended")),
    "COMPLETED": (State.SUCCEEDED, None),
    "FAILED": (State.FAILED, None),
    "LAUNCH_FAILED": (State.FAILED, Reason("it could not be started on its nodes", _SITE)),
    "CANCELLED": (State.CANCELLED, None),
    "TIMEOUT": (State.TIMEOUT, Reason("it reached its time limit", "raise resources.time")),
    "DEADLINE": (State.TIMEOUT, Reason("its deadline has come")),
    "PREEMPTED": (State.PREEMPTED, Reason("its nodes were taken for a job with precedence")),
    "NODE_FAIL": (State.NODE_FAIL, Reason("a node failed")),
    "BOOT_FAIL": (State.NODE_FAIL, Reason("a node did not start", _NODES)),
    "RECONFIG_FAIL": (State.NODE_FAIL, Reason("a node could not be set up as asked", _NODES)),
    "OUT_OF_MEMORY": (State.OUT_OF_MEMORY, Reason("it used more memory than it asked for", "raise resources.memory")),
    # Another cluster of the federation has the job, and this one does not know what becomes of it.
    "REVOKED": (State.UNKNOWN, Reason("another cluster of the federation runs it")),
}

#: What no rule below can tell. A word means the same in all versions that have it.
_PENDING: dict[str, Reason] = {
    "None": Reason("Slurm has not looked at it yet"),
    "Priority": Reason("jobs with a higher priority are before it"),
    "Resources": Reason("the nodes that it needs are in use"),
    "Dependency": Reason("it waits for another job"),
    "DependencyNeverSatisfied": Reason(
        "the job that it waits for did not end as it should", "cancel it", hopeless=True
    ),
    "BeginTime": Reason("its time to begin has not come; after a requeue that takes up to two minutes"),
    "Prolog": Reason("the site's prolog prepares its nodes"),
    "Cleaning": Reason("what is left of its last start is being cleaned up"),
    "JobHeldUser": Reason("it is held", _RELEASE),
    "JobHeldAdmin": Reason("an administrator holds it", _SITE),
    "JobHoldMaxRequeue": Reason("it was requeued too often and is held", _RELEASE),
    "JobArrayTaskLimit": Reason("as many tasks of its array run as it allows at a time"),
    "PartitionDown": Reason("its partition is down", "choose another scheduler.partition, or wait"),
    "PartitionInactive": Reason("its partition starts no jobs", "choose another scheduler.partition, or wait"),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes, or fewer, than its partition gives a job", "change resources.nodes", hopeless=True
    ),
    "PartitionTimeLimit": Reason(
        "it asks for more time than its partition gives a job", "lower resources.time", hopeless=True
    ),
    "PartitionConfig": Reason(
        "it asks for what its partition does not give", "see scontrol show partition", hopeless=True
    ),
    "MaxMemPerLimit": Reason(
        "it asks for more memory than a job may have on a node", "lower resources.memory", hopeless=True
    ),
    "BadConstraints": Reason("no node can be what it asks for", "see sinfo --Node --long", hopeless=True),
    "Constraints": Reason("no node is now what it asks for"),
    "InvalidAccount": Reason("its account is not valid", "change scheduler.account", hopeless=True),
    "AccountNotAllowed": Reason(
        "its account may not use its partition", "change scheduler.account or scheduler.partition", hopeless=True
    ),
    "InvalidQOS": Reason("its QOS is not valid", "change scheduler.qos", hopeless=True),
    "QOSNotAllowed": Reason(
        "its account or partition may not use its QOS", "change scheduler.qos or scheduler.partition", hopeless=True
    ),
    "QOSUsageThreshold": Reason("its account has used more than its QOS allows for now"),
    "AccountingPolicy": Reason("a limit of its account or QOS is reached"),
    "ReqNodeNotAvail": Reason("nodes that it needs are down, drained or reserved", _NODES),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "nodes that it needs are down, drained or reserved", _NODES
    ),
    "NodeDown": Reason("a node that it needs is down", _NODES),
    "FrontEndDown": Reason("no front end node is up", _SITE),
    "Reservation": Reason("its reservation has not begun"),
    "ReservationDeleted": Reason("its reservation is gone", "change scheduler.reservation", hopeless=True),
    "ReservationInvalid": Reason("its reservation is not valid", "change scheduler.reservation", hopeless=True),
    "Licenses": Reason("the licences that it needs are in use"),
    "DeadLine": Reason("it can no longer end before its deadline", "cancel it", hopeless=True),
    "BurstBufferResources": Reason("there is no room in the burst buffer"),
    "BurstBufferStageIn": Reason("its files are being copied into the burst buffer"),
    "BurstBufferOperation": Reason("an operation of the burst buffer failed", _SITE),
    "PowerNotAvail": Reason("there is not enough electric power"),
    "PowerReserved": Reason("the electric power is reserved"),
    "FedJobLock": Reason("the clusters of the federation agree on who runs it"),
    "SchedDefer": Reason("Slurm starts no job at once"),
    "SystemFailure": Reason("something of the site failed", _SITE),
}

#: Things that are limited, in small letters: how to call them, and where they are asked for.
_THINGS: dict[str, tuple[str, str]] = {
    "cpu": ("CPUs", "resources.cpus_per_node"),
    "mem": ("memory", "resources.memory"),
    "memory": ("memory", "resources.memory"),
    "node": ("nodes", "resources.nodes"),
    "gres": ("GPUs", "resources.gpus_per_node"),
    "wall": ("time", "resources.time"),
    "wallduration": ("time", "resources.time"),
    "time": ("time", "resources.time"),
    "job": ("jobs that run", ""),
    "jobs": ("jobs that run", ""),
    "submitjob": ("jobs that run or wait", ""),
    "submitjobs": ("jobs that run or wait", ""),
    "license": ("licences", ""),
    "bb": ("burst buffer", ""),
    "billing": ("billing units", ""),
    "energy": ("energy", ""),
}
_LIMIT = re.compile(
    r"(?P<who>QOS|Association|Assoc|)(?P<kind>Grp|Max|Min|)(?P<thing>[A-Za-z]+?)(?P<run>Run)?(?P<minutes>Minutes|Mins)?"
    r"(?:Per(?P<each>Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
_HELD = re.compile(r"requeued (?:in )?held")
_NOT_AVAILABLE = re.compile(r"ReqNodeNotAvail.*UnavailableNodes:([^\s,)(](?:[^\s)(]*[^\s,)(])?)")


def state_of(native: str) -> State:
    """Return our state for Slurm's word, which may go on: ``CANCELLED by 1000``."""
    return _STATES.get(_first_word(native), (State.UNKNOWN, None))[0]


def reason_of(native: str, word: str, job_id: str) -> Reason | None:
    """Tell why a job is in its state, where there is something to say.

    Args:
        native: Slurm's word for the state.
        word: Slurm's word for the reason, which counts while the job waits.
        job_id: the job.
    """
    if native == "PENDING":
        reason: Reason | None = why_pending(word)
    elif native.startswith("CANCELLED by "):
        reason = Reason(f"it was cancelled by the user with id {native.rpartition(' ')[2]}")
    else:
        reason = _STATES.get(_first_word(native), (None, _unknown(native)))[1]
    return replace(reason, fix=reason.fix.format(job=job_id)) if reason else None


def why_pending(word: str) -> Reason:
    """Explain Slurm's word for why a job waits; ``{job}`` in the fix stands for the job.

    Args:
        word: the word, or words, with blanks as squeue shows them or underscores as scontrol does.
    """
    if known := _PENDING.get(word or "None") or _PENDING.get(word.replace("_", " ")):
        return known
    if _HELD.search(word.replace("_", " ")):
        return Reason(f"it could not be started or was requeued, and is held ({word.replace('_', ' ')})", _RELEASE)
    if nodes := _NOT_AVAILABLE.search(word):
        return Reason(f"nodes that it needs are down, drained or reserved ({nodes[1]})", _NODES)
    if word.startswith("ReqNodeNotAvail"):
        return _PENDING["ReqNodeNotAvail"]
    limit = _LIMIT.fullmatch(word)
    if limit and (limit["kind"] or (limit["who"] and word.endswith("Limit"))):
        return _at_limit(limit)
    return _unknown(word)


def _unknown(word: str) -> Reason:
    return Reason(f"Slurm says {word}")


def _at_limit(limit: re.Match[str]) -> Reason:
    """Explain a limit of a QOS, of an account, or (with no name before it) of each account within a QOS."""
    thing, key = _THINGS.get(limit["thing"].lower(), ("resources of a kind", ""))
    if limit["minutes"]:
        thing = f"minutes of {thing}"
    who = "its account" if limit["who"].startswith("Assoc") else "its QOS"
    if limit["kind"] == "Min":
        return Reason(f"{who} demands more {thing} than it asks for", f"raise {key}" if key else "", hopeless=True)
    if limit["each"] in ("Job", "Node"):
        where = "a job on a node" if limit["each"] == "Node" else "a job"
        lower = f"lower {key}, or choose another scheduler.qos" if key else "choose another scheduler.qos"
        return Reason(f"it asks for more {thing} than {who} gives {where}", lower, hopeless=True)
    if limit["minutes"] and not limit["run"]:
        return Reason(f"{who} has used up its {thing}", "use another scheduler.account, or ask the site's support")
    if limit["each"] == "Account":
        whose = "the jobs of your account"
    else:
        whose = "your jobs" if limit["kind"] == "Max" else f"the jobs of {who}"
    return Reason(f"{whose} have reached the limit of {who} on {thing}")


def _first_word(native: str) -> str:
    found = re.match(r"[A-Z_]+", native)
    return found[0] if found else native
