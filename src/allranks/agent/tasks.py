"""The tasks of a batch job whose scheduler starts each by one command, with almost no environment.

The supervisor writes each task's environment to a file, starts ``--task ATTEMPT NODE [LOCAL_RANK]`` on the node, and
reads the exit code from a file of the task, because the starter (such as pbsdsh) may lose it, fail or hang. The task
loads the environment, runs node.sh, forwards signals, and writes the exit code.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

from allranks import contract
from allranks.agent.heartbeat import complain
from allranks.record.events import read_events
from allranks.record.spec import BatchSpec, NodeSpec
from allranks.system import schedulers
from allranks.system.processes import append_to
from allranks.system.schedulers import SchedulerEnvironment

#: The command that runs words on a host of the job.
Command = Callable[[str, Sequence[str]], list[str]]

#: How long to wait for nodes beyond the grace period of their ranks, in seconds. At least 5: an agent may take that
#: long to exit on a slow machine.
_PATIENCE = max(5, contract.full_wait(15))
#: Delay until a file written by another node is visible here, in seconds.
_SEEN_SECONDS = contract.full_wait(5)
#: Time for a starter to exit after its task, in seconds: of the 10 s that PBS gives a job, most are for saving.
_STARTER_ENDS = 2.0
_POLL_SECONDS = 1.0
#: Signals that a task forwards, and the supervisor too if the run was started inside an allocation.
_FORWARDED = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Makes a starter ignore the scheduler's signals, which go to all processes on the first node.
_IGNORING = ("bash", "-c", "trap '' USR1 USR2 INT TERM HUP; exec \"$@\"", "bash")
#: Sends the signal $0 to the tasks of a node, whose directory is $1.
_KILL = ("bash", "-c", 'exec 2>/dev/null; kill -s "$0" $(cat "$1"/*.pid)')
#: Variables that each task keeps, beside those of its scheduler, instead of the first node's.
_TASK_VARIABLES = ("HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
#: Prefixes of variables of an mpiexec that starts one task.
_MPI_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")


@dataclass(eq=False)
class _Task:
    """One task, and what is known of its end."""

    node: int
    local_rank: int | None
    folder: Path
    name: str
    starter: subprocess.Popen[bytes] | None = None
    starter_code: int | None = None
    deadline: float | None = None
    is_lost: bool = False

    def recorded(self) -> int | None:
        """Return the exit code that the task has written, or None. Listing the directory refreshes NFS's cache."""
        try:
            os.listdir(self.folder)  # noqa: PTH208 - no paths are wanted
            return int((self.folder / f"{self.name}{contract.TASK_EXIT}").read_text().split()[0])
        except (OSError, IndexError):
            return None


