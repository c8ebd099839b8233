"""Python processes that start in milliseconds: forked from one that has imported what they would import.

Hundreds of tests start the command, or ranks with torch; the imports of each would take longer than the test. What
reads its environment while an interpreter starts or torch is imported is started as a plain interpreter instead.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import IO

from waiting import PATIENCE

SERVER = Path(__file__).with_name("warm_server.py")
LENGTH = struct.Struct("!I")
#: What an interpreter reads once, when it starts; and torch and the libraries under it, when they are imported.
EARLY = re.compile(r"PYTHON|LD_|LC_|LANG|COVERAGE|MALLOC|_ALLRANKS")
EARLY_FOR_TORCH = re.compile(rf"{EARLY.pattern}|OMP_|MKL_|OPENBLAS_|KMP_|TORCH|ATEN")


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


class WarmPopen:
    """Such a process with what tests use of :class:`subprocess.Popen`, whose child it cannot be.

    Attributes:
        pid: its process id.
        returncode: what it ended with, as Popen has it; None until :meth:`poll` or a wait has seen its end.
        stdout: the end of its pipe; so is ``stderr``.
    """

    def __init__(self, pid: int, out: int, err: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = os.fdopen(out, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(err, "rb")
        self._status = os.fdopen(status, "rb")

    def poll(self) -> int | None:
        """Return what it ended with, or None."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return what it ended with; negative for a signal."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            (self.returncode,) = struct.unpack("!i", self._status.read())
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Read its streams to their ends, wait for its own, and return what was left to read."""
        deadline = time.monotonic() + timeout
        texts = {stream: b"" for stream in (self.stdout, self.stderr) if stream}
        waited = {*texts}
        while waited:
            readable, _, _ = select.select(waited, [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            for stream in readable:
                data = os.read(stream.fileno(), 1 << 16)
                texts[stream] += data
                if not data:
                    waited.remove(stream)
        self.wait(max(0.0, deadline - time.monotonic()))
        out, err = (texts.get(stream, b"") for stream in (self.stdout, self.stderr))
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless its end was seen."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """Starts processes from a server, which it starts when the first is wanted.

    Args:
        modules: what the server imports.
        env: the server's environment; processes that differ in what is read early are not for it.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._modules = modules
        self._env = dict(env)
        self._early = EARLY_FOR_TORCH if "torch" in modules else EARLY
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Return whether a process with this environment would have started as the server has."""
        return self._read_early(env) == self._read_early(self._env)

    def _read_early(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in env.items() if self._early.match(name)}

    def start(self, kind: str, target: str, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> WarmProcess:
        """Start a process that runs a ``script`` (a path) or a ``module`` (a dotted name); its stdin is empty."""
        return WarmProcess(*self._start(kind, target, args, cwd, env))

    def popen(self, kind: str, target: str, args: Sequence[str], cwd: Path, env: Mapping[str, str]) -> WarmPopen:
        """Start such a process for a test that does more than wait for its end."""
        return WarmPopen(*self._start(kind, target, args, cwd, env))

    def _start(
        self, kind: str, target: str, args: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> tuple[int, int, int, int]:
        """Return the process id, and the ends of the pipes at stdout, stderr and the exit status."""
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
        return pid, out, err, status

    def run_ranks(
        self,
        script: Path,
        args: Sequence[object],
        cwd: Path,
        count: int = 2,
        ranks_of_a_node: int | None = None,
        **env: str,
    ) -> list[tuple[int, bytes, bytes]]:
        """Run a script on so many ranks of this machine, with what torchrun would give them, on one node or several.

        ``env`` is added to the environment of the server. Returns code, stdout and stderr of each rank.
        """
        local = ranks_of_a_node or count
        world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1"}
        shared = {**self._env, **world, "MASTER_PORT": str(free_port()), **env}
        assert self.can_run(shared)
        with ExitStack() as started:
            ranks = []
            for rank in range(count):
                place = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local}
                own = {**shared, **{name: str(number) for name, number in place.items()}}
                process = self.start("script", str(script), [*map(str, args)], cwd, own)
                ranks.append(started.enter_context(closing(process)))
            return [rank.finish(2 * PATIENCE) for rank in ranks]

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


def free_port() -> int:
    """Return a free port of those that no connection from here gets while ranks are being started."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")
