"""Turns a forked process into a rank, and runs the user's script in it.

The script runs as under ``python train.py`` in a new interpreter: ``__main__`` is the script (spawned data-loader
workers import it again), ``sys.argv`` and ``sys.path[0]`` are its own, atexit handlers run, tracebacks start at the
script's first frame, and the exit code is the same.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.machinery
import io
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TextIO

from allranks.agent.stacks import enable
from allranks.agent.workers.streams import RankStream, connect
from allranks.record.spec import NodeSpec
from allranks.system.processes import append_to, die_with_parent, let_gloo_rest

#: Inherited handlers: a batch script may make its processes ignore a warning that the scheduler sends to all of them.
_WARNINGS = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}

_Hook = Callable[[type[BaseException], BaseException, "types.TracebackType | None"], object]


class RankStart(NamedTuple):
    """A local rank to start: its variables, its log files, and its stack file."""

    local_rank: int
    variables: dict[str, str]
    out: str
    err: str
    stacks: str


def leave_fork_server(parent: int) -> None:
    """Give a process just forked from ``parent`` its own session, and Python's default signal handlers."""
    die_with_parent(parent)
    os.setsid()
    _reset_signals()


def become(node: NodeSpec, python: tuple[str, ...] | None, start: RankStart) -> NoReturn:
    """Turn this process into a rank: execute the interpreter command ``python``, or run the script here if None."""
    users_umask = os.umask(0)  # The logs have the run's file mode; the script keeps the user's umask.
    try:
        append_to(Path(start.out), node.file_mode, 1)
        append_to(Path(start.err), node.file_mode, 2)
    except OSError as error:
        os.write(2, f"allranks: cannot open a rank's log: {error}\n".encode(errors="backslashreplace"))
        os._exit(1)
    os.umask(users_umask)
    os.environ.update(start.variables)
    stdin = connect(start.variables["RANK"])
    if python is None:
        with contextlib.suppress(OSError):  # Without it only the rank's stack is missing.
            enable(Path(start.stacks), node.file_mode)
        _renew_interpreter(stdin)
        atexit.register(let_gloo_rest)  # Registered first, so that it runs last.
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


def _renew_interpreter(stdin: io.FileIO) -> None:
    """Reset state that forked processes share and separate interpreters do not."""
    sys.stdin = sys.__stdin__ = _stream(stdin, sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(io.FileIO(1, "w", closefd=False), sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(io.FileIO(2, "w", closefd=False), sys.stderr)  # type: ignore[misc]
    random.seed()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    gc.enable()


def _stream(file: io.FileIO, old: TextIO) -> io.TextIOWrapper:
    """Reopen a standard stream, flushed per line, so that a rank's log has all lines printed before it died."""
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
        signal.signal(number, signal.SIG_DFL)  # As subprocess does: ignored signals are inherited.
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"allranks: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


# --- the script ---


def run_as_main(kind: str, target: str, args: Sequence[str]) -> NoReturn:
    """Run a script, or a ``module`` by its dotted name, as ``__main__``; exit as a plain interpreter does."""
    try:
        (_run_module if kind == "module" else _run_script)(target, args)
    except SystemExit as end:
        if isinstance(end.code, str):
            _record(end.code if "Traceback (" in end.code else end.code.strip().partition("\n")[0])
        elif not end.code:
            _note_lone_accelerate()
        raise
    except BaseException:
        sys.excepthook = _without_our_frames(sys.excepthook)
        raise
    _note_lone_accelerate()
    sys.exit(0)


#: The file name in frames of this module, which differs from ``__file__`` in the archive.
_HERE = run_as_main.__code__.co_filename


def _note_lone_accelerate() -> None:
    """Print a note if each rank trained alone under Accelerate: on CPUs it forms a process group without using it."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    count = getattr(state, "_shared_state", {}).get("num_processes")
    if count == 1 and os.environ.get("WORLD_SIZE") != "1" and os.environ.get("RANK") == "0":
        print(
            "allranks: note: Accelerate ran each rank alone, as the only process; "
            "write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true, to train together on CPUs",
            file=sys.stderr,
        )


def _without_our_frames(show: _Hook) -> _Hook:
    """Wrap an excepthook so that tracebacks start at the script's first frame."""

    def show_script_only(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
        while frames and frames.tb_frame.f_code.co_filename != _HERE:
            frames = frames.tb_next
        while frames and frames.tb_frame.f_code.co_filename == _HERE:
            frames = frames.tb_next
        error = error.with_traceback(frames)
        _record("".join(traceback.format_exception(kind, error, frames)))
        show(kind, error, frames)

    return show_script_only


def _record(text: str) -> None:
    """Record the script's exception in the error file and format of torch's ``@record``, unless that has done so.

    Text on stderr may come from an earlier restart, or from other threads and libraries.
    """
    info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(KeyError, OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "x") as stream:
        json.dump({"message": {"message": text.strip().rpartition("\n")[2], "extraInfo": info}}, stream)


def _run_script(path: str, args: Sequence[str]) -> None:
    folder = os.path.dirname(os.path.realpath(path))  # noqa: PTH120 - the way CPython computes sys.path[0]
    main = _new_main([path], args, folder)
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as stream:
        source = stream.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, args: Sequence[str]) -> None:
    _new_main(["-m", name], args, os.getcwd())  # noqa: PTH109 - sys.path holds text
    # The function behind `python -m`: it sets __spec__, __file__ and sys.argv[0], and reports a missing module.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _new_main(command: list[str], args: Sequence[str], folder: str) -> types.ModuleType:
    """Return a new ``__main__`` and set ``sys.argv``; ``folder`` replaces the agent's directory in ``sys.path``."""
    sys.argv = [command[0], *args]
    sys.orig_argv = [sys.executable, *command, *args]
    sys.path[:1] = [] if os.environ.get("PYTHONSAFEPATH") else [folder]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main