class Tasks:
    """The tasks of an attempt: one per host or, without agents, one per rank."""

    def __init__(self, spec: BatchSpec, node: NodeSpec, attempt: Path, hosts: Sequence[str], command: Command) -> None:
        self._spec, self._node, self._attempt, self._hosts, self._command = spec, node, attempt, hosts, command
        self._scheduler = schedulers.load(spec.module)
        self._happened: SimpleQueue[_Task | signal.Signals] = SimpleQueue()
        self._open: list[_Task] = []
        for index in range(len(hosts)):
            folder, nproc = attempt / f"node-{index:03d}", node.nproc_per_node
            if spec.is_direct:
                first = index * nproc
                self._open += [_Task(index, local, folder, f"rank-{first + local}") for local in range(nproc)]
            else:
                self._open.append(_Task(index, None, folder, "agent"))
        self._code = 0
        end, warn_before = os.environ.get(contract.END_TIME), spec.warn_before
        #: The next action and its time, unless something happens before.
        self._todo = "warn"
        self._at: float | None = int(end) - warn_before if end and warn_before else None

    def run(self) -> int:
        """Start all tasks and wait for them; if one fails, end the others. Return the first exit code that is not 0."""
        for number in _FORWARDED if self._spec.is_inside else (signal.SIGTERM,):
            signal.signal(number, lambda number, _: self._happened.put(signal.Signals(number)))
        for task in self._open:
            self._start(task)
        while self._open and self._todo != "nothing":
            try:
                until_next = _POLL_SECONDS if self._at is None else max(0.0, min(_POLL_SECONDS, self._at - time.time()))
                happened = self._happened.get(timeout=until_next)
            except Empty:
                happened = None
            if isinstance(happened, signal.Signals):
                self._forward(happened)
            for task in [happened] if isinstance(happened, _Task) else list(self._open):
                code = self._ended(task) if task in self._open else None
                if code is not None:
                    self._open.remove(task)
                    self._note_end(task, code)
            if self._at is not None and time.time() >= self._at:
                self._do_next()
        for left in self._attempt.glob(f"{contract.TASK_ENVIRONMENT}*"):
            left.unlink(missing_ok=True)
        return self._code

    def _start(self, task: _Task) -> None:
        """Start a task on its node, with this process's environment in a file that the task removes."""
        place = [str(task.node), *([] if task.local_rank is None else [str(task.local_rank)])]
        file = self._attempt / f"{contract.TASK_ENVIRONMENT}{'-'.join(place)}"
        own = {*_TASK_VARIABLES, *self._scheduler.of_a_task}
        environ = (name + b"=" + value for name, value in os.environb.items() if os.fsdecode(name) not in own)
        with open(file, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
            stream.write(b"\0".join(environ))
        code = Path(os.environ[contract.RUN_DIR], contract.CODE)
        words = [*contract.PYTHON_ON_NODE, sys.executable, str(code), "--task", str(self._attempt), *place]
        task.starter = self._on(task.node, words, stdout=2)
        threading.Thread(target=self._await_starter, args=(task,), daemon=True).start()

    def _on(self, node: int, words: Sequence[str], stdout: int) -> subprocess.Popen[bytes]:
        command = [*_IGNORING, *self._command(self._hosts[node], words)]
        errors = stdout if stdout == subprocess.DEVNULL else None
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=errors, start_new_session=True)

    def _await_starter(self, task: _Task) -> None:
        assert task.starter
        code = task.starter.wait()
        task.starter_code = 128 - code if code < 0 else code
        self._happened.put(task)

    def _ended(self, task: _Task) -> int | None:
        """Return the exit code of a finished task, else None."""
        code, now = task.recorded(), time.monotonic()
        if task.starter_code is None:
            if code is None:
                return None
            task.deadline = task.deadline or now + _STARTER_ENDS
            if now < task.deadline:
                return None
            if self._scheduler.starts_tasks_alone:
                return code  # Killing its starter would kill the job.
            # The scheduler missed the end of this task: its daemon on the node died or restarted.
            (task.folder / contract.CUT_OFF).write_text(f"{self._scheduler.name} on {self._hosts[task.node]}\n")
            assert task.starter
            with suppress(ProcessLookupError):
                os.killpg(task.starter.pid, signal.SIGKILL)
        if code is not None:
            return code
        if not task.is_lost:
            task.deadline = task.deadline or now + _SEEN_SECONDS
            if now < task.deadline:
                return None
            task.is_lost = True
            complain(f"allranks: {self._hosts[task.node]}: a task was not started, or is lost")
        # Agents detect a lost node themselves, and node 0's agent decides.
        is_agent = not self._spec.is_direct and (task.folder / contract.AGENT_EVENTS).exists()
        return None if is_agent and task.node else task.starter_code or 1

    def _note_end(self, task: _Task, code: int) -> None:
        patience = int(self._node.stop_timeout) + _PATIENCE
        events = task.folder / contract.AGENT_EVENTS
        is_agent = not self._spec.is_direct and events.exists()
        if code and not self._code:
            # Agents tell each other of a failure, and end their ranks.
            self._code, self._todo, self._at = code, "end", time.time() + (patience if is_agent else 0)
        if is_agent and not task.node and any(event.kind == contract.ENDED for event in read_events(events)):
            # The first node's agent exits last: tasks still running after it are lost.
            self._todo, self._at = "leave", time.time() + _PATIENCE

    def _do_next(self) -> None:
        everywhere = range(len(self._hosts))
        if self._todo == "warn":
            self._signal("USR1", everywhere)
            self._at = None
        elif self._todo == "end":
            self._signal("TERM", everywhere)
            left = (int(self._node.stop_timeout) if self._spec.is_direct else 0) + _PATIENCE
            self._todo, self._at = "leave", time.time() + left
        else:
            self._signal("KILL", everywhere)
            self._todo = "nothing"

    def _forward(self, number: signal.Signals) -> None:
        """Handle a signal that the scheduler sent to this process: let the other nodes end as well."""
        if not self._spec.is_inside:
            # Tasks of other nodes poll for this file; agents inform each other.
            (self._attempt / contract.TERMINATED).write_text(os.environ.get(contract.END_TIME, "") + "\n")
            if self._scheduler.starts_tasks_alone:
                self._signal("TERM", [0])
            return
        # For other signals the first node's agent informs the others.
        is_for_all = self._spec.is_direct or number == signal.SIGUSR1
        self._signal(number.name.removeprefix("SIG"), range(len(self._hosts)) if is_for_all else [0])

    def _signal(self, name: str, nodes: Sequence[int]) -> None:
        for node in nodes:
            folder = self._attempt / f"node-{node:03d}"
            if self._scheduler.starts_tasks_alone and node:
                with suppress(OSError), (folder / contract.TASK_SIGNALS).open("a") as file:
                    file.write(f"{name}\n")
            else:
                self._on(node, [*_KILL, name, str(folder)], stdout=subprocess.DEVNULL)


