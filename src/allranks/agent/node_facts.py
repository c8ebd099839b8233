"""Facts about a rank's failure that only its node has: kernel log, control group, disks, network links and GPUs.

Each fact is a line that the rules of :mod:`allranks.diagnosis` read like a log line. Counters are compared with their
values at the start of the ranks and reported only if they changed, since other jobs may use the node too.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.system import cgroups
from allranks.system.processes import text_of, variable_of

#: Limit for collecting facts: a dead file server or GPU may never answer.
_SECONDS = 2.0
#: A command is killed this long before the limit, so that the agent leaves no process behind.
_TO_END = 0.2
#: Kernel messages that can explain the end of a process, and how many characters of each are recorded.
_RELEVANT = re.compile(
    r"Xid|NVRM: GPU|fallen off the bus|[Oo]ut of memory: |Memory cgroup out of memory|segfault at|traps: .* trap"
    r"|general protection|Hardware Error|EDAC .* UE|AER: .*(?:[Ff]atal|Uncorrect)|I/O error|server \S+ not responding"
    r"|blocked for more than|remounting filesystem read-only"
)
_MOST_LINES, _LONGEST, _KERNEL_BYTES = 20, 300, 1 << 20
#: An out-of-memory kill, and a crash, with the process id: it may belong to another job.
_KILLED = re.compile(r"Killed process (\d+)")
_CRASHED = re.compile(r"\[(\d+)\]:? (?:segfault at|general protection|trap )")
#: A file system with less free space (bytes) is full: a checkpoint or a worker's batch fails before the last byte.
_FULL = 1 << 20
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_GPUS = "index,pci.bus_id,ecc.errors.uncorrected.volatile.total"
_PROCESSES = "gpu_bus_id,pid,used_memory"


class NodeFacts:
    """The node's counters when its ranks started, and what has changed when one fails."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._kernel = _open_kernel_log()
        self._kills = cgroups.oom_kills()
        self._links = dict(_links())
        self._thread: threading.Thread | None = None
        self._quick, self._deadline = threading.Event(), 0.0
        self._lines: list[str] = []
        self._gpus: list[str] = []

    def close(self) -> None:
        """Close the kernel's log."""
        if self._kernel is not None:
            os.close(self._kernel)
            self._kernel = None

    def collect(self, pids: Collection[int], *, was_killed: bool) -> list[str]:
        """Return the facts that need no GPU driver, within 2 s; ``was_killed``: a rank of ``pids`` died of SIGKILL."""
        self._deadline = time.monotonic() + _SECONDS
        # In a thread: a hanging query must not keep the agent from ending the other ranks.
        self._thread = threading.Thread(
            target=self._collect, args=(pids, was_killed), name="allranks-facts", daemon=True
        )
        self._thread.start()
        self._quick.wait(_SECONDS)
        return [*self._lines]

    def of_gpus(self) -> list[str]:
        """Return the facts about GPUs, within 2 s of the call of :meth:`collect`; empty if the driver is late."""
        if self._thread is None:
            return []
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        self._thread = None
        return [*self._gpus]

    def _collect(self, pids: Collection[int], was_killed: bool) -> None:
        findings: tuple[Callable[[], Iterable[str]], ...] = (
            lambda: self._memory(pids, was_killed),
            self._changed_links,
            lambda: _full(self._run),
        )
        for find in findings:
            with suppress(OSError):
                self._lines += find()
        self._quick.set()
        self._gpus += _of_gpus(str(self._run), self._deadline - _TO_END)

    def _memory(self, pids: Collection[int], was_killed: bool) -> Iterator[str]:
        now = cgroups.oom_kills()
        grown = now - self._kills if now is not None and self._kills is not None else None
        if grown:
            limit, most = cgroups.memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            room = f"; its limit is {limit >> 20} MiB" if limit and limit < most else ""
            yield f"control group: oom_kill grew by {grown} since the ranks started{room}"
        elif grown == 0 and was_killed:
            yield "control group: SIGKILL, and oom_kill did not grow since the ranks started"
        for line in _new_lines(self._kernel) if self._kernel is not None else ():
            killed, crashed = _KILLED.search(line), _CRASHED.search(line)
            if killed:
                is_ours = bool(grown) or (grown is None and int(killed[1]) in pids)
            else:
                is_ours = not crashed or int(crashed[1]) in pids
            if is_ours:
                yield f"kernel: {line}"

    def _changed_links(self) -> Iterator[str]:
        for name, now in _links():
            if (grown := now - self._links.get(name, now)) > 0:
                yield f"link {name} went down {grown} times since the ranks started"


