"""Processes of the user's earlier runs that nobody watches any more."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract, processes
from allranks.probe.order import Order
from allranks.probe.reading import command_of, text_of

#: A process with one of these belongs to a run: the folder of one of ours, or the id of one of torchrun's.
_MARKS = (contract.RUN_DIR, "TORCHELASTIC_RUN_ID")
#: A heartbeat comes every 5 seconds.
_SILENCE = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def leftovers(order: Order) -> list[dict[str, Any]]:
    """Return the processes of runs that have lost what started them: their parent is gone, and no agent is there.

    Each has ``pid``, ``run``, ``command``, ``seconds`` since its start, and ``memory`` in bytes.
    """
    ours = set(processes.lineage())
    of_runs = {pid: run for pid in processes.process_ids() if pid not in ours and (run := processes.told(pid, *_MARKS))}
    lost = {pid: run for pid, run in of_runs.items() if _has_lost(pid, of_runs)}
    alive = set()
    for run in {*lost.values()}:
        if _is_alive(run, {pid for pid in of_runs if of_runs[pid] == run}, lost):
            alive.add(run)
    return [_told(pid, run) for pid, run in lost.items() if run not in alive]


def _is_alive(run: str, pids: set[int], lost: Container[int]) -> bool:
    """Return whether a run still goes on: what started a process of it is there, here or on another node.

    A detached agent is itself left to init. Its heartbeat may be late: a slow file server, another clock.
    """
    return any(pid not in lost for pid in pids) or not pids.isdisjoint(_agents(run)) or _is_watched(run, pids)


def _agents(run: str) -> Iterator[int]:
    """Yield the process ids of a run's agents, as they have recorded them."""
    for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.AGENT_EVENTS}"):
        for line in text_of(file).splitlines():
            with suppress(ValueError, KeyError, TypeError):  # A line that was cut off.
                event = json.loads(line)
                if event["kind"] == contract.AGENT_STARTED:
                    yield int(event["pid"])


def _is_watched(run: str, pids: Iterable[int]) -> bool:
    """Tell whether an agent looks after a run here: by its heartbeat or, before the first one, by its command."""
    beats = [file.stat().st_mtime for file in Path(run).glob(f"{contract.ATTEMPTS_DIR}/*/node-*/{contract.HEARTBEAT}")]
    if beats:
        return time.time() - max(beats) < _SILENCE
    return any(f"{run}/{contract.CODE}" in command_of(pid) for pid in pids)


def _has_lost(pid: int, of_runs: dict[int, str]) -> bool:
    """Tell whether the first of a process's ancestors that belongs to the run was left to an init."""
    if _job_of(pid) not in ("", _job_of("self")):
        return False  # A scheduler's job that goes on: Slurm ends what a job leaves.
    parent = processes.parent_of(pid)
    while parent in of_runs:
        pid, parent = parent, processes.parent_of(parent)
    return parent is not None and _takes_in(parent)


def _job_of(pid: int | str) -> str:
    """Return the job of Slurm's in whose control group a process is; empty for none."""
    found = re.search(r"/job_\d+", text_of(Path(f"/proc/{pid}/cgroup")))
    return found[0] if found else ""


def _takes_in(pid: int) -> bool:
    """Tell whether a process is the parent of those that have lost theirs, and of no rank that it has started itself.

    In a container the first process may be torchrun, or any other launcher, and these run in Python. What a user's
    systemd has started, terminals among it, it takes in as well.
    """
    program, *words = command_of(pid)
    name = Path(program).name
    if pid != 1:
        return name == "systemd" and "--user" in words
    return not name.startswith("python") and processes.told(pid, *_MARKS) is None


def _told(pid: int, run: str) -> dict[str, Any]:
    fields = processes.stat_fields(pid)
    began = float(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    memory = int(fields[21]) * _PAGE if fields else 0
    return {"pid": pid, "run": run, "command": " ".join(command_of(pid)[:4]), "seconds": round(age), "memory": memory}
