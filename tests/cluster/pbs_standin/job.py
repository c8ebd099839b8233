"""One job, as the server keeps it and `qstat -f` shows it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from pbs_standin.resources import Chunk, clock, totals
from pbs_standin.submission import Wish
from pbs_standin.words import SERVER, Flavour


def date(stamp: float) -> str:
    """Return a time as PBS writes it."""
    return time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(stamp))


@dataclass
class Job:
    """One job.

    Attributes:
        id: as `qsub` prints it; ``12[].pbsctl`` for an array, ``12[0].pbsctl`` for one of its jobs.
        chunks, place: what it needs.
        resources: what Resource_List shows.
        state: its letter.
        holds: of ``u`` (user) and ``s`` (a dependency).
        depend: what it waits for: kind and job.
        hosts: where it is, one for each chunk, with the slot there.
        outputs: where stdout and stderr go, as `host:path`.
        array: the array that it is one job of; empty for others.
        terminal: of an interactive job.
        terminated_by: who ended it, if somebody did.
        exit_status: of its last run.
        is_delivered: whether its outputs arrived.
    """

    id: str
    flavour: Flavour
    wish: Wish
    queue: str
    name: str
    chunks: list[Chunk]
    place: str
    resources: dict[str, Any]
    variables: dict[str, str]
    outputs: tuple[str, str] = ("", "")
    state: str = "Q"
    substate: int = 10
    holds: set[str] = field(default_factory=set)
    depend: list[tuple[str, str]] = field(default_factory=list)
    hosts: list[tuple[str, int]] = field(default_factory=list)
    array: str = ""
    index: int | None = None
    terminal: str = ""
    terminated_by: str = ""
    comment: str = ""
    run_count: int = 0
    session: int = 0
    exit_status: int | None = None
    is_delivered: bool = True
    cookie: str = field(default_factory=lambda: secrets.token_hex(16).upper())
    created: float = field(default_factory=time.time)
    changed: float = 0.0
    started: float = 0.0
    ended: float = 0.0

    @property
    def options(self) -> dict[str, str]:
        """The options of its qsub."""
        return self.wish.options

    @property
    def number(self) -> str:
        """Its id without the server."""
        return self.id.partition(".")[0]

    @property
    def is_array(self) -> bool:
        """Whether it is an array as a whole."""
        return "[]" in self.id

    @property
    def is_over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in (self.flavour.finished, "X")

    @property
    def is_past(self) -> bool:
        """Whether only the history has it: what `qstat` does not show without -x."""
        return self.state == "F"

    @property
    def is_rerunnable(self) -> bool:
        """Whether it may run once more."""
        return self.options.get("-r", "y") == "y" and "-I" not in self.options

    @property
    def walltime(self) -> int | None:
        """How many seconds it may run."""
        shown = self.resources.get("walltime")
        if shown is None:
            return None
        hours, minutes, seconds = map(int, shown.split(":"))
        return hours * 3600 + minutes * 60 + seconds

    @property
    def used(self) -> int:
        """How many seconds it has run."""
        return int((self.ended or time.time()) - self.started) if self.started else 0

    def nodes(self) -> list[str]:
        """Return its nodes, each once, the first one first."""
        return [*dict.fromkeys(host for host, _ in self.hosts)]

    def lines(self) -> list[str]:
        """Return the lines of its nodefile, which are the indices of pbsdsh too."""
        hosts = [host for (host, _), chunk in zip(self.hosts, self.chunks, strict=True) for _ in range(chunk.lines)]
        return hosts if self.flavour.is_torque else sorted(hosts, key=self.nodes().index)

    def vnodes(self) -> str:
        """Return what exec_vnode shows."""
        parts = []
        for (host, _), chunk in zip(self.hosts, self.chunks, strict=True):
            counted = [f"{name}={amount}{'kb' if name == 'mem' else ''}" for name, amount in chunk.counted.items()]
            parts.append(f"({':'.join([host, *counted])})")
        return "+".join(parts)

    def exec_host(self) -> str:
        """Return what exec_host shows."""
        parts = []
        for (host, slot), chunk in zip(self.hosts, self.chunks, strict=True):
            cores = chunk.counted["ncpus"]
            if self.flavour.is_torque:
                parts.append(f"{host}/0-{cores - 1}" if cores > 1 else f"{host}/0")
            else:
                parts.append(f"{host}/{slot}*{cores}" if cores > 1 else f"{host}/{slot}")
        return "+".join(parts)

    def attributes(self) -> dict[str, Any]:
        """Return what `qstat -f` shows, nested, in its order."""
        shown = self._torque() if self.flavour.is_torque else self._openpbs()
        return {name: value for name, value in shown.items() if value not in (None, "", {})}

    def _common(self) -> dict[str, Any]:
        hosts = self.exec_host() if self.hosts else ""
        joined = self.options.get("-j", "n")
        return {
            "Job_Name": self.name,
            "Job_Owner": f"root@{self.wish.call.host}",
            "resources_used": self._used(),
            "job_state": self.state,
            "queue": self.queue,
            "server": SERVER,
            "Checkpoint": "u",
            "ctime": date(self.created),
            "depend": ",".join(f"{kind}:{job}@{SERVER}" for kind, job in self.depend),
            "Error_Path": self.outputs[1],
            "exec_host": hosts,
            "exec_vnode": "" if self.flavour.is_torque or not hosts else self.vnodes(),
            "Hold_Types": "".join(sorted(self.holds, reverse=True)) or "n",
            "interactive": "True" if "-I" in self.options else "",
            "Join_Path": joined,
            "Keep_Files": self.options.get("-k", "n"),
            "Mail_Points": self.options.get("-m", "a"),
            "mtime": date(self.changed or self.created),
            "Output_Path": self.outputs[0],
            "Priority": int(self.options.get("-p", 0)),
            "qtime": date(self.created),
            "Rerunable": str(self.is_rerunnable),
            "Resource_List": dict(sorted(self.resources.items())),
        }

    def _used(self) -> dict[str, Any]:
        if not self.started or self.is_array or (self.state == "R" and self.used < 1):
            return {}
        cores = totals(self.chunks).get("ncpus", 1)
        used = {"cput": "00:00:00", "mem": "0kb", "vmem": "0kb", "walltime": clock(self.used)}
        return used if self.flavour.is_torque else {"cpupercent": 0, "ncpus": cores, **used}

    def _openpbs(self) -> dict[str, Any]:
        return {
            **self._common(),
            "schedselect": self.resources["select"],
            "stime": date(self.started) if self.started else "",
            "obittime": date(self.ended) if self.ended and self.started else "",
            "session_id": self.session if self.state == "R" and self.session else None,
            "jobdir": self.wish.call.env.get("HOME", "") if self.session else "",
            "substate": self.substate,
            "Variable_List": self.variables,
            "euser": "root",
            "egroup": "root",
            "queue_type": "E",
            "comment": self.comment,
            "etime": date(self.created) if not self.holds else "",
            "run_count": self.run_count or None,
            "Stageout_status": int(self.is_delivered) if self.exit_status is not None and self.is_over else None,
            "Exit_status": self.exit_status,
            "Submit_arguments": " ".join(self.wish.call.args) if self.index is None else "",
            "array": "True" if self.is_array else "",
            "array_indices_submitted": self.options["-J"].partition("%")[0] if self.is_array else "",
            "array_id": self.array,
            "array_index": self.index,
            "Account_Name": self.options.get("-A", ""),
            "project": self.options.get("-P", "_pbs_project_default"),
            "Submit_Host": self.wish.call.host,
        }

    def _torque(self) -> dict[str, Any]:
        pairs = zip(self.hosts, self.chunks, strict=False)
        cards = [(host, chunk.counted.get("ngpus", 0)) for (host, _), chunk in pairs]
        return {
            **self._common(),
            "exec_gpus": "+".join(f"{host}-gpu/{number}" for host, count in cards for number in range(count)),
            "session_id": self.session or None,
            "substate": self.substate,
            "Variable_List": ",".join(f"{name}={value}" for name, value in self.variables.items()),
            "euser": "root",
            "egroup": "root",
            "queue_type": "E",
            "comment": self.comment,
            "etime": date(self.created) if not self.holds else "",
            "exit_status": self.exit_status,
            "submit_args": " ".join(self.wish.call.args),
            "job_array_id": self.index,
            "Account_Name": self.options.get("-A", ""),
            "start_time": date(self.started) if self.started else "",
            "start_count": self.run_count or None,
            "comp_time": date(self.ended) if self.ended else "",
            "submit_host": self.wish.call.host,
        }
