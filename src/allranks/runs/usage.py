"""What the nodes of a run use, as their agents have sampled it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from allranks import contract
from allranks.job.units import format_size
from allranks.runs.record import Run

#: Bytes a second over the network of a node, and of its ranks from disks and to them.
TRAFFIC = ("net_in", "net_out", "disk_read", "disk_write")


def node_usage(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the newest sample of each node, by its number: busy CPUs, bytes of memory, and its GPUs.

    ``cpus_total`` and ``memory_total`` are what the job may use there; None if the agent is of an earlier version, and
    likewise :data:`TRAFFIC`, which a first sample does not have, and what :meth:`allranks.system.gpus.Gpus.sample`
    returns of clocks and temperature.
    """
    for path in sorted(run.attempt_folder.glob(f"node-*/{contract.USAGE}")):
        try:
            found = json.loads(path.read_text())
            gpus = [_gpu(at, gpu) for at, gpu in enumerate(found["gpus"])]
            named = {key: found[key] for key in ("host", "time", "cpus", "memory")}
            named |= {key: found.get(key) for key in ("cpus_total", "memory_total", *TRAFFIC)}
            yield {"node": int(path.parent.name.removeprefix("node-")), **named, "gpus": gpus}
        except (OSError, ValueError, TypeError, KeyError):
            continue  # Being written, or of another version.


def _gpu(at: int, found: dict[str, Any]) -> dict[str, Any]:
    known = {key: found[key] for key in ("busy", "memory", "total")}
    further = {key: found.get(key) for key in ("temperature", "clock", "max_clock")}
    return {"number": found.get("number", at), **known, **further, "slowed_by": found.get("slowed_by", [])}


def clock(gpu: Mapping[str, Any]) -> str:
    """Write the clock of a GPU and what slows it down: ``1.1 GHz (thermal)``; empty if that is not known."""
    if not gpu.get("clock"):
        return ""
    return format_clock(gpu["clock"]) + (f" ({', '.join(gpu['slowed_by'])})" if gpu["slowed_by"] else "")


def format_clock(mhz: float) -> str:
    """Write a clock with three digits: ``1.75 GHz``."""
    return f"{mhz / 1000:.3g} GHz"


def traffic(node: Mapping[str, Any]) -> str:
    """Write what a node receives and sends, and what its ranks read and write, where that is known."""
    pairs = (("NET", "net_in", "net_out"), ("DISK", "disk_read", "disk_write"))
    known = [each for each in pairs if None not in (node.get(each[1]), node.get(each[2]))]
    return "  ".join(f"{name} ↓ {format_size(node[one])}/s ↑ {format_size(node[two])}/s" for name, one, two in known)
