"""What PBS' commands say when they fail, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.clusters.refusals import REFUSED, UNREACHABLE, Refusals
from allranks.errors import LaunchError

_QUEUES = "set scheduler.partition to a queue that qstat -Q lists and you may use"
_LIMITS = (
    "lower resources.time, resources.nodes, resources.cpus_per_node, resources.gpus_per_node or resources.memory, "
    "or choose another scheduler.partition; "
    "qstat -Q -f shows the limits of the queues"
)
_PROJECT = "change scheduler.account or scheduler.project"
_UNREACHABLE = "see qstat -B, and try again when it answers"
_DIRECTIVES = "change scheduler.directives"

_AUTHENTICATION = (
    r"(?i)munge|trqauthd|pbs_iff|(?:invalid|expired|bad) credential|No Permission\.|authentication (?:error|failed)"
)
_CONNECTION = (
    r"(?i)cannot connect to (?:server|default|specified)|Couldn't connect to cluster|Can ?not establish connection|"
    r"Unable to communicate with|Connection (?:refused|timed out|reset)|Communication failure|End of File|Time ?out\b|"
    r"too busy|connection table full|No free connections|Batch protocol error|Server shutting down|"
    r"Client connection not found|errno=1(?:11|04|10|50\d\d|51\d\d)\b"
)
_NO_SERVER = r"(?i)Unknown Host|No server specified|pbsconf error|Could not resolve host"

#: What is found in what a command said, what that means, and what to do; the first that is found counts. Where it is
#: one of many things that qsub may not like, PBS' own words say why.
_KNOWN = (
    (
        _NO_SERVER,
        UNREACHABLE,
        "run this where qsub works, such as the login node, or set PBS_SERVER in pbs.conf or the environment",
    ),
    (
        _AUTHENTICATION,
        UNREACHABLE,
        "try again; if it stays so, ask the site's support about munge, trqauthd or pbs_iff",
    ),
    (_CONNECTION, UNREACHABLE, _UNREACHABLE),
    (r"Cannot be used with select", REFUSED, "take -l nodes, or what asks for select, out of scheduler.directives"),
    (
        r"(?i)illegal -N value|name is too long",
        REFUSED,
        "change name: letters, digits, ., _, + and -, and not too long",
    ),
    (r"(?i)illegal -J value|illegal -t value|array job|job array", REFUSED, "change scheduler.array"),
    (r"(?i)illegal -M value", REFUSED, "change scheduler.mail"),
    (r"(?i)unknown reservation", REFUSED, "change scheduler.reservation; pbs_rstat lists reservations"),
    (r"(?i)walltime", REFUSED, "change resources.time"),
    (r"(?i)value (?:for )?(?:select\.|Resource_List\.)(?:ncpus|ppn|procs)", REFUSED, "change resources.cpus_per_node"),
    (r"(?i)value (?:for )?(?:select\.|Resource_List\.)(?:ngpus|gpus)", REFUSED, "change resources.gpus_per_node"),
    (r"(?i)value (?:for )?(?:select\.|Resource_List\.)[pv]*mem\b", REFUSED, "change resources.memory"),
    (r"(?i)value (?:for )?Resource_List\.place", REFUSED, "change -l place in scheduler.directives"),
    (r"(?i)value (?:for )?Resource_List\.select", REFUSED, "change resources.nodes or scheduler.constraint"),
    (r"(?i)filesystems", REFUSED, "set scheduler.resources, such as filesystems=home:scratch"),
    (
        r"(?i)unknown resource",
        REFUSED,
        "take it out of scheduler.constraint, scheduler.resources or scheduler.directives: PBS does not know it",
    ),
    (
        r"(?i)queue and/or server resource limits|exceeds queue resource|Resource limit exceeds|"
        r"rejected by all possible destinations",
        REFUSED,
        _LIMITS,
    ),
    (r"(?i)Maximum number of jobs|would exceed .*limit", REFUSED, "wait until some of your other jobs have ended"),
    (
        r"(?i)bad [ug]id",
        REFUSED,
        "submit as a user whom PBS lets run jobs, which root often is not; ask the site's support",
    ),
    (r"(?i)\b(?:account|project|allocation|budget)\b", REFUSED, _PROJECT),
    (r"(?i)unknown queue|queue is not enabled|access to queue|default queue|queue is currently not", REFUSED, _QUEUES),
    (r"Unauthorized Request", REFUSED, f"its queue may not take your jobs: {_QUEUES}"),
    (r"(?i)illegal -q value|illegal destination", REFUSED, _QUEUES),
    (r"(?i)dependency", REFUSED, f"{_DIRECTIVES}: the job that it depends on is not there any more"),
    (r"(?i)invalid option|illegal -\w value|undefined attribute", REFUSED, _DIRECTIVES),
    (r"(?i)script file|script not a file|access script", REFUSED, "name a script that exists and is not empty"),
)


class _OfPbs(Refusals):
    """Refusals without the page of usage that PBS' commands print, and without Torque's ``submit error (…)``."""

    def refusal(self, command: Sequence[str], code: int, said: str) -> LaunchError:
        """Explain a command that failed, as :meth:`Refusals.refusal` does."""
        brief = re.sub(r"^usage: .*(?:\n[ \t].*)*", "", said, flags=re.MULTILINE)
        return super().refusal(command, code, re.sub(r"submit error \((.*)\)", r"\1", brief))


PBS = _OfPbs(
    scheduler="PBS",
    submit="qsub",
    known=_KNOWN,
    said_before="",
    ask_again="see qstat -B, and try again; qstat -u $USER tells whether a job was submitted nevertheless",
    list_jobs="qstat -u $USER",
    cancel="qdel",
    place="the cluster's login node; some sites need module load pbs or torque",
)


def is_unknown(code: int, said: str) -> bool:
    """Whether a command failed because PBS does not know the job: it never did, or has forgotten it."""
    return code != 0 and bool(re.search(r"(?i)unknown job id|unknown array id|job not found", said))


def has_finished(code: int, said: str) -> bool:
    """Whether a command failed because the job is ending, or has ended and only PBS' history has it."""
    words = r"(?i)job has finished|already in exit state|invalid for (?:state of job|finished array subjob)"
    return code != 0 and bool(re.search(words, said))


def has_no_history(said: str) -> bool:
    """Whether a command says that this PBS keeps no jobs that have ended; it ends with 0 nevertheless."""
    return "not configured to maintain job history" in said


def is_not_understood(code: int, said: str) -> bool:
    """Whether a command failed because this version has no such option."""
    return code != 0 and bool(re.search(r"(?i)^usage:|invalid option|unrecognized option", said, re.MULTILINE))


def is_passing(code: int, said: str) -> bool:
    """Whether a command failed because PBS could not be reached just then, which is worth another try."""
    return code != 0 and any(re.search(words, said) for words in (_CONNECTION, _AUTHENTICATION, _NO_SERVER))
