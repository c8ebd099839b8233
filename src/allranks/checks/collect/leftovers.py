"""Processes of the user's earlier runs that nothing watches any more."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.checks.collect.gather import ProbeRequest
from allranks.system import processes
from allranks.system.processes import command_of, text_of

#: A process with one of these belongs to a run: the directory of one of ours, or the id of one of torchrun's.
_MARKS = (contract.RUN_DIR, "TORCHELASTIC_RUN_ID")
#: A heartbeat comes every 5 seconds.
_SILENCE = 60.0


def leftovers(request: ProbeRequest) -> list[dict[str, Any]]:
    """Return the processes of runs that have lost what started them: their parent is gone, and no agent is there.

    Each has ``pid``, ``run``, ``command``, and ``memory`` in bytes.
    """
    ours = set(processes.lineage())
    others = [pid for pid in processes.process_ids() if pid not in ours]
    of_runs = {pid: run for pid in others if (run := processes.variable_of(pid, *_MARKS))}
    lost = {pid: run for pid, run in of_runs.items() if _has_lost(pid, of_runs)}
    alive = set()
    for run in {*lost.values()}:
        pids = {pid for pid in of_runs if of_runs[pid] == run}
        # A detached agent is itself left to init. Its heartbeat may be late: a slow file server, another clock.
        if not pids <= lost.keys() or not pids.isdisjoint(_agents(run)) or _is_watched(run, pids):
            alive.add(run)
    found = []
    for pid, run in lost.items():
        if run not in alive:
            fields = processes.stat_fields(pid)
            memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0
            found.append({"pid": pid, "run": run, "command": " ".join(command_of(pid)[:4]), "memory": memory})
    return found


def _agents(run: str) -> Iterator[int]:
    """Yield the process ids of a run's agents, as they have recorded them."""
    for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.AGENT_EVENTS}"):
        for line in text_of(file).splitlines():
            with suppress(ValueError, KeyError, TypeError):  # A line that was cut off.
                event = json.loads(line)
                if event["kind"] == contract.AGENT_STARTED:
                    yield int(event["pid"])


def _is_watched(run: str, pids: Iterable[int]) -> bool:
    """Return True if an agent watches a run here: by its heartbeat or, before the first one, by its command."""
    beats = [file.stat().st_mtime for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.HEARTBEAT}")]
    if beats:
        return time.time() - max(beats) < _SILENCE
    return any(f"{run}/{contract.CODE}" in command_of(pid) for pid in pids)


def _has_lost(pid: int, of_runs: dict[int, str]) -> bool:
    """Return True if the first of a process's ancestors that belongs to the run was left to an init."""
    if _job_of(pid) not in ("", _job_of("self")):
        return False  # A scheduler's job that still runs: Slurm ends what a job leaves.
    parent = processes.parent_of(pid)
    while parent in of_runs:
        pid, parent = parent, processes.parent_of(parent)
    if parent is None:
        return False
    # In a container the first process may be torchrun, or any other launcher, and these run in Python. A user's systemd
    # takes in what it has started, terminals among it.
    program, *words = command_of(parent)
    name = Path(program).name
    if parent != 1:
        return name == "systemd" and "--user" in words
    return not name.startswith("python") and processes.variable_of(parent, *_MARKS) is None


def _job_of(pid: int | str) -> str:
    """Return the Slurm job in whose control group a process is; empty for none."""
    found = re.search(r"/job_\d+", text_of(Path(f"/proc/{pid}/cgroup")))
    return found[0] if found else ""
