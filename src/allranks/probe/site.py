"""Runs the checks that a site has of its own: programs that come with the order, as plugins of Nagios are."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from allranks.probe.order import Order
from allranks.processes import signal_group

#: After which a program is ended, in seconds.
LIMIT = 10.0
#: man 2 prctl: the kernel sends a signal when the parent ends, as it does when the command is ended by Ctrl-C.
_PR_SET_PDEATHSIG = 1
#: As much is kept of what it says, in bytes; it may say more.
_KEPT = 4096
#: How long what was killed may hold its output open.
_LEAVING_SECONDS = 1.0


def answer(order: Order, name: str) -> dict[str, Any]:
    """Run a program of the order, in this folder and environment.

    Returns:
        ``code``: its exit code, negative for a signal; None: it was still running at its limit. ``out`` and ``err``:
        the beginning of what it wrote.

    Raises:
        OSError: it cannot be started here.
    """
    with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        program = Path(folder, name)
        program.write_bytes(base64.b64decode(order.executables[name]))
        program.chmod(0o700)
        process = _started(program)
        said = [_Said(process.stdout), _Said(process.stderr)]
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        signal_group(process.pid, signal.SIGKILL)  # What it has left behind, too.
        out, err = (each.text() for each in said)
        with contextlib.suppress(subprocess.TimeoutExpired):  # The kernel may hold it for longer.
            process.wait(_LEAVING_SECONDS)
    return {"code": code, "out": out, "err": err}


def _started(program: Path) -> subprocess.Popen[bytes]:
    pipe, until = subprocess.PIPE, time.monotonic() + LIMIT
    libc = ctypes.CDLL(None)  # Loaded here: between fork and exec little may be done beside other threads.

    def die_with_us() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    while True:
        try:
            return subprocess.Popen(
                [str(program)],
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=die_with_us,
            )
        except OSError as error:
            # A child that another thread has just forked holds it open for writing, until that child becomes a program.
            if error.errno != errno.ETXTBSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


class _Said:
    """The beginning of what a program writes; the rest is read too, so that it can go on."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.read1(_KEPT):  # type: ignore[attr-defined]
                self._kept += piece[: _KEPT - len(self._kept)]

    def text(self) -> str:
        self._thread.join(_LEAVING_SECONDS)
        return self._kept.decode(errors="replace")
