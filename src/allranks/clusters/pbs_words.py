"""PBS' words in plain English: states of jobs, and why a job waits.

OpenPBS and PBS Pro say in a job's comment why it waits, Torque does so where its own scheduler runs. Comments of a
kind, such as limits, are taken apart by one rule. A comment that is not known is handed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.clusters.reason import Reason
from allranks.runs.status import State

_RELEASE = "let it go with qrls {job}"
_SITE = "ask the site's support"
_QUEUES = "choose another scheduler.partition, or wait"
_NODES = "pbsnodes -aSj shows the nodes"

#: Letters of jobs that have ended; how, is in other fields. X is a subjob whose array goes on, C is Torque's.
ENDED = frozenset("FXC")
#: PBS' letter for a state: ours, what the letter stands for, and what it means where that does not say it.
_STATES: dict[str, tuple[State, str, Reason | None]] = {
    "Q": (State.PENDING, "queued", None),
    "H": (State.PENDING, "held", None),
    "W": (State.PENDING, "waiting", Reason("its time to begin has not come")),
    "T": (State.PENDING, "in transit", Reason("it is on its way to another queue or server")),
    "R": (State.RUNNING, "running", None),
    "B": (State.RUNNING, "array begun", None),
    "E": (State.RUNNING, "exiting", Reason("it is ending")),
    "S": (State.RUNNING, "suspended", Reason("it is suspended")),
    "U": (State.RUNNING, "suspended", Reason("it is suspended: its workstation is in use")),
    "F": (State.UNKNOWN, "finished", None),
    "X": (State.UNKNOWN, "subjob finished", None),
    "C": (State.UNKNOWN, "completed", None),
    "M": (
        State.UNKNOWN,
        "moved",
        Reason("it was moved to another server, and this one does not know what becomes of it"),
    ),
}
_HOLDS = {
    "u": Reason("it is held", _RELEASE),
    "o": Reason("an operator holds it", _SITE),
    "s": Reason("PBS or an administrator holds it", _SITE),
    "p": Reason("it is held: its password is not valid", _SITE),
}
#: Resources: how to call them, and where they are asked for.
_THINGS: dict[str, tuple[str, str]] = {
    "ncpus": ("CPUs", "resources.cpus_per_node"),
    "mpiprocs": ("processes", "launch.nproc_per_node"),
    "ngpus": ("GPUs", "resources.gpus_per_node"),
    "gpus": ("GPUs", "resources.gpus_per_node"),
    "mem": ("memory", "resources.memory"),
    "pmem": ("memory", "resources.memory"),
    "vmem": ("virtual memory", "resources.memory"),
    "pvmem": ("virtual memory", "resources.memory"),
    "walltime": ("time", "resources.time"),
    "min_walltime": ("time", "resources.time"),
    "cput": ("CPU time", "resources.time"),
    "nodect": ("nodes", "resources.nodes"),
    "nodes": ("nodes", "resources.nodes"),
    "host": ("host", "scheduler.include"),
    "vnode": ("host", "scheduler.include"),
}
_BEFORE = re.compile(r"^(?:(?P<never>Can Never Run)|Not Running)(?:: )?")
#: The resource, and in parentheses what was asked for or what there is of it.
_SHORT = re.compile(
    r"Insufficient amount of (?P<of>(?:queue |server )?)resource:? (?P<name>[^\s(]+)\s*(?:\((?P<amounts>.*)\))?",
    re.DOTALL,
)
_LIMIT = re.compile(r"(?i)would exceed|limit (?:has been )?reached|reached .*limit")
_WHOSE = (
    (r"(?i)per-user|\buser\b", "your jobs have"),
    (r"(?i)per-group|\bgroup\b", "the jobs of your group have"),
    (r"(?i)per-project|\bproject\b", "the jobs of your project have"),
)
#: What is found in a comment, and what that means; the first that is found counts.
_COMMENTS: tuple[tuple[str, Reason], ...] = (
    (r"too many failed attempts", Reason("it could not be started too often and is held", _SITE)),
    (r"(?i)job held,? (?:provisioning|due to)", Reason("PBS could not prepare its nodes and holds it", _SITE)),
    (r"(?i)^job held by", Reason("it is held", _RELEASE)),
    (r"(?i)not enough total nodes", Reason("it asks for more nodes than there are", "lower resources.nodes")),
    (
        r"(?i)placement set|\bset .* has too few free resources",
        Reason("no group of nodes that belong together has room for it"),
    ),
    (
        r"(?i)not enough free nodes|No available resources on nodes|Too few free resources",
        Reason("the nodes that it needs are in use"),
    ),
    (r"(?i)right type of nodes", Reason("the nodes that it asks for are in use, or there are none such", _NODES)),
    (r"(?i)queue not started", Reason("its queue starts no jobs", _QUEUES)),
    (r"(?i)not an execution queue", Reason("its queue only hands jobs on", _QUEUES)),
    (r"(?i)not in queued state", Reason("PBS is still changing its state")),
    (
        r"(?i)dedicated time",
        Reason("the nodes are kept for dedicated time", "a shorter resources.time may fit in before"),
    ),
    (r"(?i)in non-?primetime|into primetime", Reason("it waits for the hours outside prime time")),
    (r"(?i)in primetime|into non-?primetime", Reason("it waits for prime time")),
    (
        r"(?i)ineligible type|not eligible for advance reservation|exclusive node and node is in use|multi-node job",
        Reason("nodes that it needs do not take such a job now", _NODES),
    ),
    (
        r"(?i)reservation",
        Reason(
            "its nodes are kept for a reservation or for jobs before it", "a shorter resources.time may fit in before"
        ),
    ),
    (r"(?i)top job|strict sorted order|draining system", Reason("jobs with a higher priority are before it")),
    (r"(?i)fairshare|mission", Reason("its share of the machine is used up for now")),
    (r"(?i)preempt enough", Reason("too little can be taken from jobs with a lower priority")),
    (r"(?i)job_sort_formula threshold", Reason("its priority is below what the site starts")),
    (r"(?i)concurrent running subjobs", Reason("as many tasks of its array run as it allows at a time")),
    (r"(?i)ineligible state", Reason("nodes that it needs are down, offline or in use", _NODES)),
    (r"(?i)^Specified .* does not exist", Reason("a node that it names does not exist", "change scheduler.include")),
    (
        r"(?i)pack placement",
        Reason("it asks for all of it on one node, where there is no room", "change scheduler.directives"),
    ),
    (r"(?i)licen[cs]e", Reason("the licences that it needs are in use, or PBS has none", _SITE)),
    (r"(?i)provision", Reason("its nodes cannot be provisioned as asked", _SITE)),
    (r"(?i)PBS Error|Failed to run|was rejected|scheduling error", Reason("PBS tried to start it and failed", _SITE)),
    (r"(?i)depend|held by another job", Reason("it waits for another job")),
)


def state_of(letter: str) -> State:
    """Return our state for PBS' letter; of a job that has ended it is UNKNOWN, since the letter does not say how."""
    return _STATES.get(letter, (State.UNKNOWN, "", None))[0]


