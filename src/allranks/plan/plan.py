"""The plan: everything that will be executed for one job on one cluster, and why.

A dry run prints the very object that gets executed. It holds no secret: values of such variables reach the
ranks through the environment of the command that is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from allranks.errors import LaunchError


@dataclass(frozen=True)
class PlanFile:
    """A file of the run's directory: its name there, its text and its permission bits."""

    path: str
    text: str
    mode: int


@dataclass(frozen=True)
class NodeCommand:
    """The command that starts one node's part, as words, and the host that it is started on."""

    node: int
    host: str
    command: tuple[str, ...]
    #: How many ranks a file of hosts gives this node; 0: none does.
    slots: int = 0


@dataclass(frozen=True)
class Reason:
    """A decision of the plan: what it is about, what was decided, and why."""

    subject: str
    value: str
    why: str
    #: Whether it is a variable that debug turns on.
    is_debug: bool = False


@dataclass(frozen=True)
class Plan:
    """What will be executed for one job on one cluster."""

    run_id: str
    name: str
    cluster: str
    kind: str
    run_dir: str
    workdir: str
    nnodes: int
    nproc_per_node: int
    backend: str
    stop_timeout: float
    files: tuple[PlanFile, ...]
    commands: tuple[NodeCommand, ...]
    #: Names of the variables whose values are secret and travel in the environment only.
    secrets: tuple[str, ...]
    reasons: tuple[Reason, ...]
    #: What was requested and does not apply here.
    notes: tuple[str, ...]
    #: Whether the group may read what the run writes.
    group_readable: bool
    #: Number of the attempt that is started: 0 for a new run.
    attempt: int = 0
    #: The least number of nodes, where it may be fewer than ``nnodes``; 0: exactly so many.
    min_nodes: int = 0
    #: Whether each node starts a rank for each of its GPUs, whose number is not known yet.
    ranks_unknown: bool = False
    #: Number of all ranks, where nodes have different numbers of them; 0: as many on each.
    ranks: int = 0
    #: Nodes that wait to take the place of one that is lost; ``nnodes`` does not count them.
    spares: int = 0
    #: Where the nodes meet, if that is known before they are; empty and 0 otherwise.
    master_addr: str = ""
    master_port: int = 0
    #: What copies the job to nodes that do not see its directories, before all else: one stage after the other, and the
    #: commands of a stage at the same time.
    copies: tuple[tuple[NodeCommand, ...], ...] = ()
    #: What is run once, on one node, before all of them start.
    once: NodeCommand | None = None
    #: Where these copies are on each node, relative to the home there; empty: all nodes see the job's directories.
    copied_to: str = ""
    #: Whether the run on other machines ends when the command that started it is gone.
    is_attached: bool = False
    #: The rank that reads the stdin of the command; None: there is none that could.
    stdin: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks on all nodes."""
        return self.ranks or self.nnodes * self.nproc_per_node

    @property
    def file_mode(self) -> int:
        """Permission bits of the files that the run writes."""
        return 0o640 if self.group_readable else 0o600

    @property
    def script(self) -> Path | None:
        """Absolute path of the script here; None if a module or a program runs."""
        return next((Path(self.workdir, each.value) for each in self.reasons if each.subject == "script"), None)

    @property
    def before(self) -> tuple[NodeCommand, ...]:
        """All that is run before the nodes start, in this order."""
        return (*chain.from_iterable(self.copies), *([self.once] if self.once else []))

    @property
    def debug(self) -> tuple[Reason, ...]:
        """The variables that debug turns on."""
        return tuple(reason for reason in self.reasons if reason.is_debug)

    def with_values(self, error: LaunchError) -> LaunchError:
        """Return an error with the values of those keys that it says to change."""
        values = {reason.why: f"{reason.why} ({reason.value})" for reason in self.reasons if reason.value}
        fix = error.fix and re.sub(r"\b(scheduler|resources)\.\w+", lambda key: values.get(key[0], key[0]), error.fix)
        return LaunchError(error.what, why=error.why, fix=fix, see=error.see)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON, ``world_size`` included."""
        return {**asdict(self), "world_size": self.world_size}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        """Read what :meth:`to_json` returned; raise a KeyError or TypeError if it is anything else."""
        values = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}  # Else its default.
        values["files"] = tuple(PlanFile(**file) for file in raw["files"])
        values["reasons"] = tuple(Reason(**reason) for reason in raw["reasons"])
        values["secrets"], values["notes"] = tuple(raw["secrets"]), tuple(raw["notes"])
        values["commands"] = tuple(map(_command, raw["commands"]))
        values["copies"] = tuple(tuple(map(_command, stage)) for stage in raw["copies"])
        values["once"] = _command(raw["once"]) if raw["once"] else None
        return cls(**values)


def _command(raw: Mapping[str, Any]) -> NodeCommand:
    return NodeCommand(**{**raw, "command": tuple(raw["command"])})
