"""The plan: everything that will be executed for one job on one cluster, and why.

A dry run prints the same object that is executed. It holds no secrets: their values reach the ranks through the
environment of the started command.
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
    """A file in the run's directory: relative path, text and permission bits."""

    path: str
    text: str
    mode: int


@dataclass(frozen=True)
class NodeCommand:
    """The command that starts one node's part, as words, and its host."""

    node: int
    host: str
    command: tuple[str, ...]
    #: Number of ranks that a hostfile gives this node; 0 without one.
    slots: int = 0


@dataclass(frozen=True)
class Reason:
    """A decision of the plan: subject, value and reason."""

    subject: str
    value: str
    why: str
    #: Whether it is a variable that --debug sets.
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
    #: Names of variables whose values are secret and passed only in the environment.
    secrets: tuple[str, ...]
    reasons: tuple[Reason, ...]
    #: Notes on options that do not apply here.
    notes: tuple[str, ...]
    #: Whether the group may read the run's files.
    group_readable: bool
    #: Number of the attempt: 0 for a new run.
    attempt: int = 0
    #: Least number of nodes, if fewer than ``nnodes`` are allowed; else 0.
    min_nodes: int = 0
    #: Whether each node starts one rank per GPU, and their number is not known yet.
    ranks_unknown: bool = False
    #: Number of all ranks if nodes have different numbers of them; else 0.
    ranks: int = 0
    #: Nodes that wait to replace a lost one; not included in ``nnodes``.
    spares: int = 0
    #: Rendezvous of the nodes, if known in advance; else empty and 0.
    master_addr: str = ""
    master_port: int = 0
    #: Commands that first copy the job to nodes that do not share its directories: stages in order, the commands of a
    #: stage at the same time.
    copies: tuple[tuple[NodeCommand, ...], ...] = ()
    #: A command to run once, on one node, before all nodes start.
    once: NodeCommand | None = None
    #: Directory of the copies on each node, relative to the home directory; empty if nodes share the job's directories.
    copied_to: str = ""
    #: Whether the run on other machines ends when its launcher dies.
    is_attached: bool = False
    #: The rank that reads the launcher's stdin; None if no rank can.
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
        """The commands to run before the nodes start, in order."""
        return (*chain.from_iterable(self.copies), *([self.once] if self.once else []))

    @property
    def debug(self) -> tuple[Reason, ...]:
        """The variables that --debug sets."""
        return tuple(reason for reason in self.reasons if reason.is_debug)

    def with_values(self, error: LaunchError) -> LaunchError:
        """Return an error completed with the values of the keys that its fix mentions."""
        values = {reason.why: f"{reason.why} ({reason.value})" for reason in self.reasons if reason.value}
        fix = error.fix and re.sub(r"\b(scheduler|resources)\.\w+", lambda key: values.get(key[0], key[0]), error.fix)
        return LaunchError(error.what, why=error.why, fix=fix, see=error.see)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON, ``world_size`` included."""
        return {**asdict(self), "world_size": self.world_size}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        """Read the result of :meth:`to_json`; raise a KeyError or TypeError if it is invalid."""
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
