"""What Slurm says of jobs, what that means and what to do: states, why they wait, how they ended, errors of commands.

Words are those of Slurm's manual (squeue(1), "Job Reason Codes"), which only ever grew. Words of a kind, such as
``QOSMaxCpuPerUserLimit``, are taken apart by one rule. A word that is not known is handed on as it is.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from allranks import contract
from allranks.clusters.batch.scheduler import OUT_OF_MEMORY, OUT_OF_TIME, JobInfo, JobReason
from allranks.job.units import parse_memory, reading, time_of
from allranks.runs.attempt import Failure
from allranks.runs.status import State

_never = partial(JobReason, hopeless=True)
_RELEASE, _SITE = "let it go with scontrol release {job}", "ask the site's support"
_NODES, _PARTITION = "sinfo --list-reasons shows why", "choose another scheduler.partition, or wait"
_CHANGE_ACCOUNT, _CHANGE_QOS, _GIVES = "change scheduler.account", "change scheduler.qos", "its partition gives a job"
_PING = "see scontrol ping, and try again when it is up"
_LOGIN = "run this where sbatch works, such as the login node, or set SLURM_CONF to the path of its slurm.conf"
_LISTED = "see sinfo --Format=NodeList"
_ASSOCIATIONS = "see yours with sacctmgr show associations user=$USER format=Account,Partition,QOS"
_AWAY = JobReason("nodes that it needs are down, drained or reserved", _NODES)

#: Slurm's word for a state: ours, and what it means if the word does not say it.
_STATES: dict[str, tuple[State, JobReason | None]] = {
    "CONFIGURING": (State.PENDING, JobReason("its nodes are being made ready")),
    "REQUEUED": (State.PENDING, JobReason("it was requeued")),
    "REQUEUE_FED": (State.PENDING, JobReason("it was requeued to another cluster of the federation")),
    "REQUEUE_HOLD": (State.PENDING, JobReason("it was requeued and is held", _RELEASE)),
    "SPECIAL_EXIT": (State.PENDING, JobReason("it was requeued and is held, marked as failed", _RELEASE)),
    "RESV_DEL_HOLD": (State.PENDING, JobReason("it is held: its reservation is gone", "see scheduler.reservation")),
    "RUNNING": (State.RUNNING, None),
    "COMPLETING": (State.RUNNING, JobReason("it is ending")),
    "RESIZING": (State.RUNNING, JobReason("its size is being changed")),
    "SIGNALING": (State.RUNNING, JobReason("it is being sent a signal")),
    "STAGE_OUT": (State.RUNNING, JobReason("its files are being copied out of the burst buffer")),
    "STOPPED": (State.RUNNING, JobReason("it is stopped and keeps its nodes")),
    "SUSPENDED": (State.RUNNING, JobReason("it is suspended")),
    "COMPLETED": (State.SUCCEEDED, None),
    "FAILED": (State.FAILED, None),
    "LAUNCH_FAILED": (State.FAILED, JobReason("it could not be started on its nodes", _SITE)),
    "CANCELLED": (State.CANCELLED, None),
    "TIMEOUT": (State.TIMEOUT, OUT_OF_TIME),
    "DEADLINE": (State.TIMEOUT, JobReason("its deadline has come")),
    "PREEMPTED": (State.PREEMPTED, JobReason("its nodes were taken for a job with precedence")),
    "NODE_FAIL": (State.NODE_FAIL, JobReason("a node failed")),
    "BOOT_FAIL": (State.NODE_FAIL, JobReason("a node did not start", _NODES)),
    "RECONFIG_FAIL": (State.NODE_FAIL, JobReason("a node could not be set up as asked", _NODES)),
    "OUT_OF_MEMORY": (State.OUT_OF_MEMORY, OUT_OF_MEMORY),
    # Another cluster of the federation has the job, and this one does not know how it ends.
    "REVOKED": (State.UNKNOWN, JobReason("another cluster of the federation runs it")),
}
#: What no rule below can explain. A word means the same in all versions that have it.
_PENDING: dict[str, JobReason] = {
    "None": JobReason("Slurm has not considered it yet"),
    "Priority": JobReason("jobs with a higher priority are before it"),
    "Resources": JobReason("the nodes that it needs are in use"),
    "Dependency": JobReason("it waits for another job"),
    "DependencyNeverSatisfied": _never("the job that it waits for did not end as it should", "cancel it"),
    "BeginTime": JobReason("its time to start has not come; after a requeue that takes up to two minutes"),
    "Prolog": JobReason("the site's prolog prepares its nodes"),
    "Cleaning": JobReason("what is left of its last start is being cleaned up"),
    "JobHeldUser": JobReason("it is held", _RELEASE),
    "JobHeldAdmin": JobReason("an administrator holds it", _SITE),
    "JobHoldMaxRequeue": JobReason("it was requeued too often and is held", _RELEASE),
    "JobArrayTaskLimit": JobReason("as many tasks of its array run as it allows at a time"),
    "PartitionDown": JobReason("its partition is down", _PARTITION),
    "PartitionInactive": JobReason("its partition starts no jobs", _PARTITION),
    "PartitionNodeLimit": _never(f"it asks for more nodes, or fewer, than {_GIVES}", "change resources.nodes"),
    "PartitionTimeLimit": _never(f"it asks for more time than {_GIVES}", "lower resources.time"),
    "PartitionConfig": _never("it asks for what its partition does not give", "see scontrol show partition"),
    "MaxMemPerLimit": _never("it asks for more memory than a job may have on a node", "lower resources.memory"),
    "BadConstraints": _never("no node can be what it asks for", "see sinfo --Node --long"),
    "Constraints": JobReason("no node is now what it asks for"),
    "InvalidAccount": _never("its account is not valid", _CHANGE_ACCOUNT),
    "AccountNotAllowed": _never("its account may not use its partition", f"{_CHANGE_ACCOUNT} or scheduler.partition"),
    "InvalidQOS": _never("its QOS is not valid", _CHANGE_QOS),
    "QOSNotAllowed": _never("its account or partition may not use its QOS", f"{_CHANGE_QOS} or scheduler.partition"),
    "QOSUsageThreshold": JobReason("its account has used more than its QOS allows for now"),
    "AccountingPolicy": JobReason("a limit of its account or QOS is reached"),
    "NodeDown": JobReason("a node that it needs is down", _NODES),
    "Reservation": JobReason("its reservation has not started"),
    "ReservationDeleted": _never("its reservation is gone", "change scheduler.reservation"),
    "ReservationInvalid": _never("its reservation is not valid", "change scheduler.reservation"),
    "Licenses": JobReason("the licences that it needs are in use"),
    "DeadLine": _never("it can no longer end before its deadline", "cancel it"),
    "BurstBufferResources": JobReason("there is no room in the burst buffer"),
    "BurstBufferStageIn": JobReason("its files are being copied into the burst buffer"),
    "BurstBufferOperation": JobReason("an operation of the burst buffer failed", _SITE),
    "SchedDefer": JobReason("Slurm starts no job at once"),
    "SystemFailure": JobReason("something of the site failed", _SITE),
}
#: How the names of limited things start, in small letters: how to call them, and the key that asks for them.
_THINGS = {
    "cpu": ("CPUs", "resources.cpus_per_node"),
    "mem": ("memory", "resources.memory"),
    "node": ("nodes", "resources.nodes"),
    "gres": ("GPUs", "resources.gpus_per_node"),
    "wall": ("time", "resources.time"),
    "time": ("time", "resources.time"),
    "job": ("jobs that run", ""),
    "submit": ("jobs that run or wait", ""),
    "license": ("licences", ""),
    "bb": ("burst buffer", ""),
    "billing": ("billing units", ""),
    "": ("resources of a kind", ""),
}
_LIMIT = re.compile(
    r"(?P<who>QOS|Association|Assoc|)(?P<kind>Grp|Max|Min|)(?P<thing>[A-Za-z]+?)(?P<run>Run)?(?P<minutes>Minutes|Mins)?"
    r"(?:Per(?P<each>Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)

#: What commands print if Slurm cannot be reached, and what to do; the first that is found counts.
UNREACHABLE = (
    (r"Unable to contact slurm controller|controller (is )?in standby", _PING),
    (r"Socket timed out|Zero Bytes were transmitted", _PING),
    (r"Could not establish a configuration source|Unable to process configuration file", _LOGIN),
    (r"munge|authentication (error|credential|agent)", f"{_SITE}: munge must run, with the cluster's key"),
    (r"Incompatible versions", "use the Slurm commands that belong to the cluster"),
)
NO_SUCH_NODES = "Requested node configuration is not available"
#: What sbatch prints if it refuses a job. It is one of many things that it may not like; Slurm's own words say why.
REFUSED = (
    (r"invalid account", f"{_CHANGE_ACCOUNT}; {_ASSOCIATIONS}"),
    (r"partition", "set scheduler.partition to one that sinfo --summarize lists and you may use"),
    (r"invalid qos|QOS usage", f"{_CHANGE_QOS}; {_ASSOCIATIONS}"),
    (r"accounting/QOS policy", f"ask for less time or fewer nodes, or wait for your other jobs; {_ASSOCIATIONS}"),
    (r"generic resource|\bgres\b", f"change resources.gpu_type or resources.gpus_per_node; {_LISTED},Gres"),
    (r"Memory (specification|required)", f"lower resources.memory; {_LISTED},Memory"),
    (r"CPU count|More processors", f"lower resources.cpus_per_node; {_LISTED},CPUs"),
    (NO_SUCH_NODES, f"no node has all that is requested: lower resources; {_LISTED},CPUs,Memory,Gres"),
    (r"Invalid node name", "change scheduler.include or scheduler.exclude; see sinfo --Node"),
    (r"node count", "change resources.nodes"),
    (r"feature", f"change scheduler.constraint; {_LISTED},Features"),
    (r"reservation", "change scheduler.reservation; see scontrol show reservation"),
    (r"job array", "change scheduler.array; see scontrol show config for MaxArraySize"),
    (r"time limit|--time", "change resources.time"),
    (r"licen[cs]e", "change --licenses in scheduler.directives; see scontrol show licenses"),
    (r"Invalid --|unrecognized option|Invalid (numeric )?specification", "change scheduler.directives"),
    (r"Unable to open file|not look like a batch script", "name a script that exists and starts with #!"),
)


def state_of(native: str, word: str) -> tuple[State, JobReason | None]:
    """Return our state for Slurm's word, and why it is so, of a job that waits by Slurm's ``word`` for the reason."""
    if native == "PENDING":
        return State.PENDING, why_pending(word)
    if native.startswith("CANCELLED by "):
        return State.CANCELLED, JobReason(f"it was cancelled by the user with id {native.rpartition(' ')[2]}")
    return _STATES.get(re.split(r"[^A-Z_]", native)[0], (State.UNKNOWN, JobReason(f"Slurm says {native}")))


def why_pending(word: str) -> JobReason:
    """Explain why a job waits; of several words, squeue has blanks between them and scontrol underscores.

    A limit is one of a QOS, of an account, or (with no name before it) of each account within a QOS.
    """
    words = word.replace("_", " ")
    if known := _PENDING.get(word or "None"):
        return known
    if re.search(r"requeued (?:in )?held", words):
        return JobReason(f"it could not be started or was requeued, and is held ({words})", _RELEASE)
    if words.startswith(("ReqNodeNotAvail", "Nodes required for job are DOWN")):
        nodes = re.search(r"UnavailableNodes:,*([^\s)(]*[^\s,)(])", word)
        return replace(_AWAY, text=f"{_AWAY.text} ({nodes[1]})") if nodes else _AWAY
    limit = _LIMIT.fullmatch(word)
    if not limit or not (limit["kind"] or (limit["who"] and word.endswith("Limit"))):
        return JobReason(f"Slurm says {word}")
    thing, key = next(each for start, each in _THINGS.items() if limit["thing"].lower().startswith(start))
    thing = f"minutes of {thing}" if limit["minutes"] else thing
    who = "its account" if limit["who"].startswith("Assoc") else "its QOS"
    if limit["kind"] == "Min":
        return _never(f"{who} demands more {thing} than it asks for", f"raise {key}" if key else "")
    if limit["each"] in ("Job", "Node"):
        where = "a job on a node" if limit["each"] == "Node" else "a job"
        lower = f"lower {key}, or " if key else ""
        return _never(f"it asks for more {thing} than {who} gives {where}", f"{lower}choose another scheduler.qos")
    if limit["minutes"] and not limit["run"]:
        return JobReason(f"{who} has used up its {thing}", f"use another scheduler.account, or {_SITE}")
    whose = "your jobs" if limit["kind"] == "Max" else f"the jobs of {who}"
    whose = "the jobs of your account" if limit["each"] == "Account" else whose
    return JobReason(f"{whose} have reached the limit of {who} on {thing}")


# --- Answers about jobs, and which rank srun says failed first.

#: The fields that accounting is queried for.
ACCOUNTED = ("JobID", "State", "ExitCode", "Start", "End", "NodeList", "MaxRSS", "Reason")
#: Of the answer of scontrol, these lines hold no text of the user's, and each comes once, before all that do.
_SHOWN_LINE = re.compile(r"^   (?=(?:JobState|Requeue|StartTime|NodeList)=)(.*)$", re.MULTILINE)
#: Slurm's own "signals": the script could not be started, and (a number that no signal has) memory ran out.
_NOT_STARTED, _OUT_OF_MEMORY = 53, 125
#: What srun says when tasks have ended badly, from Slurm 22.05 to 26.11; of a signal it gives the C library's words.
_ENDED = re.compile(
    r"srun: error: (\S+): tasks? (\d+)[\d,-]*: (?:Exited with exit code (\d+)|(.+?)(?: \(core dumped\))?)"
)
_SIGNALS = {words: number for number in signal.valid_signals() if (words := signal.strsignal(number))}


def parse_shown(text: str) -> tuple[JobInfo, ...]:
    """Read what scontrol shows: one job, or each task of an array."""
    found = []
    for part in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE):
        # Names, comments and paths may hold anything, even what looks like a field: of two the first counts.
        fields = defaultdict(str, reversed(re.findall(r"(\S+?)=(\S*)", "\n".join(_SHOWN_LINE.findall(part)))))
        job = re.match(r"JobId=(\d+) (?:ArrayJobId=(\d+) ArrayTaskId=(\S+) )?", part)
        if job and fields["JobState"]:
            job_id = f"{job[2]}_{job[3]}" if job[2] else job[1]
            found.append(_info(job_id, fields["JobState"], fields, fields["StartTime"], fields["EndTime"]))
    return tuple(found)


def parse_accounted(text: str) -> tuple[JobInfo, ...]:
    """Read what accounting has of :data:`ACCOUNTED`: one job, or each task of an array.

    Of a job that was requeued the last record counts. A job with a step that was out of memory was so too, although
    Slurm calls it FAILED.
    """
    records: dict[str, list[Mapping[str, str]]] = {}
    for line in text.splitlines():
        row = defaultdict(str, zip(ACCOUNTED, line.split("|"), strict=False))
        job_id, _, step = row["JobID"].partition(".")
        records[job_id] = [*records.get(job_id, []), row] if step else [row]
    found = []
    for job_id, (job, *steps) in records.items():
        is_oom = job["State"] == "FAILED" and any(step["State"] == "OUT_OF_MEMORY" for step in steps)
        info = _info(job_id, "OUT_OF_MEMORY" if is_oom else job["State"], job, job["Start"], job["End"])
        peak = max(reading(f"{row['MaxRSS']}B", parse_memory) for row in (job, *steps))
        found.append(replace(info, peak_memory=peak or None))
    return tuple(found)


def _info(job_id: str, native: str, fields: Mapping[str, str], start: str, end: str) -> JobInfo:
    """Read what both answers hold in the same words."""
    nodes, word = re.sub(r"\(null\)|None assigned", "", fields["NodeList"]), fields["Reason"]
    state, why = state_of(native, word)
    exit_code, killed_by = map(reading, fields["ExitCode"].partition(":")[::2])
    if state is State.SUCCEEDED and (exit_code or killed_by):
        state = State.FAILED
    if state is State.FAILED and killed_by == _NOT_STARTED:
        lacks = "its work directory, or that of its output, is not there on the node"
        why = JobReason(f"Slurm could not start the script: {lacks}")
    if state is State.NODE_FAIL and (node := fields["FailedNode"]):
        why = JobReason(f"node {node} failed")
    code = exit_code if state.is_final and not killed_by and (exit_code or state is State.SUCCEEDED) else None
    number = killed_by if state.is_final and killed_by not in (0, _OUT_OF_MEMORY) else None
    started = time_of(start) if nodes and state is not State.PENDING else None
    ended = time_of(end) if state.is_final else None
    return JobInfo(job_id, state, native, word, code, number, started, ended, nodes, why=why)


def first_failure(lines: Iterable[str]) -> Failure | None:
    """Return how the rank ended that failed first, in an attempt's log; srun exits with the highest code, or 143."""
    has_left = False
    for found in filter(None, (_ENDED.fullmatch(line.rstrip()) for line in lines)):
        hosts, rank, exited, words = found.groups()
        is_oom = words == "Out Of Memory"
        killed_by = signal.SIGKILL if is_oom else _SIGNALS.get(words, 0)
        code = int(exited) if exited else -killed_by
        if code == contract.CONTINUE_LATER:
            has_left = True
        elif code and not (has_left and code in (-signal.SIGTERM, -signal.SIGKILL)):  # Srun ends the others so.
            host = None if hosts == "Unknown" or "[" in hosts or "," in hosts else hosts
            return Failure(int(rank), host, code, is_oom)
    return None
