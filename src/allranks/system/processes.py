"""Processes of this machine: found by what they were started with, inspected and signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

#: linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: States of /proc/<pid>/stat (man 5 proc).
_STUCK = {"T": "stopped", "t": "traced", "D": "held"}
#: More than a line of /proc/<pid>/stat has: a name of 64 bytes at most, and some 50 numbers.
_STAT_BYTES = 4096
#: Those of gloo's process groups, as torch names them since 2.6 and the kernel shows them.
_GLOO_THREADS = "pt_gloo_runloop"


def marked(name: str, value: str) -> list[int]:
    """Return the processes that were started with a variable of that value, but for us and our ancestors."""
    needle, ours = f"\0{name}={value}\0".encode(errors="surrogateescape"), set(lineage())
    return [pid for pid in process_ids() if pid not in ours and needle in b"\0" + _environment(pid)]


def variable_of(pid: int, *names: str) -> str | None:
    """Return the value of the first of these variables that a process was started with; None: it has none of them."""
    environment = b"\0" + _environment(pid)
    for name in names:
        _, found, rest = environment.partition(f"\0{name}=".encode())
        if found:
            return rest.partition(b"\0")[0].decode(errors="surrogateescape")
    return None


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process; it may be gone, or another user's by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; it may be empty, or another user's by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def process_ids() -> Iterator[int]:
    """Yield the ids of this machine's processes; none where there is no /proc."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208 - before each run, of a machine with thousands: pathlib takes longer
    except FileNotFoundError:
        return
    yield from (int(name) for name in names if name.isdecimal())


def rank_ended(rank: int, code: int, host: str | None = None) -> str:
    """Return how a rank ended, on a host if there are several; ``code`` is Python's, negative for a signal."""
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    if code >= 0:
        return f"{name} exited with code {code}"
    try:
        return f"{name} was killed by {signal.Signals(-code).name}"
    except ValueError:  # Most real-time signals have no name.
        return f"{name} was killed by signal {-code}"


def _environment(pid: int) -> bytes:
    """Return what a process was started with; nothing for a dead one, or one of another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def lineage() -> Iterator[int]:
    """Yield this process, its parent, the parent's parent and so on."""
    pid: int | None = os.getpid()
    while pid:
        yield pid
        pid = parent_of(pid)


def catches(pid: int, number: int) -> bool | None:
    """Return whether a process has a handler for a signal, in Python or C; None if the kernel does not report it."""
    return _in_mask(pid, "SigCgt:", number)


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal; False if the kernel does not report it."""
    return bool(_in_mask(pid, "SigIgn:", number))


def _in_mask(pid: int, name: str, number: int) -> bool | None:
    lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith(name)), None)
    return None if mask is None else bool(mask >> (number - 1) & 1)


def stuck_state(pid: int) -> str:
    """Return the state in which a process takes no signal: "stopped", "traced" or "held" by the kernel; else ""."""
    fields = stat_fields(pid)
    return _STUCK.get(fields[0], "") if fields else ""


def started(pid: int) -> float | None:
    """Return the start time of a living process in the kernel's clock ticks (man 5 proc); None for a dead one."""
    fields = stat_fields(pid)
    return float(fields[19]) if fields and fields[0] not in "ZX" else None


def is_in_foreground(pid: int) -> bool:
    """Return whether a process may read its terminal: its group has it, or nothing is its controlling terminal."""
    fields = stat_fields(pid)
    return not fields or fields[5] in ("-1", fields[2])


def text_of(path: Path) -> str:
    """Return what a file of the kernel's says; "" if it cannot be read, as the speed of a card without a cable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Return the kernel's id of this boot of this machine; "" if there is no /proc."""
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


def command_of(pid: int) -> list[str]:
    """Return the words of a process's command; a single empty one for a process that has ended."""
    return text_of(Path(f"/proc/{pid}/cmdline")).rstrip("\0").split("\0")


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None for one that is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on (man 5 proc); none for a process that is gone."""
    try:
        # Not by pathlib: this is read of all processes of a node while it trains, and takes a third of the time so.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, _STAT_BYTES).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError:
        return []  # It ended while we looked.
    # The name in brackets may hold anything, brackets and spaces too: fields count from the last ')'.
    return text.rpartition(")")[2].split()


def queued_seconds(pid: int | str = "self") -> float:
    """Return for how many seconds a process's main thread has waited in the queue for a CPU; 0 if that is unknown.

    The second of three numbers, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def append_to(path: Path, mode: int, *streams: int) -> None:
    """Redirect output streams of this process to the end of a file, which is made with ``mode`` if it is missing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    for stream in streams:
        os.dup2(log, stream)
    os.close(log)


def _prctl(option: int, value: int) -> None:
    import ctypes  # Not for the launcher.

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which forked it, ends (man 2 prctl)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none slips away (man 2 prctl)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_count() -> int:
    """Count the threads of this process, those of C libraries included; 1 if there is no /proc."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return 1


def children() -> list[int]:
    """Return the process ids of this process's children; empty where there is no /proc."""
    me = os.getpid()
    try:
        # Of the main thread, and a fork server has no other. Not every kernel is built with it.
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    except OSError:
        return [pid for pid in process_ids() if parent_of(pid) == me]


def let_gloo_rest(limit: float = 1.0) -> None:
    """Wait until gloo's threads have nothing left to do, for at most ``limit`` seconds; to be called at exit.

    They put a tensor down after they have said that it is reduced, and need the interpreter's lock for it. A thread
    that asks for the lock while the interpreter ends is made to end by Python, inside a destructor, so that C++ aborts
    the process: exit code -6 after a training that went well. Seen with torch 2.13 on a busy machine, of a script
    without a line of ours too, in one of ten.
    """
    until = time.monotonic() + limit
    before = _gloo_threads()
    while before and time.monotonic() < until:
        time.sleep(0.01)  # It gives the lock away: who waited for it runs now, and counts one switch more.
        now = _gloo_threads()
        if now == before and all(states[0].startswith("State:\tS") for states in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """Return the states of gloo's threads and how often each has been switched to, by their ids."""
    threads = {}
    for task in Path("/proc/self/task").glob("*/status"):
        try:
            lines = task.read_text(errors="replace").splitlines()
        except OSError:
            continue  # It ended while we looked.
        if lines[0] == f"Name:\t{_GLOO_THREADS}":
            threads[task.parent.name] = tuple(line for line in lines if line.startswith(("State:", "vol", "nonvol")))
    return threads
