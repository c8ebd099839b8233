"""What runs have left on the nodes of a cluster: nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster_tools import ClusterError
from pbs_cluster import PbsCluster, StandInPbs

from allranks import contract
from allranks.system.processes import marked


def assert_nothing_lives(pbs: PbsCluster, lab: Any) -> None:
    """Fail if a process of the runs in the directory of ``lab`` continues, or on a stand-in anything on any node."""

    def left() -> dict[int, str]:
        found = {pid: run.name for run in lab.runs() for pid in marked(contract.RUN_DIR, str(run))}
        if isinstance(pbs, StandInPbs):
            alive = [name for name in pbs.nodes if pbs.network.nodes[name].is_alive]
            found |= {pid: words for name in alive for pid, words in pbs.processes(name).items()}
        return found

    with suppress(ClusterError):
        pbs.wait_until("the end of all processes", lambda: not left())
    assert left() == {}


def command_lines_with(text: bytes) -> list[str]:
    """Return the command lines that have this text in them, on this machine and on all nodes that it is."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:
            continue  # It ended while we looked.
        if text in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
