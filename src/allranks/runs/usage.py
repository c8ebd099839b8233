"""What the nodes of a run use, as their agents have sampled it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from allranks import contract
from allranks.runs.record import Run


def node_usage(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the newest sample of each node, by its number: busy CPUs, bytes of memory, and its GPUs.

    ``cpus_total`` and ``memory_total`` are what the job may use there; None if the agent is of an earlier version.
    """
    for path in sorted(run.attempt_folder.glob(f"node-*/{contract.USAGE}")):
        try:
            found = json.loads(path.read_text())
            gpus = [{key: gpu[key] for key in ("busy", "memory", "total")} for gpu in found["gpus"]]
            named = {key: found[key] for key in ("host", "time", "cpus", "memory")}
            named |= {key: found.get(key) for key in ("cpus_total", "memory_total")}
            yield {"node": int(path.parent.name.removeprefix("node-")), **named, "gpus": gpus}
        except (OSError, ValueError, TypeError, KeyError):
            continue  # Being written, or of another version.
