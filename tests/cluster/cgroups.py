"""Control groups for Slurm's nodes: each node sees a part of this machine's as if it were the whole.

Version 1 only, which Slurm wants mounted by controller. Unlike all else of a cluster they outlive a killed owner, as
empty directories; their names tell the owner's process, and whoever makes some next removes those of the dead.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from cluster_tools import wait_until
from nodes import Node

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("freezer", "memory")


def is_v2() -> bool:
    """Return whether this machine has version 2 of control groups."""
    return (ROOT / "cgroup.controllers").exists()


def why_no_cgroups() -> str | None:
    """Say what keeps nodes from having control groups; None where they can."""
    absent = [name for name in CONTROLLERS if not (ROOT / name / "cgroup.procs").exists()]
    return f"no control groups of version 1 here: {', '.join(absent)}" if absent else None


class Cgroups:
    """The control groups of one cluster, named after this process and something that is unique in it."""

    def __init__(self, unique: str) -> None:
        self.name = f"allranks-{os.getpid()}-{unique}"

    def give(self, node: Node) -> None:
        """Let a node see its own part, where it expects the whole."""
        _remove_those_of_the_dead()
        for controller in CONTROLLERS:
            part = ROOT / controller / self.name / node.name
            part.mkdir(parents=True, exist_ok=True)
            node.run(["mount", "--bind", part, ROOT / controller])

    def remove(self) -> None:
        """Remove them; the processes in them are dead or dying."""
        for controller in CONTROLLERS:
            whole = ROOT / controller / self.name
            wait_until(f"{whole} to be empty", partial(_is_removed, whole))


def _is_removed(group: Path) -> bool | None:
    # Only directories can be removed there, and with them goes what looks like files in them.
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            Path(folder).rmdir()
    return not group.exists() or None


def _remove_those_of_the_dead() -> None:
    for controller in CONTROLLERS:
        for group in (ROOT / controller).glob("allranks-*-*"):
            if not Path("/proc", group.name.split("-")[1]).exists():
                _is_removed(group)