def _open_kernel_log() -> int | None:
    """Open the kernel's log at its end; None if it may not be read."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor


def _new_lines(descriptor: int) -> list[str]:
    """Return the newest relevant kernel messages since the last read."""
    found, size = [], 0
    while size < _KERNEL_BYTES:
        try:
            record = os.read(descriptor, 8192)  # One message: priority,number,microseconds,flags;text.
        except BrokenPipeError:
            continue  # Messages were overwritten: the next read returns the oldest one left.
        except OSError:
            break
        size += len(record)
        text = record.partition(b";")[2].partition(b"\n")[0].decode(errors="replace")
        if _RELEVANT.search(text):
            found.append(text[:_LONGEST])
    return found[-_MOST_LINES:]


def _links() -> Iterator[tuple[str, int]]:
    """Yield each physical network interface and InfiniBand port, with how often its link went down."""
    counters = [(path.parent.name, path.with_name("carrier_down_count")) for path in _NET.glob("*/device")]
    counters += [(path.parts[-5], path) for path in _INFINIBAND.glob("*/ports/*/counters/link_downed")]
    for name, path in counters:
        if (text := text_of(path).strip()).isdecimal():
            yield name, int(text)


def _full(run: Path) -> Iterator[str]:
    """Yield the full file systems among those that trainings write to."""
    for folder in dict.fromkeys((str(run), os.getcwd(), os.environ.get("TMPDIR", "/tmp"), "/dev/shm")):  # noqa: PTH109
        with suppress(OSError):
            here = os.statvfs(folder)
            free = here.f_bavail * here.f_frsize
            if here.f_blocks and free < _FULL:
                yield f"warning: {folder} is full: {free} of {here.f_blocks * here.f_frsize} bytes are free"
            elif here.f_files and not here.f_favail:
                yield f"warning: {folder} is full: no inode of {here.f_files} is free"


def _of_gpus(run: str, deadline: float) -> Iterator[str]:
    """Yield the GPUs that have failed, and other processes that use them."""
    problem, cards = _query("gpu", _GPUS, deadline)
    if problem:
        yield f"nvidia-smi: {problem}"
    numbers = {card[1]: card[0] for card in cards if len(card) == 3}
    for index, _, errors in (card for card in cards if len(card) == 3):
        if errors.isdecimal() and int(errors):
            yield f"GPU {index}: {errors} memory errors that ECC could not correct, since its driver was loaded"
    for bus, pid, used in (words for words in _query("compute-apps", _PROCESSES, deadline)[1] if len(words) == 3):
        if pid.isdecimal() and variable_of(int(pid), contract.RUN_DIR) != run:
            yield f"GPU {numbers.get(bus, bus)}: process {pid}{_owner(pid)}, not of this run, holds {used}"


def _query(what: str, fields: str, deadline: float) -> tuple[str, list[list[str]]]:
    """Query nvidia-smi; return its error (empty if none, or if it is not installed) and the rows of its output."""
    import subprocess  # An agent starts sooner without it.

    command = ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader"]
    try:
        left = max(0.0, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "", []
    lines = done.stdout.splitlines()
    if done.returncode:
        return next(iter([*lines, *done.stderr.splitlines()]), "")[:_LONGEST], []
    return "", [[word.strip() for word in line.split(",")] for line in lines]


def _owner(pid: str) -> str:
    import pwd

    process = Path("/proc", pid)
    try:
        user, name = process.stat().st_uid, text_of(process / "comm").strip()
    except OSError:
        return ""  # In a container the id may be the host's.
    with suppress(KeyError):
        return f" ({name} of {pwd.getpwuid(user).pw_name})"
    return f" ({name} of user {user})"
