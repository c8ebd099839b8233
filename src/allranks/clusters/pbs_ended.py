"""How a job of PBS has ended: what its exit status, its substate and its comment tell together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from allranks.clusters import pbs_words
from allranks.clusters.reason import OUT_OF_TIME, Reason
from allranks.runs.status import State

#: Added by PBS to the number of the signal that ended the script, and by a shell to that of its last command.
_SIGNALLED, _BY_SHELL = 256, 128
_LAST_SIGNAL = 64
#: What PBS sends to a job at its time limit, and when it is deleted: SIGTERM, and SIGKILL if that does not end it.
_TERM, _KILL = 15, 9
#: Substate of a job that was deleted.
_DELETED = "91"
_BY_WHOM = re.compile(r" and terminated by (\S+)")

_NOT_STARTED = Reason("PBS could not start it", "ask the site's support; the logs of its first node tell more")
_OUT_OF_CPU_TIME = Reason("it reached its limit on CPU time", "ask for more with -l cput in scheduler.directives")
_OUT_OF_MEMORY = Reason("it used more memory than it asked for", "raise resources.memory")
_TOO_MANY_CPUS = Reason("it used more CPUs than it asked for", "raise resources.cpus_per_node")
_NODE = Reason("a node failed")
_HOOK = Reason("a hook of the site refused or deleted it", "ask the site's support")
_NO_OUTPUT = Reason("PBS could not open the files of its output", "see scheduler.output")
_ABORTED = Reason("PBS on its first node was started anew, and ended it")

#: PBS' own exit statuses, which are below zero: those of OpenPBS and PBS Pro, and those of Torque.
_OWN: dict[int, tuple[State, Reason]] = {
    -4: (State.NODE_FAIL, _ABORTED),
    -5: (State.NODE_FAIL, _ABORTED),
    -6: (State.NODE_FAIL, _ABORTED),
    -10: (State.FAILED, Reason("its user or group is not known on its nodes", "ask the site's support")),
    -13: (State.FAILED, Reason("its password is not valid", "ask the site's support")),
    -14: (State.NODE_FAIL, _NODE),
    -16: (State.FAILED, _HOOK),
    -17: (State.FAILED, _HOOK),
    -18: (State.FAILED, _HOOK),
    -19: (State.FAILED, _HOOK),
    -20: (State.NODE_FAIL, _NODE),
    -22: (State.FAILED, _HOOK),
    -24: (State.FAILED, _TOO_MANY_CPUS),
    -25: (State.FAILED, _TOO_MANY_CPUS),
    -26: (State.OUT_OF_MEMORY, _OUT_OF_MEMORY),
    -27: (State.OUT_OF_MEMORY, _OUT_OF_MEMORY),
    -28: (State.TIMEOUT, _OUT_OF_CPU_TIME),
    -29: (State.TIMEOUT, OUT_OF_TIME),
    -30: (State.NODE_FAIL, Reason("one of its nodes could not join it", "pbsnodes -l lists nodes that are down")),
}
_OWN_OF_TORQUE: dict[int, tuple[State, Reason]] = {
    **{status: _OWN[status] for status in (-4, -5, -6)},
    -9: (State.FAILED, _NO_OUTPUT),
    -10: (State.OUT_OF_MEMORY, _OUT_OF_MEMORY),
    -11: (State.TIMEOUT, OUT_OF_TIME),
    -12: (State.TIMEOUT, _OUT_OF_CPU_TIME),
}


@dataclass(frozen=True)
class Ending:
    """How a job has ended.

    Attributes:
        state: our state.
        cause: what there is to say about it.
        exit_code: what its script ended with, if it ended by itself.
        signal: the signal that ended it, if one did.
    """

    state: State
    cause: Reason | None = None
    exit_code: int | None = None
    signal: int | None = None


def ending(fields: Mapping[str, str]) -> Ending:
    """Tell how a job has ended.

    Args:
        fields: what qstat tells of it, names in small letters.
    """
    status = _number(fields.get("exit_status", ""))
    is_torque = fields.get("job_state") == "C"
    if status is None or (is_torque and status >= 0 and not fields.get("exec_host")):
        return _never_ran(fields)
    if status < 0:
        own = _OWN_OF_TORQUE if is_torque else _OWN
        return Ending(*own.get(status, (State.FAILED, _NOT_STARTED)))
    signal = status - _SIGNALLED if _SIGNALLED < status <= _SIGNALLED + _LAST_SIGNAL else None
    state, cause = _state(fields, status, is_torque=is_torque)
    by_itself = signal is None and (status or state is State.SUCCEEDED)
    return Ending(state, cause, status if by_itself else None, signal)


def _never_ran(fields: Mapping[str, str]) -> Ending:
    """Tell of a job that ended in the queue: it was deleted, or the job that it depends on did not end as it should.

    Its substate does not tell: PBS calls also those finished that it deleted itself.
    """
    if fields.get("exec_host"):  # A job whose nodes failed before it began, or that an old PBS forgot to account for.
        return Ending(State.CANCELLED if _was_deleted(fields) else State.FAILED, _by_whom(fields))
    if not _was_deleted(fields) and (waited := pbs_words.waits_for(fields.get("depend", ""))):
        return Ending(State.CANCELLED, Reason(f"{waited}, which it waited for, did not end as it should"))
    return Ending(State.CANCELLED, _by_whom(fields))


def _state(fields: Mapping[str, str], status: int, *, is_torque: bool) -> tuple[State, Reason | None]:
    if _was_deleted(fields):
        return State.CANCELLED, _by_whom(fields)
    killed = status in {base + signal for base in (_SIGNALLED, _BY_SHELL) for signal in (_TERM, _KILL)}
    if killed and _is_out_of_time(fields):
        return State.TIMEOUT, OUT_OF_TIME
    if is_torque and status == _SIGNALLED + _TERM:  # Torque tells it from a script that got SIGTERM in its log only.
        return State.CANCELLED, Reason("it was deleted, or its script was ended by SIGTERM")
    return (State.FAILED if status else State.SUCCEEDED), None


def _was_deleted(fields: Mapping[str, str]) -> bool:
    return fields.get("substate") == _DELETED or bool(_BY_WHOM.search(fields.get("comment", "")))


def _by_whom(fields: Mapping[str, str]) -> Reason | None:
    found = _BY_WHOM.search(fields.get("comment", ""))
    return Reason(f"it was deleted by {found[1]}") if found else None


def _is_out_of_time(fields: Mapping[str, str]) -> bool:
    used, limit = seconds(fields.get("resources_used.walltime", "")), seconds(fields.get("resource_list.walltime", ""))
    return used is not None and limit is not None and used >= limit


def seconds(clock: str) -> float | None:
    """Return the seconds in PBS' ``hours:minutes:seconds``, which may have days before or be seconds alone."""
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 4:
        return None
    units = (1, 60, 3600, 86400)
    return float(sum(int(part) * unit for part, unit in zip(reversed(parts), units, strict=False)))


def _number(text: str) -> int | None:
    with suppress(ValueError):
        return int(text)
    return None