def native_of(letter: str) -> str:
    """Return PBS' letter with what it stands for: ``R (running)``."""
    return f"{letter} ({_STATES[letter][1]})" if letter in _STATES else letter


def reason_of(letter: str, comment: str, held: str, depend: str) -> Reason | None:
    """Tell why a job that has not ended is in its state, where there is something to say.

    ``{job}`` in the fix stands for the job.

    Args:
        letter: PBS' letter for its state.
        comment: the comment of the job.
        held: its holds, a letter for each.
        depend: what it depends on, as PBS writes it.
    """
    if letter == "Q":
        return why_pending(comment)
    if letter == "H":
        return _why_held(comment, held, depend)
    if letter == "R" and " and terminated" in comment:
        return Reason("it is being deleted")
    return _STATES[letter][2] if letter in _STATES else Reason(f"PBS says {letter}")


def why_pending(comment: str) -> Reason:
    """Explain the comment of a job that waits; ``{job}`` in the fix stands for the job."""
    before = _BEFORE.match(comment)
    text = comment[before.end() if before else 0 :].strip()
    never = bool(before and before["never"])
    reason = _explained(text, never=never) if text else Reason("PBS has not looked at it yet")
    return replace(reason or Reason(f"PBS says {comment}"), hopeless=never)


def _why_held(comment: str, held: str, depend: str) -> Reason:
    """Explain a hold. Of several, that counts which a user cannot release; PBS holds what depends on other jobs."""
    if waits := waits_for(depend):
        return Reason(f"it waits for {waits}")
    if "too many failed attempts" in comment or "job held" in comment:
        return why_pending(comment)
    return next((_HOLDS[kind] for kind in "psou" if kind in held), Reason("it is held", _RELEASE))


