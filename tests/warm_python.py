"""Python processes that start in milliseconds: forked from one that has imported what they would import.

Hundreds of tests start the command, or ranks with torch; the imports of each would take longer than the test. What
reads its environment while an interpreter starts or torch is imported is started as a plain interpreter instead.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SERVER = Path(__file__).with_name("warm_server.py")
LENGTH = struct.Struct("!I")
#: What an interpreter, libraries or torch read once, when they start or are imported.
EARLY = re.compile(r"(PYTHON|LD_|LC_|LANG|OMP_|MKL_|OPENBLAS_|KMP_|TORCH|ATEN|COVERAGE|MALLOC|_ALLRANKS)")


class WarmProcess:
    """A process with pipes at stdout and stderr, in a session of its own.

    Attributes:
        pid: its process id.
    """

    def __init__(self, pid: int, out: int, err: int, status: int) -> None:
        self.pid = pid
        self._texts = {out: b"", err: b""}
        self._order = (out, err)
        self._status = status
        self._code: int | None = None

    def finish(self, timeout: float) -> tuple[int, bytes, bytes]:
        """Wait for its end, and for that of whoever else holds its streams; return exit code, stdout and stderr."""
        deadline, waited = time.monotonic() + timeout, {*self._order, self._status}
        while waited:
            readable, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout, *self._texts.values())
            for descriptor in readable:
                data = os.read(descriptor, 1 << 16)
                if descriptor == self._status:
                    (self._code,) = struct.unpack("!i", data)
                elif data:
                    self._texts[descriptor] += data
                    continue
                waited.remove(descriptor)
        assert self._code is not None
        out, err = self._order
        return self._code, self._texts[out], self._texts[err]

    def close(self) -> None:
        """Kill it if it is alive, and close the pipes."""
        if self._code is None and not select.select([self._status], [], [], 0)[0]:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        for descriptor in (*self._order, self._status):
            os.close(descriptor)


class WarmPython:
    """Starts processes from a server, which it starts when the first is wanted.

    Args:
        modules: what the server imports.
        env: the server's environment; processes that differ in what is read early are not for it.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._modules = modules
        self._env = dict(env)
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Return whether a process with this environment would have started as the server has."""
        return _early(env) == _early(self._env)

    def start(self, kind: str, target: str, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> WarmProcess:
        """Start a process that runs a ``script`` (a path) or a ``module`` (a dotted name); its stdin is empty."""
        channel = self._channel or self._begin()
        umask = os.umask(0)
        os.umask(umask)
        order = {"kind": kind, "target": target, "args": [*args], "cwd": str(cwd), "env": {**env}, "umask": umask}
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        status, status_end = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        given = [nothing, out_end, err_end, status_end]
        data = json.dumps(order).encode()
        socket.send_fds(channel, [LENGTH.pack(len(data))], given)
        channel.sendall(data)
        for descriptor in given:
            os.close(descriptor)
        (pid,) = LENGTH.unpack(channel.recv(LENGTH.size, socket.MSG_WAITALL))
        return WarmProcess(pid, out, err, status)

    def close(self) -> None:
        """Stop the server."""
        if self._server and self._channel:
            self._channel.close()
            self._server.wait()
            self._server = self._channel = None

    def _begin(self) -> socket.socket:
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, str(SERVER), str(theirs.fileno()), *self._modules]
        self._server = subprocess.Popen(command, env=self._env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        return self._channel


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if EARLY.match(name)}
