"""A task on a node of a batch job whose scheduler hands over no environment: ``--task ATTEMPT NODE [LOCAL_RANK]``.

It takes the environment that the supervisor has left, runs node.sh, passes signals on, and writes the exit code down.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from allranks import contract
from allranks.contract import BatchSpec, NodeSpec
from allranks.system import schedulers
from allranks.system.schedulers import SchedulerEnvironment

#: Of an mpiexec that starts one task.
_OF_MPI = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")
_POLL_SECONDS = 1.0
_PASSED_ON = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> NoReturn:
    """Run a task to its end; ends with its exit code."""
    attempt, number, *local = argv
    attempt_dir, own = Path(attempt), dict(os.environ)
    os.environ.pop("OMP_NUM_THREADS", None)  # A scheduler may set it for one rank that has all CPUs of its node.
    file = attempt_dir / f"{contract.TASK_ENVIRONMENT}{'-'.join([number, *local])}"
    pairs = (pair.partition(b"=") for pair in file.read_bytes().split(b"\0"))
    os.environb.update({name: value for name, _, value in pairs})
    file.unlink()
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]
    run = Path(os.environ[contract.RUN_DIR])
    node = NodeSpec.from_json((run / contract.NODE_ORDERS).read_text(encoding="utf-8"))
    orders = BatchSpec.from_json((run / contract.BATCH_ORDERS).read_text(encoding="utf-8"))
    scheduler = schedulers.load(orders.module)
    if cpus := next((place[name] for place in (own, os.environ) for name in scheduler.cpus if place.get(name)), None):
        os.environ[contract.NODE_CPUS] = cpus
    os.environ[contract.NODE_RANK] = number
    name = "agent"
    if local:
        os.environ["LOCAL_RANK"] = local[0]
        name = f"rank-{int(number) * node.nproc_per_node + int(local[0])}"
    folder = attempt_dir / f"node-{int(number):03d}"
    sys.exit(_run(folder, name, node, scheduler, is_reported=not local or number == "0"))


def _run(folder: Path, name: str, node: NodeSpec, scheduler: SchedulerEnvironment, *, is_reported: bool) -> int:
    """Run node.sh as the task ``name``; return its exit code, which is also in a file.

    ``is_reported``: an agent, or the scheduler, reports the end of the job; else the task has to poll for it.
    """
    umask = os.umask(0o777 & ~(0o750 if node.file_mode & 0o040 else 0o700))
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / contract.AGENT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    script = str(Path(os.environ[contract.RUN_DIR], contract.NODE_SCRIPT))
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)  # What starts tasks ignores them.
    task = subprocess.Popen(["bash", script], stdin=subprocess.DEVNULL, umask=umask)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: task.send_signal(number))
    (folder / f"{name}.pid").write_text(f"{task.pid}\n")
    # Otherwise not, because many nodes share these directories.
    if scheduler.starts_tasks_alone or not is_reported:
        threading.Thread(target=_poll, args=(folder, task, is_reported), daemon=True).start()
    code = task.wait()
    code = 128 - code if code < 0 else code
    (folder / f"{name}.pid").unlink(missing_ok=True)
    (folder / f"{name}{contract.TASK_EXIT}").write_text(f"{code} {socket.gethostname()}\n")
    return code


def _poll(folder: Path, task: subprocess.Popen[bytes], is_reported: bool) -> None:
    """Send the task the signals that the first node has left for it, and end it when the job is ended.

    A listing shows what another node has written.
    """
    sent = 0
    while task.poll() is None:
        if not is_reported and contract.TERMINATED in os.listdir(folder.parent):  # noqa: PTH208 - no paths are wanted
            task.terminate()
            return
        if contract.TASK_SIGNALS in os.listdir(folder):  # noqa: PTH208 - no paths are wanted
            names = (folder / contract.TASK_SIGNALS).read_text().split()
            for name in names[sent:]:
                task.send_signal(signal.Signals[f"SIG{name}"])
            sent = len(names)
        time.sleep(_POLL_SECONDS)