def waits_for(depend: str) -> str:
    """Return the jobs that a job waits for, as ``job 5.server``; empty where it waits for none."""
    found = re.findall(r"(?:^|,)(?:after\w*|syncwith|runone):([^,]+)", depend)
    jobs = [job.partition("@")[0] for part in found for job in part.split(":")]
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}" if jobs else ""


def _explained(text: str, *, never: bool) -> Reason | None:
    known = next((reason for pattern, reason in _COMMENTS if re.search(pattern, text)), None)
    return _shortage(text, never=never) or known or _limit(text)


def _shortage(text: str, *, never: bool) -> Reason | None:
    """Explain that there is too little of a resource."""
    found = _SHORT.search(text)
    if not found:
        return None
    thing, key = _THINGS.get(found["name"], (found["name"], "scheduler.constraint or scheduler.resources"))
    amounts = found["amounts"] or ""
    if " != " in amounts:
        return Reason(f"no node has {thing} {amounts.partition(' != ')[0]}", f"change {key}")
    if thing == "host":
        return Reason("hosts that it needs are down or in use", _NODES)
    whose = f" in its {found['of'].strip()}" if found["of"] else ""
    told = f" ({_in_words(amounts)})" if amounts else ""
    if never:
        return Reason(f"it asks for more {thing} than PBS has{whose}{told}", f"lower {key}")
    if _is_more_than_all(amounts):  # Of the node that PBS has looked at last; another one may have more.
        return Reason(f"it asks for more {thing} than {'PBS' if whose else 'a node'} has{whose}{told}", f"lower {key}")
    return Reason(f"too little of what it asks for is free{whose}: {thing}{told}", f"wait, or change {key}")


def _is_more_than_all(amounts: str) -> bool:
    found = re.fullmatch(r"R: (\d+) A: .*? T: (\d+)", amounts)
    return found is not None and int(found[1]) > int(found[2])


def _in_words(amounts: str) -> str:
    found = re.fullmatch(r"R: (.*?) A: (.*?) T: (.*)", amounts)
    return f"{found[1]} asked for, {found[2]} free, {found[3]} in all" if found else amounts


def _limit(text: str) -> Reason | None:
    """Explain a limit on what jobs may use or on how many may run."""
    if not _LIMIT.search(text):
        return None
    whose = next((who for pattern, who in _WHOSE if re.search(pattern, text)), "jobs have")
    resource = re.search(r"on resource (\w+)", text)
    thing = _THINGS.get(resource[1], (resource[1], ""))[0] if resource else "jobs that run"
    queue = re.search(r"(?i)\bqueue (\S+?)(?:'s)?(?:\s|$)", text)
    where = f"queue {queue[1]}" if queue else "a node" if text.startswith("Node") else "the server"
    return Reason(f"{whose} reached the limit of {where} on {thing}")
