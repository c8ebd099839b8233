"""Ranks that a scheduler starts without an agent, and the sidecar process beside the ranks of a node.

``--rank COMMAND…`` at the end of node.sh becomes a rank. The task that becomes the first rank of a node starts
``--companion RANK…``, the sidecar. It keeps the heartbeat and the log index of the node and records resource usage, as
an agent does. It exits with the last rank; it ignores signals to the whole step, since the ranks may be saving.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.agent import network
from allranks.agent.batch_job import this_job
from allranks.agent.heartbeat import Heartbeat, complain
from allranks.agent.stop import SIGNALS, WARNINGS
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system.processes import append_to, lineage, marked, started, variable_of

_TICK_SECONDS = 0.05
#: Parent process id of an orphan.
_INIT = 1
#: Interval between scans of all processes, which cost more than a tick.
_SCAN_SECONDS = 0.5


def main(argv: list[str]) -> NoReturn:
    """Set the rank's variables, its network and thread settings and its logs; then execute its command."""
    environ = os.environ
    run = Path(environ[contract.RUN_DIR])
    node = NodeSpec.from_json((run / contract.NODE_SPEC).read_text(encoding="utf-8"))
    spec = BatchSpec.from_json((run / contract.BATCH_SPEC).read_text(encoding="utf-8"))
    place = this_job(spec, node).place()
    environ[contract.NODE_RANK] = str(place.node)
    folder = run / contract.node_dir(int(environ[contract.ATTEMPT]), place.node)
    folder.mkdir(node.folder_mode, parents=True, exist_ok=True)
    if place.local_rank == 0:
        ranks = [str(rank) for rank in place.ranks]
        subprocess.Popen([sys.executable, str(run / contract.CODE), "--companion", *ranks])
    environ.update(
        {
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "GROUP_RANK": str(place.node),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(len(place.ranks)),
            "GROUP_WORLD_SIZE": environ[contract.NODE_COUNT],
            "MASTER_ADDR": environ[contract.RDZV_HOST],
            "MASTER_PORT": environ[contract.RDZV_PORT],
            contract.RUN_ID: node.run_id,
        }
    )
    settings = network.decide(environ["MASTER_ADDR"], int(environ[contract.NODE_COUNT]), len(place.ranks), environ)
    network.apply(settings, environ)
    if place.local_rank == 0:
        for setting in settings:
            complain(f"allranks: node {place.node}: {setting}")
    environ.setdefault("PYTHONUNBUFFERED", "1")
    for stream, name in ((1, "out"), (2, "err")):
        append_to(folder / contract.rank_log(place.rank, name), 0o666, stream)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        complain(f"{argv[0]}: {error.strerror}")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def sidecar(argv: list[str]) -> NoReturn:
    """Keep the heartbeat, log index and usage of the ranks in ``argv`` until the last one exits."""
    step = _Step(argv)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # A scheduler may show each rank only its own GPU; usage covers all.
    for number in (*SIGNALS, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    run, attempt, node = (os.environ[name] for name in (contract.RUN_DIR, contract.ATTEMPT, contract.NODE_RANK))
    folder = Path(run, contract.node_dir(int(attempt), int(node)))
    mode = folder.stat().st_mode & 0o040 | 0o600
    os.umask(0o666 & ~mode)
    # The step does not end while a process holds its streams.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nothing, stream)
    os.close(nothing)
    append_to(folder / contract.AGENT_LOG, mode, 2)
    heart = Heartbeat(folder, mode)
    heart.index.watch(map(int, argv))
    while step.is_running():
        time.sleep(_TICK_SECONDS)
        heart.tick(step.groups)
    heart.index.close()
    sys.exit(0)


class _Step:
    """The scheduler's step that this process is part of, with the ``ranks`` of this node."""

    def __init__(self, ranks: Sequence[str]) -> None:
        self._ranks = frozenset(ranks)
        self._above = {pid: started(pid) for pid in lineage() if pid != os.getpid()}
        self._next = 0.0

    def is_running(self) -> bool:
        """Return whether a rank of this node may be alive: the parent of this process, or another one."""
        if time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + _SCAN_SECONDS
        if os.getppid() != _INIT and all(started(pid) == began for pid, began in self._above.items()):
            return True
        return bool(self._others())

    def groups(self) -> set[int]:
        """Return the process groups of this node's ranks; this process is in the group of its parent rank."""
        groups = {os.getpgrp()}
        for pid in self._others():
            with suppress(ProcessLookupError):  # It has just ended.
                groups.add(os.getpgid(pid))
        return groups

    def _others(self) -> list[int]:
        """Return the processes of this node's ranks, except the ancestors of this one."""
        run = os.environ[contract.RUN_DIR]
        return [pid for pid in marked(contract.RUN_DIR, run) if variable_of(pid, "RANK") in self._ranks]
