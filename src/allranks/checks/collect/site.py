"""Runs the checks that a site has of its own: programs that come with the request, as plugins of Nagios are."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from allranks.checks.collect.gather import ProbeRequest
from allranks.system.processes import signal_group

#: Time limit of a program, in seconds.
LIMIT = 10.0
#: man 2 prctl: the kernel sends a signal when the parent exits, as it does on Ctrl-C.
_PR_SET_PDEATHSIG = 1
#: As many bytes of its output are kept; it may write more.
_KEPT = 4096
#: How long a killed program may hold its output open, in seconds.
_EXIT_SECONDS = 1.0
#: Held while a program is written and started: a child that another thread forks meanwhile would hold the file open for
#: writing, and then the kernel starts nothing from it.
_starting = threading.Lock()


def site(request: ProbeRequest, name: str) -> dict[str, Any]:
    """Run a program of the request, in this directory and environment.

    Returns:
        ``code``: its exit code, negative for a signal; None: it was still running at its limit. ``out`` and ``err``:
        the beginning of what it wrote.

    Raises:
        OSError: it cannot be started here.
    """
    libc = ctypes.CDLL(None)  # Loaded here: between fork and exec little may be done beside other threads.
    with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        program = Path(folder, name)
        with _starting:
            program.write_bytes(base64.b64decode(request.executables[name]))
            program.chmod(0o700)
            process = subprocess.Popen(
                [str(program)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        outputs = [_Output(process.stdout), _Output(process.stderr)]
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        signal_group(process.pid, signal.SIGKILL)  # What it has left behind, too.
        out, err = (output.text() for output in outputs)
        with contextlib.suppress(subprocess.TimeoutExpired):  # The kernel may hold it for longer.
            process.wait(_EXIT_SECONDS)
    return {"code": code, "out": out, "err": err}


class _Output:
    """The beginning of what a program writes; the rest is read too, so that it can continue."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read1(_KEPT):  # type: ignore[attr-defined]
                self._kept += piece[: _KEPT - len(self._kept)]

    def text(self) -> str:
        self._thread.join(_EXIT_SECONDS)
        return self._kept.decode(errors="replace")