# --- on the node of a task ---


def main(argv: Sequence[str]) -> NoReturn:
    """Run a task, and exit with its exit code."""
    attempt, number, *local = argv
    attempt_dir, own = Path(attempt), dict(os.environ)
    os.environ.pop("OMP_NUM_THREADS", None)  # A scheduler may set it for one rank with all CPUs of the node.
    file = attempt_dir / f"{contract.TASK_ENVIRONMENT}{'-'.join([number, *local])}"
    pairs = (pair.partition(b"=") for pair in file.read_bytes().split(b"\0"))
    os.environb.update({name: value for name, _, value in pairs})
    file.unlink()
    for name in [name for name in os.environ if name.startswith(_MPI_PREFIXES)]:
        del os.environ[name]
    run = Path(os.environ[contract.RUN_DIR])
    node = NodeSpec.from_json((run / contract.NODE_SPEC).read_text(encoding="utf-8"))
    spec = BatchSpec.from_json((run / contract.BATCH_SPEC).read_text(encoding="utf-8"))
    scheduler = schedulers.load(spec.module)
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
    """Run node.sh as the task ``name``; write its exit code to a file, and return it.

    ``is_reported``: whether an agent or the scheduler reports the end of the job; else the task polls for it.
    """
    umask = os.umask(0o777 & ~node.folder_mode)
    folder.mkdir(parents=True, exist_ok=True)
    append_to(folder / contract.AGENT_LOG, 0o666, 1, 2)
    script = str(Path(os.environ[contract.RUN_DIR], contract.NODE_SCRIPT))
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)  # Starters ignore them.
    task = subprocess.Popen(["bash", script], stdin=subprocess.DEVNULL, umask=umask)
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: task.send_signal(number))
    (folder / f"{name}.pid").write_text(f"{task.pid}\n")
    # Only then: polling loads a file system that many nodes share.
    if scheduler.starts_tasks_alone or not is_reported:
        threading.Thread(target=_poll, args=(folder, task, is_reported), daemon=True).start()
    code = task.wait()
    code = 128 - code if code < 0 else code
    (folder / f"{name}.pid").unlink(missing_ok=True)
    (folder / f"{name}{contract.TASK_EXIT}").write_text(f"{code} {socket.gethostname()}\n")
    return code


def _poll(folder: Path, task: subprocess.Popen[bytes], is_reported: bool) -> None:
    """Forward the signals that the first node has written to files, and end the task when the job ends.

    Listing a directory refreshes NFS's cache, which shows files of other nodes.
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
