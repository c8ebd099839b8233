"""What PBS' words mean, and what to do: states of jobs, why they wait, how they ended, and what failing commands print.

OpenPBS and PBS Pro say in a job's comment why it waits, Torque does so where its own scheduler runs. Comments of a
kind, such as limits, are taken apart by one rule. A comment that is not known is handed on as it is.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from allranks.clusters.batch.scheduler import OUT_OF_MEMORY, OUT_OF_TIME, JobInfo, JobReason, explained, first_fix
from allranks.job.units import parse_memory, reading, time_of
from allranks.runs.status import State

#: Of PBS: OpenPBS and PBS Pro are used alike.
Flavour = Literal["openpbs", "torque"]
_RELEASE, _SITE = "let it go with qrls {job}", "ask the site's support"
_QUEUES, _NODES = "choose another scheduler.partition, or wait", "pbsnodes -aSj shows the nodes"
_SHORTER = "a shorter resources.time may fit in before"

#: Letters of jobs that have ended; how, is in other fields. X is a subjob whose array continues, C is Torque's.
ENDED = frozenset("FXC")
#: PBS' letter for a state: ours, what the letter stands for, and what it means where that does not say it.
_STATES: dict[str, tuple[State, str, JobReason | None]] = {
    "Q": (State.PENDING, "queued", None),
    "H": (State.PENDING, "held", None),
    "W": (State.PENDING, "waiting", JobReason("its time to start has not come")),
    "T": (State.PENDING, "in transit", JobReason("it is on its way to another queue or server")),
    "R": (State.RUNNING, "running", None),
    "B": (State.RUNNING, "array started", None),
    "E": (State.RUNNING, "exiting", JobReason("it is ending")),
    "S": (State.RUNNING, "suspended", JobReason("it is suspended")),
    "U": (State.RUNNING, "suspended", JobReason("it is suspended: its workstation is in use")),
    "F": (State.UNKNOWN, "finished", None),
    "X": (State.UNKNOWN, "subjob finished", None),
    "C": (State.UNKNOWN, "completed", None),
    "M": (State.UNKNOWN, "moved", JobReason("it was moved to another server, which alone knows its state")),
}
#: Of several holds, that counts first which a user cannot release.
_HOLDS = {
    "p": JobReason("it is held: its password is not valid", _SITE),
    "s": JobReason("PBS or an administrator holds it", _SITE),
    "o": JobReason("an operator holds it", _SITE),
    "u": JobReason("it is held", _RELEASE),
}
#: Resources: how to call them, and the key that asks for them.
_THINGS = {
    thing: (words, key)
    for things, words, key in (
        ("ncpus", "CPUs", "resources.cpus_per_node"),
        ("mpiprocs", "processes", "launch.nproc_per_node"),
        ("ngpus gpus", "GPUs", "resources.gpus_per_node"),
        ("mem pmem", "memory", "resources.memory"),
        ("vmem pvmem", "virtual memory", "resources.memory"),
        ("walltime min_walltime", "time", "resources.time"),
        ("cput", "CPU time", "resources.time"),
        ("nodect nodes", "nodes", "resources.nodes"),
        ("host vnode", "host", "scheduler.include"),
    )
    for thing in things.split()
}
#: The resource, and in parentheses what was requested or what there is of it.
_SHORT = re.compile(
    r"Insufficient amount of (?P<of>(?:queue |server )?)resource:? (?P<name>[^\s(]+)\s*(?:\((?P<amounts>.*)\))?",
    re.DOTALL,
)
_LIMIT = r"(?i)would exceed|limit (?:has been )?reached|reached .*limit"
_WHOSE = (
    (r"per-user|\buser\b", "your jobs have"),
    (r"per-group|\bgroup\b", "the jobs of your group have"),
    (r"per-project|\bproject\b", "the jobs of your project have"),
    ("", "jobs have"),
)
#: What is found in a comment, in any case, what that means and what to do; the first that is found counts.
_COMMENTS: tuple[tuple[str, ...], ...] = (
    (r"too many failed attempts", "it could not be started too often and is held", _SITE),
    (r"job held,? (?:provisioning|due to)", "PBS could not prepare its nodes and holds it", _SITE),
    (r"^job held by", "it is held", _RELEASE),
    (r"not enough total nodes", "it asks for more nodes than there are", "lower resources.nodes"),
    (r"placement set|\bset .* has too few free resources", "no group of nodes that belong together has room for it"),
    (r"not enough free nodes|no available resources on|too few free resources", "the nodes that it needs are in use"),
    (r"right type of nodes", "the nodes that it asks for are in use, or there are none such", _NODES),
    (r"queue not started", "its queue starts no jobs", _QUEUES),
    (r"not an execution queue", "its queue only hands jobs on", _QUEUES),
    (r"not in queued state", "PBS is still changing its state"),
    (r"dedicated time", "the nodes are kept for dedicated time", _SHORTER),
    (r"in non-?primetime|into primetime", "it waits for the hours outside prime time"),
    (r"in primetime|into non-?primetime", "it waits for prime time"),
    (
        r"ineligible type|not eligible for advance reservation|exclusive node and node is in use|multi-node job",
        "nodes that it needs do not take such a job now",
        _NODES,
    ),
    (r"reservation", "its nodes are kept for a reservation or for jobs before it", _SHORTER),
    (r"top job|strict sorted order|draining system", "jobs with a higher priority are before it"),
    (r"fairshare|mission", "its share of the machine is used up for now"),
    (r"preempt enough", "too little can be taken from jobs with a lower priority"),
    (r"job_sort_formula threshold", "its priority is below what the site starts"),
    (r"concurrent running subjobs", "as many tasks of its array run as it allows at a time"),
    (r"ineligible state", "nodes that it needs are down, offline or in use", _NODES),
    (r"^Specified .* does not exist", "a node that it names does not exist", "change scheduler.include"),
    (r"pack placement", "it asks for all of it on one node, where there is no room", "change scheduler.directives"),
    (r"licen[cs]e", "the licences that it needs are in use, or PBS has none", _SITE),
    (r"provision", "its nodes cannot be provisioned as asked", _SITE),
    (r"PBS Error|Failed to run|was rejected|scheduling error", "PBS tried to start it and failed", _SITE),
    (r"depend|held by another job", "it waits for another job"),
)

#: What commands print if PBS cannot be reached, and what to do; the first that is found counts.
UNREACHABLE = (
    (
        r"Unknown Host|No server specified|pbsconf error|Could not resolve host",
        "run this where qsub works, such as the login node, or set PBS_SERVER in pbs.conf or the environment",
    ),
    (
        r"munge|trqauthd|pbs_iff|(invalid|expired|bad) credential|No Permission\.|authentication (error|failed)",
        "try again; if it stays so, ask the site's support about munge, trqauthd or pbs_iff",
    ),
    (
        r"cannot connect to (?:server|default|specified)|Couldn't connect to cluster|Can ?not establish connection|"
        r"Unable to communicate with|Connection (?:refused|timed out|reset)|Communication failure|End of File|"
        r"Time ?out\b|too busy|connection table full|No free connections|Batch protocol error|Server shutting down|"
        r"Client connection not found|errno=1(?:11|04|10|50\d\d|51\d\d)\b",
        "see qstat -B, and try again when it answers",
    ),
)
_QUEUE = "set scheduler.partition to a queue that qstat -Q lists and you may use"
_VALUE = r"value (?:for )?"
_OF_NODE = rf"{_VALUE}(?:select\.|Resource_List\.)"
#: What qsub prints if it refuses a job. It is one of many things that it may not like; PBS' own words say why.
REFUSED = (
    (r"Cannot be used with select", "take -l nodes, or what asks for select, out of scheduler.directives"),
    (r"illegal -N value|name is too long", "change name: letters, digits, ., _, + and -, and not too long"),
    (r"illegal -J value|illegal -t value|array job|job array", "change scheduler.array"),
    (r"illegal -M value", "change notify.mail"),
    (r"unknown reservation", "change scheduler.reservation; pbs_rstat lists reservations"),
    (r"walltime", "change resources.time"),
    (rf"{_OF_NODE}(?:ncpus|ppn|procs)", "change resources.cpus_per_node"),
    (rf"{_OF_NODE}(?:ngpus|gpus)", "change resources.gpus_per_node"),
    (rf"{_OF_NODE}[pv]*mem\b", "change resources.memory"),
    (rf"{_VALUE}Resource_List\.place", "change -l place in scheduler.directives"),
    (rf"{_VALUE}Resource_List\.select", "change resources.nodes or scheduler.constraint"),
    (r"filesystems", "set scheduler.resources, such as filesystems=home:scratch"),
    (r"unknown resource", "change scheduler.constraint, scheduler.resources or scheduler.directives"),
    (
        r"queue and/or server resource limits|exceeds queue resource|Resource limit exceeds|all possible destinations",
        "lower resources.time, resources.nodes, resources.cpus_per_node, resources.gpus_per_node or resources.memory, "
        "or choose another scheduler.partition; qstat -Q -f shows the limits of the queues",
    ),
    (r"Maximum number of jobs|would exceed .*limit", "wait until some of your other jobs have ended"),
    (r"bad [ug]id", "submit as a user whom PBS lets run jobs, which root often is not; ask the site's support"),
    (r"\b(?:account|project|allocation|budget)\b", "change scheduler.account or scheduler.project"),
    (r"unknown queue|queue is not enabled|access to queue|default queue|queue is currently not", _QUEUE),
    (r"Unauthorized Request", f"its queue may not take your jobs: {_QUEUE}"),
    (r"illegal -q value|illegal destination", _QUEUE),
    (r"dependency", "change scheduler.directives: the job that it depends on is not there any more"),
    (r"invalid option|illegal -\w value|undefined attribute", "change scheduler.directives"),
    (r"script file|script not a file|access script", "name a script that exists and is not empty"),
)
#: Printed of a job that PBS does not know (it never did, or has forgotten it), and of one that is ending or has ended
#: and only PBS' history has.
GONE = (
    r"(?i)unknown job id|unknown array id|job not found|job has finished|already in exit state|"
    r"invalid for (?:state of job|finished array subjob)"
)
#: Printed if this PBS keeps no jobs that have ended (the command exits with 0 nevertheless), or has no such option.
NOT_LIKE_THAT = r"(?im)not configured to maintain job history|^usage:|invalid option|unrecognized option"


def state_of(letter: str) -> tuple[State, str]:
    """Return our state for PBS' letter, and that with what it stands for, as in ``R (running)``.

    Of a job that has ended the state is UNKNOWN, since the letter does not say how.
    """
    state, words, _ = _STATES.get(letter, (State.UNKNOWN, "", None))
    return state, f"{letter} ({words})" if words else letter


def reason_of(letter: str, comment: str, held: str, depend: str) -> JobReason | None:
    """Explain PBS' letter for the state of a job that has not ended, by its comment, its holds and its dependencies.

    A hold is a letter.
    """
    if letter == "Q":
        return why_pending(comment)
    if letter == "R" and " and terminated" in comment:
        return JobReason("it is being deleted")
    if letter != "H":
        return _STATES[letter][2] if letter in _STATES else JobReason(f"PBS says {letter}")
    if waits := waits_for(depend):
        return JobReason(f"it waits for {waits}")
    if "too many failed attempts" in comment or "job held" in comment:
        return why_pending(comment)
    return next((reason for kind, reason in _HOLDS.items() if kind in held), _HOLDS["u"])


def why_pending(comment: str) -> JobReason:
    """Explain the comment of a job that waits."""
    before = re.match(r"(?:(Can Never Run)|Not Running)(?:: )?", comment)
    text = comment[before.end() if before else 0 :].strip()
    never = bool(before and before[1])
    if not text:
        return JobReason("PBS has not considered it yet", hopeless=never)
    known = _shortage(text, never=never) or explained(_COMMENTS, text) or _limit(text)
    return replace(known or JobReason(f"PBS says {comment}"), hopeless=never)


def waits_for(depend: str) -> str:
    """Return the jobs that a job waits for, as ``job 5.server``; empty if it waits for none."""
    found = re.findall(r"(?:^|,)(?:after\w*|syncwith|runone):([^,]+)", depend)
    jobs = [job.partition("@")[0] for part in found for job in part.split(":")]
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}" if jobs else ""


def _shortage(text: str, *, never: bool) -> JobReason | None:
    """Explain that there is too little of a resource."""
    found = _SHORT.search(text)
    if not found:
        return None
    thing, key = _THINGS.get(found["name"], (found["name"], "scheduler.constraint or scheduler.resources"))
    reported = found["amounts"] or ""
    if " != " in reported:
        return JobReason(f"no node has {thing} {reported.partition(' != ')[0]}", f"change {key}")
    if thing == "host":
        return JobReason("hosts that it needs are down or in use", _NODES)
    whose = f" in its {found['of'].strip()}" if found["of"] else ""
    has, is_more_than_all = "PBS", never
    if amounts := re.fullmatch(r"R: (.*?) A: (.*?) T: (.*)", reported):
        requested, free, total = amounts.groups()
        reported = f"{requested} requested, {free} free, {total} in all"
        if not never and requested.isdecimal() and total.isdecimal() and int(requested) > int(total):
            is_more_than_all = True
            has = has if whose else "a node"  # PBS checked that one last; another one may have more.
    reported = f" ({reported})" if reported else ""
    if is_more_than_all:
        return JobReason(f"it asks for more {thing} than {has} has{whose}{reported}", f"lower {key}")
    return JobReason(f"too little of what it asks for is free{whose}: {thing}{reported}", f"wait, or change {key}")


def _limit(text: str) -> JobReason | None:
    """Explain a limit on what jobs may use or on how many may run."""
    if not re.search(_LIMIT, text):
        return None
    whose = first_fix(_WHOSE, text)
    resource = re.search(r"on resource (\w+)", text)
    thing = _THINGS.get(resource[1], (resource[1], ""))[0] if resource else "jobs that run"
    queue = re.search(r"(?i)\bqueue (\S+?)(?:'s)?(?:\s|$)", text)
    where = "a node" if text.startswith("Node") else "the server"
    where = f"queue {queue[1]}" if queue else where
    return JobReason(f"{whose} reached the limit of {where} on {thing}")


# --- Answers about jobs. How one ended, its exit status, its substate and its comment say together.

#: Added by PBS to the number of the signal that ended the script, and by a shell to that of its last command.
_SIGNALLED, _BY_SHELL, _LAST_SIGNAL, _TERM, _KILL = 256, 128, 64, signal.SIGTERM, signal.SIGKILL
_NOT_STARTED = JobReason("PBS could not start it", "ask the site's support; the logs of its first node have details")
_OUT_OF_CPU_TIME = JobReason("it reached its limit on CPU time", "ask for more with -l cput in scheduler.directives")
_TOO_MANY_CPUS = JobReason("it used more CPUs than it requested", "raise resources.cpus_per_node")
_ABORTED = JobReason("PBS on its first node was restarted, and ended it")
#: PBS' own exit statuses, which are below zero: those of OpenPBS and PBS Pro, and those of Torque.
_OWN: dict[Flavour, dict[int, tuple[State, JobReason]]] = {
    "openpbs": {
        **dict.fromkeys((-4, -5, -6), (State.NODE_FAIL, _ABORTED)),
        -10: (State.FAILED, JobReason("its user or group is not known on its nodes", _SITE)),
        -13: (State.FAILED, JobReason("its password is not valid", _SITE)),
        **dict.fromkeys((-14, -20), (State.NODE_FAIL, JobReason("a node failed"))),
        **dict.fromkeys((-16, -17, -18, -19, -22), (State.FAILED, JobReason("a hook of the site rejected it", _SITE))),
        **dict.fromkeys((-24, -25), (State.FAILED, _TOO_MANY_CPUS)),
        **dict.fromkeys((-26, -27), (State.OUT_OF_MEMORY, OUT_OF_MEMORY)),
        -28: (State.TIMEOUT, _OUT_OF_CPU_TIME),
        -29: (State.TIMEOUT, OUT_OF_TIME),
        -30: (State.NODE_FAIL, JobReason("a node could not join it", "pbsnodes -l lists nodes that are down")),
    },
    "torque": {
        **dict.fromkeys((-4, -5, -6), (State.NODE_FAIL, _ABORTED)),
        -9: (State.FAILED, JobReason("PBS could not open the files of its output", "see scheduler.output")),
        -10: (State.OUT_OF_MEMORY, OUT_OF_MEMORY),
        -11: (State.TIMEOUT, OUT_OF_TIME),
        -12: (State.TIMEOUT, _OUT_OF_CPU_TIME),
    },
}
_PLAIN_LINE = re.compile(r"^    (\w+(?:\.\w+)?) = (.*)$", re.MULTILINE)


def parse_jobs(text: str) -> tuple[JobInfo, ...]:
    """Read what ``qstat -f`` prints: one job, or an array and its subjobs. Long lines may be wrapped, or not.

    A variable of the user's may hold lines that look like PBS' own. Those before the variables count first, and of
    those after their start the last.
    """
    jobs = []
    for part in re.split(r"^Job Id: *", text.replace("\n\t", ""), flags=re.MULTILINE)[1:]:
        job_id, _, rest = part.partition("\n")
        before, _, after = rest.partition("\n    Variable_List = ")
        lines = _PLAIN_LINE.findall(after) + _PLAIN_LINE.findall(before)
        jobs.append(_info(job_id.strip(), {name.lower(): value for name, value in lines}))
    return tuple(jobs)


def _info(job_id: str, fields: Mapping[str, str]) -> JobInfo:
    letter, word = fields.get("job_state", ""), fields.get("comment", "").strip()
    info = JobInfo(job_id, *state_of(letter), word)
    if letter not in ENDED:
        held, depend = fields.get("hold_types", "").replace("n", ""), fields.get("depend", "")
        info = replace(info, why=reason_of(letter, word, held, depend))
    if info.state is State.PENDING:
        return info
    memory = reading(fields.get("resources_used.mem", ""), parse_memory) or None
    started = time_of(fields.get("stime") or fields.get("start_time", ""))
    info = replace(info, started=started, peak_memory=memory)
    if letter not in ENDED:
        return info
    times = (fields.get(name) for name in ("obittime", "comp_time", "history_timestamp", "mtime"))
    return replace(_ending(info, fields), ended=time_of(next(filter(None, times), "")))


def _ending(info: JobInfo, fields: Mapping[str, str]) -> JobInfo:
    """Add how a job has ended to what is known of it; names of fields are in small letters."""
    found = re.fullmatch(r"-?\d+", fields.get("exit_status", ""))
    status, is_torque, has_run = int(found[0]) if found else None, info.native[0] == "C", bool(fields.get("exec_host"))
    by_whom = re.search(r" and terminated by (\S+)", info.word)
    was_deleted = fields.get("substate") == "91" or by_whom is not None  # The substate of a job that was deleted.
    deleted = JobReason(f"it was deleted by {by_whom[1]}") if by_whom else None
    if status is None or (is_torque and status >= 0 and not has_run):
        if has_run:  # Its nodes failed before it started, or an old PBS forgot to account for it.
            return replace(info, state=State.CANCELLED if was_deleted else State.FAILED, why=deleted)
        # It ended in the queue. Its substate does not report why: PBS calls also those finished that it deleted itself.
        waited = "" if was_deleted else waits_for(fields.get("depend", ""))
        why = JobReason(f"{waited}, which it waited for, did not end as it should") if waited else deleted
        return replace(info, state=State.CANCELLED, why=why)
    if status < 0:
        state, reason = _OWN["torque" if is_torque else "openpbs"].get(status, (State.FAILED, _NOT_STARTED))
        return replace(info, state=state, why=reason)
    used, limit = (seconds(fields.get(f"{what}.walltime", "")) for what in ("resources_used", "resource_list"))
    killed = status in {base + number for base in (_SIGNALLED, _BY_SHELL) for number in (_TERM, _KILL)}
    if was_deleted:
        state, why = State.CANCELLED, deleted
    elif killed and 0 < limit <= used:
        state, why = State.TIMEOUT, OUT_OF_TIME
    elif is_torque and status == _SIGNALLED + _TERM:  # Only Torque's log distinguishes these two.
        state, why = State.CANCELLED, JobReason("it was deleted, or its script was ended by SIGTERM")
    else:
        state, why = State.FAILED if status else State.SUCCEEDED, None
    killed_by = status - _SIGNALLED if _SIGNALLED < status <= _SIGNALLED + _LAST_SIGNAL else None
    by_itself = killed_by is None and (status or state is State.SUCCEEDED)
    return replace(info, state=state, why=why, exit_code=status if by_itself else None, signal=killed_by)


def seconds(clock: str) -> int:
    """Return the seconds in PBS' ``hours:minutes:seconds``, perhaps with days before, or alone; 0 if it is neither."""
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 4:
        return 0
    return sum(int(part) * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False))
