"""Finds, inspects and signals processes of this machine."""

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
#: Longer than any line of /proc/<pid>/stat: a name of at most 64 bytes, and some 50 numbers.
_STAT_BYTES = 4096
#: Name of the threads of gloo's process groups since torch 2.6, as the kernel shows it.
_GLOO_THREADS = "pt_gloo_runloop"


def marked(name: str, value: str) -> list[int]:
    """Return the processes with this environment variable, except this process and its ancestors."""
    needle, ours = f"\0{name}={value}\0".encode(errors="surrogateescape"), set(lineage())
    return [pid for pid in process_ids() if pid not in ours and needle in b"\0" + _environment(pid)]


def variable_of(pid: int, *names: str) -> str | None:
    """Return the first of these variables in a process's initial environment; None if it has none of them."""
    environment = b"\0" + _environment(pid)
    for name in names:
        _, found, rest = environment.partition(f"\0{name}=".encode())
        if found:
            return rest.partition(b"\0")[0].decode(errors="surrogateescape")
    return None


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process; ignore that it is gone, or that its id is another user's by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a process group; ignore that it is empty, or that its id is another user's by now."""
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
    """Return how a rank exited, as text; ``code`` is as in subprocess; ``host`` is given if there are several."""
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    if code >= 0:
        return f"{name} exited with code {code}"
    try:
        return f"{name} was killed by {signal.Signals(-code).name}"
    except ValueError:  # Most real-time signals have no name.
        return f"{name} was killed by signal {-code}"


def _environment(pid: int) -> bytes:
    """Return the initial environment of a process; empty for a dead one, or one of another user."""
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
    """Return the state in which a process handles no signal: "stopped", "traced" or "held" by the kernel; else ""."""
    fields = stat_fields(pid)
    return _STUCK.get(fields[0], "") if fields else ""


def started(pid: int) -> float | None:
    """Return the start time of a living process in the kernel's clock ticks (man 5 proc); None for a dead one."""
    fields = stat_fields(pid)
    return float(fields[19]) if fields and fields[0] not in "ZX" else None


def is_in_foreground(pid: int) -> bool:
    """Return whether a process may read its terminal: it is in the foreground, or has no controlling terminal."""
    fields = stat_fields(pid)
    return not fields or fields[5] in ("-1", fields[2])


def text_of(path: Path) -> str:
    """Return the text of a kernel file; "" if it cannot be read, such as the link speed without a cable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def boot_id() -> str:
    """Return the kernel's id of this boot of this machine; "" if there is no /proc."""
    return text_of(Path("/proc/sys/kernel/random/boot_id"))


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; a single empty word if it has exited."""
    return text_of(Path(f"/proc/{pid}/cmdline")).rstrip("\0").split("\0")


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None for one that is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on (man 5 proc); none for a process that is gone."""
    try:
        # Not with pathlib, which takes three times as long: agents read this for all processes of a node.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, _STAT_BYTES).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError:
        return []  # The process has just exited.
    # The name may contain brackets and spaces: count fields from the last ')'.
    return text.rpartition(")")[2].split()


def queued_seconds(pid: int | str = "self") -> float:
    """Return the seconds that a process's main thread has waited in the run queue for a CPU; 0 if unknown.

    The second of three numbers, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def append_to(path: Path, mode: int, *streams: int) -> None:
    """Redirect output streams of this process to the end of a file, which is created with ``mode`` if missing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    for stream in streams:
        os.dup2(log, stream)
    os.close(log)


def _prctl(option: int, value: int) -> None:
    import ctypes  # Not for the launcher.

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which forked it, exits (man 2 prctl)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants (man 2 prctl)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_count() -> int:
    """Count the threads of this process, including those of C libraries; 1 if there is no /proc."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208
    except OSError:
        return 1


def children() -> list[int]:
    """Return the process ids of this process's children; empty where there is no /proc."""
    me = os.getpid()
    try:
        # Only of the main thread; a fork server has no other. Some kernels are built without this file.
        return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text().split()]
    except OSError:
        return [pid for pid in process_ids() if parent_of(pid) == me]


def let_gloo_rest(limit: float = 1.0) -> None:
    """Wait until gloo's threads are idle, at most ``limit`` seconds; call it at exit.

    They free a tensor after they have reported that it is reduced, and need the GIL for it. Python ends a thread that
    requests the GIL while the interpreter exits, here inside a destructor, so C++ aborts the process: exit code -6
    after a successful training. Seen with torch 2.13 on a busy machine in one of ten runs, also without allranks.
    """
    until = time.monotonic() + limit
    before = _gloo_threads()
    while before and time.monotonic() < until:
        time.sleep(0.01)  # Releases the GIL: a waiting thread runs now, and its count of switches increases.
        now = _gloo_threads()
        if now == before and all(states[0].startswith("State:\tS") for states in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """Return state and number of context switches of each of gloo's threads, by thread id."""
    threads = {}
    for task in Path("/proc/self/task").glob("*/status"):
        try:
            lines = task.read_text(errors="replace").splitlines()
        except OSError:
            continue  # The thread has just exited.
        if lines[0] == f"Name:\t{_GLOO_THREADS}":
            threads[task.parent.name] = tuple(line for line in lines if line.startswith(("State:", "vol", "nonvol")))
    return threads
