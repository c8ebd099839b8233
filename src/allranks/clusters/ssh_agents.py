"""The agents of a run on machines that are reached over SSH: which they are, and how they are told something."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.clusters.ssh_copy import place_of
from allranks.runs.status import Handle

if TYPE_CHECKING:
    from allranks.clusters.commands import Answer
    from allranks.clusters.ssh_reach import Reach
    from allranks.plan.plan import NodeCommand, Plan
    from allranks.runs.record import Run

#: What a machine may take beyond the ranks' own time to end a run, and to answer.
_END_SECONDS = 60.0
#: What a machine tells of its agent, after whatever else a login there may print.
_TOLD = re.compile(r"^(\d+) (\d+)$", re.MULTILINE)


def handle_on_record(run: Run) -> Handle:
    """Return the handle on record or, where a launcher ended before it could write one, what the plan says."""
    if run.record.handle.extra.get("nodes"):
        return run.record.handle
    with contextlib.suppress(OSError, ValueError, KeyError):
        plan = json.loads((run.folder / contract.PLAN_FILE).read_text(encoding="utf-8"))
        nodes = [{"node": node["node"], "host": node["host"], "pid": 0, "started": 0} for node in plan["commands"]]
        told = {name: plan[name] for name in ("copied_to", "workdir")}
        return Handle(host=run.record.host, extra={"nodes": nodes, "began": run.record.created, **told})
    return run.record.handle


def handle_of(plan: Plan, nodes: Sequence[Mapping[str, Any]]) -> Handle:
    """Return what identifies a run that begins now on these nodes."""
    told = {"copied_to": plan.copied_to, "workdir": plan.workdir}
    return Handle(host=socket.gethostname(), extra={"nodes": [*nodes], "began": time.time(), **told})


def on_nodes(handle: Handle, folder: Path) -> str:
    """Return where a run's folder is on its machines."""
    copied_to = handle.extra.get("copied_to")
    return place_of(copied_to, folder) if copied_to else str(folder)


def agent_told_by(node: NodeCommand, answer: Answer) -> dict[str, Any]:
    """Return what identifies the agent that a machine told of; 0 where it has told nothing."""
    told = _TOLD.search(answer.out)
    pid, started = (int(told[1]), int(told[2])) if told else (0, 0)
    return {"node": node.node, "host": node.host, "pid": pid, "started": started}


def tell(reach: Reach, handle: Handle, folder: Path, what: str, patience: float = 0.0) -> dict[str, str]:
    """Tell all agents of a run something; return the hosts that cannot be reached, and what ssh says."""
    nodes = handle.extra.get("nodes", ())
    answers = reach.ask(nodes, on_nodes(handle, folder), what, patience + _END_SECONDS)
    pairs = zip(nodes, answers, strict=True)
    return {node["host"]: answer.last_words for node, answer in pairs if answer.unreached}
