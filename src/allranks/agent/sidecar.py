"""The sidecar does what a node's agent does beside the ranks, where a scheduler starts the ranks and there is no agent.

``python <run>/code --companion RANK…``, started by the task that becomes one of these ranks, keeps the heartbeat and
the log index of its node, and records what the ranks use. It exits with the last rank; a signal to the whole step does
not end it, since the ranks may be saving.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.agent.heartbeat import Heartbeat
from allranks.agent.stop import SIGNALS, WARNINGS
from allranks.agent.usage import Usage
from allranks.record.logindex import LogIndexWriter
from allranks.system.processes import lineage, marked, started, variable_of

_TICK_SECONDS = 0.05
#: The parent of a process whose own parent is gone.
_INIT = 1
#: Scanning processes costs more than a tick.
_SCAN_SECONDS = 0.5


def main(argv: list[str]) -> NoReturn:
    """Keep the heartbeat, log index and usage of the ranks in ``argv`` until the last of them has ended."""
    step = _Step(argv)
    for number in (*SIGNALS, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    run, attempt, node = (os.environ[name] for name in (contract.RUN_DIR, contract.ATTEMPT, contract.NODE_RANK))
    folder = Path(run, contract.node_dir(int(attempt), int(node)))
    mode = folder.stat().st_mode & 0o040 | 0o600
    os.umask(0o666 & ~mode)
    _leave_streams(folder / contract.AGENT_LOG, mode)
    index = LogIndexWriter(folder, mode)
    index.watch(map(int, argv))
    heart = Heartbeat(folder / contract.HEARTBEAT, index, mode)
    usage = Usage(folder / contract.USAGE, mode)
    heart.tick()
    while step.is_running():
        time.sleep(_TICK_SECONDS)
        heart.tick()
        usage.tick(step.groups)
    index.close()
    sys.exit(0)


class _Step:
    """The scheduler's step that this process is part of, with the ``ranks`` of this node."""

    def __init__(self, ranks: Sequence[str]) -> None:
        self._ranks = frozenset(ranks)
        self._above = {pid: started(pid) for pid in lineage() if pid != os.getpid()}
        self._next = 0.0

    def is_running(self) -> bool:
        """Return whether a rank of this node can be alive: the one that is above this process, or another one."""
        if time.monotonic() < self._next:
            return True
        self._next = time.monotonic() + _SCAN_SECONDS
        if os.getppid() != _INIT and all(started(pid) == began for pid, began in self._above.items()):
            return True
        return bool(self._others())

    def groups(self) -> set[int]:
        """Return the process groups of this node's ranks; the rank that is above this process shares its group."""
        groups = {os.getpgrp()}
        for pid in self._others():
            with suppress(ProcessLookupError):  # It has just ended.
                groups.add(os.getpgid(pid))
        return groups

    def _others(self) -> list[int]:
        """Return the processes of this node's ranks, except those above this one."""
        run = os.environ[contract.RUN_DIR]
        return [pid for pid in marked(contract.RUN_DIR, run) if variable_of(pid, "RANK") in self._ranks]


def _leave_streams(log: Path, mode: int) -> None:
    """Close the step's streams, or the step would not end before this process."""
    nothing = os.open(os.devnull, os.O_RDWR)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    for stream, target in enumerate((nothing, nothing, errors)):
        os.dup2(target, stream)
    os.close(nothing)
    os.close(errors)
