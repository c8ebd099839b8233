"""From fork to script: what a new rank does before it runs the user's code."""

from __future__ import annotations

import atexit
import gc
import io
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn, TextIO

from allranks.agent.script import run_as_main
from allranks.agent.stdin import connect
from allranks.agent.streams import RankStream
from allranks.agent.system import die_with_parent
from allranks.processes import let_gloo_rest

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
#: As whoever started the agent has them: a batch script lets all its processes ignore a warning that reaches them all.
_WARNINGS = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@dataclass(frozen=True)
class RankOrder:
    """One rank to start: what it runs, its own variables and its log files."""

    kind: str
    target: str
    args: tuple[str, ...]
    #: None: run in the forked interpreter; else the interpreter's command line up to the script.
    python: tuple[str, ...] | None
    variables: Mapping[str, str]
    out: str
    err: str
    file_mode: int


def leave_starter(parent: int) -> None:
    """Make the process that was just forked from ``parent`` one that signals reach as they reach any other."""
    die_with_parent(parent)
    os.setsid()
    _reset_signals()


def become(order: RankOrder, umask: int) -> NoReturn:
    """Turn this process into the rank of ``order``; never returns."""
    try:
        _open_streams(order, umask)
    except OSError as error:
        os.write(2, f"allranks: cannot open a rank's log: {error}\n".encode(errors="backslashreplace"))
        os._exit(1)
    os.environ.update(order.variables)
    stdin = connect(order.variables["RANK"])
    if order.python is None:
        _renew_interpreter(stdin.open())
        atexit.register(let_gloo_rest)  # Before any of the script's, so that it is the last that is called.
        run_as_main(order.kind, order.target, order.args)
    _replace_process(order)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    for number, before in _WARNINGS.items():
        signal.signal(number, before)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _open_streams(order: RankOrder, umask: int) -> None:
    """Point the standard streams at the rank's own files; only the logs are created with a mode of ours."""
    os.umask(0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, path in ((1, order.out), (2, order.err)):
        descriptor = os.open(path, flags, order.file_mode)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.umask(umask)


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
    """Open a standard stream anew: line by line, so that what a rank said before it died is there."""
    descriptor = file.fileno()
    mode, unbuffered = ("w" if descriptor else "r"), bool(os.environ.get("PYTHONUNBUFFERED"))
    file.name = old.name
    if descriptor == 1 and not unbuffered:
        stream: io.TextIOWrapper = RankStream(file, old.encoding, old.errors)
    else:
        buffer = io.BufferedReader(file) if not descriptor else file if unbuffered else io.BufferedWriter(file)
        stream = io.TextIOWrapper(buffer, old.encoding, old.errors, None, bool(descriptor), unbuffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _replace_process(order: RankOrder) -> NoReturn:
    assert order.python is not None
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    start = {"script": [order.target], "module": ["-m", order.target], "binary": [order.target]}[order.kind]
    command = [*(order.python if order.kind != "binary" else ()), *start, *order.args]
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)  # As subprocess does: else a program would inherit what Python ignores.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"allranks: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
