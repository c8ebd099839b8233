"""Run a script or module in a forked interpreter as if that interpreter had been started with it.

What a plain ``python train.py`` gives, this gives: ``__main__`` is the script (data loader workers that are
started by spawn import it again), ``sys.argv`` and ``sys.path[0]`` are its own, atexit handlers run, tracebacks
start at the script's first frame, and the exit code is that of a plain interpreter.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import io
import json
import os
import runpy
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import NoReturn

_Hook = Callable[[type[BaseException], BaseException, "types.TracebackType | None"], object]


def run_as_main(kind: str, target: str, args: Sequence[str]) -> NoReturn:
    """Run ``target``, a path or the dotted name of a ``module``, as ``__main__`` and exit as a plain interpreter would.

    Raises:
        SystemExit: the script has ended, or exited itself.
        BaseException: raised by the script; the interpreter shows it and gives the exit code for it.
    """
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


#: How frames name this file. ``__file__`` is its place in the archive, code from there has that of its source.
_HERE = run_as_main.__code__.co_filename


def _note_lone_accelerate() -> None:
    """Print a note if Accelerate has trained each rank alone: on CPUs it forms a process group, and does not use it."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    count = getattr(state, "_shared_state", {}).get("num_processes")
    if count == 1 and os.environ.get("WORLD_SIZE") != "1" and os.environ.get("RANK") == "0":
        print(
            "allranks: note: Accelerate ran each rank alone, as the only process; "
            "write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true, to train together on CPUs",
            file=sys.stderr,
        )


def _without_our_frames(show: _Hook) -> _Hook:
    """Wrap the excepthook, which the script may have set, so that tracebacks start at the script's first frame."""

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
    """Record why the script ended, in the file and the form of torch's ``@record``, unless that already has.

    What is on stderr may be of a restart before, or of other threads and libraries.
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
    # The function behind `python -m`: it sets __spec__, __file__ and sys.argv[0], and says what it cannot find.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _new_main(command: list[str], args: Sequence[str], folder: str) -> types.ModuleType:
    """Return a new ``__main__``, with its arguments; its directory replaces the agent's own in the search path."""
    sys.argv = [command[0], *args]
    sys.orig_argv = [sys.executable, *command, *args]
    sys.path[:1] = [] if os.environ.get("PYTHONSAFEPATH") else [folder]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None)
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main
