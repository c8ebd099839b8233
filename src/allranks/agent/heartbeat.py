"""Heartbeat, resource usage and log of an agent. On a full disk they are lost, and the agent continues."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks import contract
from allranks.agent.stacks import StackRequests
from allranks.record.logindex import LogIndexWriter
from allranks.record.usage import History
from allranks.system.processes import process_ids, queued_seconds, stat_fields, text_of
from allranks.system.traffic import Rates, disk_bytes, network_bytes, packets_wait

if TYPE_CHECKING:
    from allranks.system.gpus import Gpus

_HEARTBEAT_SECONDS = contract.scaled_wait(5.0)
_USAGE_SECONDS = 2.0
#: Samples of the network's send queue that count: half a minute, 50 ms apart.
_LOOKS = 600
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Field indices in /proc/<pid>/stat, counted from the state (man 5 proc).
_STATE, _PARENT, _GROUP, _USER, _SYSTEM, _RESIDENT = 0, 1, 2, 11, 12, 21
#: Name of the worker processes of torch's data loaders, since torch 2.6.
_WORKER = "pt_data_worker"


class Heartbeat:
    """Updates a file in the node's directory every few seconds, and drives log index, usage and requests for stacks.

    ``is_alone``: whether this is the job's only node, so that no link between nodes can be slow.
    """

    def __init__(self, folder: Path, mode: int, *, is_alone: bool = False) -> None:
        self.index = LogIndexWriter(folder, mode)  # Of the logs of the node's ranks.
        #: Returns when a rank last advanced, in seconds since 1970; None if unknown.
        self.advanced: Callable[[], float | None] = lambda: None
        self._usage = Usage(folder / contract.USAGE, mode, is_alone=is_alone)
        self._stacks = StackRequests(folder, mode)
        self._descriptor = os.open(folder / contract.HEARTBEAT, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        self._next = 0.0
        self._beat()

    def tick(self, find: Callable[[], Collection[int]]) -> None:
        """Record which logs have grown and, when due, heartbeat and usage; answer requests for stacks.

        ``find`` returns the process groups of the ranks.
        """
        self.index.tick()
        self._beat()
        self._usage.tick(find, self.advanced)
        self._stacks.tick(find)

    def _beat(self) -> None:
        if (now := time.time()) >= self._next:
            self._next = now + _HEARTBEAT_SECONDS
            try:
                # Fixed width and in place: readers see a complete beat, and a full disk does not matter.
                os.pwrite(self._descriptor, f"{now:017.6f}\n".encode(), 0)
            except OSError:
                pass  # The disk is full or gone; the next beat may work.


class Usage:
    """Records the resource usage of the ranks every two seconds, in a file that ``allranks top`` reads.

    CPU, memory and disk are summed over the ranks' process groups (/proc); GPUs come from NVIDIA's management library;
    network traffic is that of the node. Disk and network are in bytes per second.
    """

    def __init__(self, path: Path, mode: int, *, is_alone: bool = False) -> None:
        self._path, self._mode, self._is_alone = path, mode, is_alone
        self._next = 0.0
        self._gpus: Gpus | None = None
        self._totals: dict[str, float] = {}
        self._own, self._network = Rates(), Rates()
        self._history = History(path.with_name(contract.USAGE_HISTORY), mode)
        self._queued = deque[bool](maxlen=_LOOKS)
        self._thread: threading.Thread | None = None

    def tick(self, find: Callable[[], Collection[int]], advanced: Callable[[], float | None]) -> None:
        """Sample, when due, the process groups whose ids ``find`` returns."""
        now = time.monotonic()
        if not self._is_alone:
            self._queued.append(packets_wait())
        if now < self._next or (self._thread and self._thread.is_alive()) or not (groups := find()):
            return
        self._next = now + _USAGE_SECONDS
        memory, counters, workers = _used(groups)
        if not memory:
            return  # The ranks have just exited: keep the last sample.
        rates = self._own.of(counters, now)
        for rank, found in workers.items():
            found |= {name: rates.pop(f"{name} {rank}", None) for name in ("cpus", "queued")}
        sample: dict[str, Any] = {
            "host": socket.gethostname(),
            "time": time.time(),
            "memory": memory,
            "cpus": 0.0,
            "net_queued": round(sum(self._queued) / len(self._queued), 3) if self._queued else None,
            "workers": workers,
            **rates,
        }
        sample["advanced"] = advanced()
        # In a thread: the GPU driver may take seconds, or hang, and must not block the agent.
        self._thread = threading.Thread(target=self._write, args=(sample,), name="allranks-usage", daemon=True)
        self._thread.start()

    def _write(self, sample: dict[str, Any]) -> None:
        from allranks.system import cgroups  # Not needed to write the log.
        from allranks.system.gpus import Gpus

        self._gpus = self._gpus or Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._totals = self._totals or {
            "cpus_total": cgroups.usable_cpus(),
            "memory_total": min(os.sysconf("SC_PHYS_PAGES") * _PAGE, cgroups.memory() or math.inf),
        }
        sample |= self._totals | self._network.of(network_bytes())
        sample["gpus"] = self._gpus.sample()
        temporary = self._path.with_name(f".{self._path.name}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._mode), "w") as stream:
                stream.write(json.dumps(sample))
            temporary.replace(self._path)
            self._history.add(sample)
        except OSError:
            pass  # The disk is full or gone; the next sample may be written.


def _used(groups: Collection[int]) -> tuple[int, dict[str, float], dict[int, dict[str, Any]]]:
    """Sum the usage of the ranks' process groups.

    Returns:
        Memory in bytes; CPU seconds and disk bytes so far; the data-loader workers of each rank, by its process id: how
        many there are, and how many wait for the disk.
    """
    ticks = pages = read = written = 0
    workers = dict[int, dict[str, Any]]()
    counters = dict[str, float]()
    for pid in process_ids():
        fields = stat_fields(pid)
        if fields and int(fields[_GROUP]) in groups:
            mine, parent = int(fields[_USER]) + int(fields[_SYSTEM]), int(fields[_PARENT])
            ticks += mine
            if parent in groups and text_of(Path(f"/proc/{pid}/comm")) == _WORKER:
                of_rank = workers.setdefault(parent, {"count": 0, "blocked": 0})
                of_rank["count"] += 1
                of_rank["blocked"] += fields[_STATE] == "D"
                for name, seconds in (("cpus", mine / _TICKS), ("queued", queued_seconds(pid))):
                    counters[f"{name} {parent}"] = counters.get(f"{name} {parent}", 0.0) + seconds
            pages += int(fields[_RESIDENT])
            of_disk = disk_bytes(pid)
            read, written = read + of_disk[0], written + of_disk[1]
    counters |= {"cpus": ticks / _TICKS, "disk_read": read, "disk_write": written}
    return pages * _PAGE, counters, workers


def complain(text: str | None = None) -> None:
    """Append ``text``, or the traceback of the exception being handled, to the agent's log if possible."""
    text = traceback.format_exc() if text is None else text + "\n"
    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass  # The disk is full.
