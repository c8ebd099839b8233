"""From fork to script: what a new rank does before it runs the user's code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from allranks.agent.stacks import enable
from allranks.agent.workers.script import run_as_main
from allranks.agent.workers.streams import RankStream, connect
from allranks.record.spec import NodeSpec
from allranks.system.processes import append_to, die_with_parent, let_gloo_rest

#: As the agent inherited them: a batch script makes its processes ignore a warning that is sent to all of them.
_WARNINGS = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}


@dataclass(frozen=True)
class RankStart:
    """A rank to start, by its number on this node: its own variables, its log files, and the file for its stacks."""

    local_rank: int
    variables: dict[str, str]
    out: str
    err: str
    stacks: str


def leave_fork_server(parent: int) -> None:
    """Give a process just forked from ``parent`` its own session, and Python's own reactions to signals."""
    die_with_parent(parent)
    os.setsid()
    _reset_signals()


def become(node: NodeSpec, python: tuple[str, ...] | None, start: RankStart) -> NoReturn:
    """Turn this process into a rank; ``python`` starts a new interpreter for it, None runs the script in this one."""
    try:
        _open_streams(node, start)
    except OSError as error:
        os.write(2, f"allranks: cannot open a rank's log: {error}\n".encode(errors="backslashreplace"))
        os._exit(1)
    os.environ.update(start.variables)
    stdin = connect(start.variables["RANK"])
    if python is None:
        with contextlib.suppress(OSError):  # Without it the rank only has no stack to show.
            enable(Path(start.stacks), node.file_mode)
        _renew_interpreter(stdin)
        atexit.register(let_gloo_rest)  # Before any of the script's, so that it is called last.
        run_as_main(node.kind, node.target, node.args)
    _replace_process(node, python)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number, before in _WARNINGS.items():
        signal.signal(number, before)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _open_streams(node: NodeSpec, start: RankStart) -> None:
    """Redirect stdout and stderr to the rank's logs, whose mode is the run's; the script keeps the user's umask."""
    users_umask = os.umask(0)
    append_to(Path(start.out), node.file_mode, 1)
    append_to(Path(start.err), node.file_mode, 2)
    os.umask(users_umask)


def _renew_interpreter(stdin: io.FileIO) -> None:
    """Renew what a fork shares and two interpreters of their own would not share."""
    sys.stdin = sys.__stdin__ = _stream(stdin, sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(io.FileIO(1, "w", closefd=False), sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(io.FileIO(2, "w", closefd=False), sys.stderr)  # type: ignore[misc]
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    gc.enable()


def _stream(file: io.FileIO, old: TextIO) -> io.TextIOWrapper:
    """Open a standard stream again, flushed line by line: what a rank wrote before it died is in its log."""
    descriptor, unbuffered = file.fileno(), bool(os.environ.get("PYTHONUNBUFFERED"))
    file.name = old.name
    stream: io.TextIOWrapper
    if descriptor == 0:
        stream = io.TextIOWrapper(io.BufferedReader(file), old.encoding, old.errors, write_through=unbuffered)
    elif unbuffered:
        stream = io.TextIOWrapper(file, old.encoding, old.errors, line_buffering=True, write_through=True)
    elif descriptor == 1:
        stream = RankStream(file, old.encoding, old.errors)
    else:
        stream = io.TextIOWrapper(io.BufferedWriter(file), old.encoding, old.errors, line_buffering=True)
    stream.mode = "w" if descriptor else "r"  # type: ignore[misc]
    return stream


def _replace_process(node: NodeSpec, python: tuple[str, ...]) -> NoReturn:
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    command = node.command(python)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # As subprocess does: else a program would inherit what Python ignores.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"allranks: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
