"""Processes of the user's earlier runs that nobody watches any more."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from allranks import contract, processes
from allranks.probe.order import Order

#: A process with one of these belongs to a run: of ours, or of torchrun's.
_MARKS = (contract.RUN_DIR, "TORCHELASTIC_RUN_ID")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def leftovers(order: Order) -> list[dict[str, Any]]:
    """Return the processes of runs that have lost what started them: their parent is gone, and no agent is there.

    Each has ``pid``, ``run``, ``command``, ``seconds`` since its start, and ``memory`` in bytes.
    """
    ours = set(processes.lineage())
    of_runs = {pid: run for pid in processes.process_ids() if pid not in ours and (run := _run_of(pid))}
    watched = {run for pid, run in of_runs.items() if f"{run}/{contract.CODE_DIR}" in _command(pid)}
    return [_told(pid, run) for pid, run in of_runs.items() if run not in watched and _has_lost(pid, of_runs)]


def _run_of(pid: int) -> str | None:
    """Return the run that a process of ours belongs to: its folder, or its id of torchrun's."""
    return next((value for name in _MARKS if (value := processes.told(pid, name))), None)


def _has_lost(pid: int, of_runs: dict[int, str]) -> bool:
    """Tell whether the first of a process's ancestors that belongs to the run was left to init."""
    parent = processes.parent_of(pid)
    while parent in of_runs:
        pid, parent = parent, processes.parent_of(parent)
    return parent == 1


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []  # It ended while we looked.


def _told(pid: int, run: str) -> dict[str, Any]:
    fields = processes.stat_fields(pid)
    began = float(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    memory = int(fields[21]) * _PAGE if fields else 0
    return {"pid": pid, "run": run, "command": " ".join(_command(pid)[:4]), "seconds": round(age), "memory": memory}
