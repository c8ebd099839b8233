"""Starts the processes that send notifications of a run.

On a scheduler the supervisor on the first node notifies; elsewhere the agent of the first node, or the launcher if that
agent could not record an end. Restarts within an attempt are always reported by the agent.

Each notification is sent by a separate process, ``python <run>/code --notify ATTEMPT`` with the event on stdin: see
:mod:`allranks.diagnosis.notify`. Ranks do not wait for it; only the end of a run does, for a limited time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from allranks import contract

#: Time limit of a sending process, by event; it limits itself to some seconds less.
_SECONDS = {"failure": 65.0}
_OTHERS = 25.0


class Notifier:
    """Sends notifications for one attempt of a run, if they are configured.

    Args:
        run: directory of the run.
        attempt: number of the attempt.
        environ: environment with the URL of the webhook; None: that of this process.
        workdir: working directory of the command; None: that of this process.
        umask: the user's umask, for the command; -1: that of this process.
        facts: fields to add to all events.
    """

    def __init__(
        self,
        run: Path,
        attempt: int,
        environ: Mapping[str, str] | None = None,
        workdir: str | None = None,
        umask: int = -1,
        **facts: Any,
    ) -> None:
        self._run, self._attempt = run, run / contract.attempt_dir(attempt)
        where = {"host": socket.gethostname(), "folder": str(run)}
        self._facts: dict[str, Any] = {"run": run.name, "attempt": attempt + 1, **where, **facts}
        if run.name.startswith(contract.TASK):
            self._facts["run"] = f"{run.parent.name}/{run.name}"
        # Without the mark of the run's processes, so that ending those neither waits for a notification nor kills it.
        self._environ = {**(os.environ if environ is None else environ)}
        self._environ.pop(contract.RUN_DIR, None)
        self._workdir, self._umask = workdir, umask
        self._began = time.time()
        self._sending: list[tuple[str, float, subprocess.Popen[bytes]]] = []
        self._problems: list[tuple[str, str]] = []
        self._wanted: set[str] = set()
        try:
            self._wanted = {*json.loads((run / contract.NOTIFY_FILE).read_text(encoding="utf-8"))["on"]}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._problems.append(("run", f"{contract.NOTIFY_FILE}: {error}"))

    def send(self, event: str, **facts: Any) -> None:
        """Start to notify of an event, if that is configured. A failure also counts as an end."""
        if event not in self._wanted and not (event == "failure" and "end" in self._wanted):
            return
        self._wait(only_ended="restart" in facts)  # Keep the order of events, but do not let ranks wait.
        now = time.time()
        message = {"event": event, **self._facts, "time": now, "seconds": round(now - self._began, 3), **facts}
        try:
            process = subprocess.Popen(
                [sys.executable, str(self._run / contract.CODE), "--notify", str(self._attempt)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                cwd=self._workdir,
                umask=self._umask,
                start_new_session=True,
            )
            assert process.stdin
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(message).encode())
            process.stdin = None
        except OSError as error:
            self._problems.append((event, str(error)))
            return
        self._sending.append((event, time.monotonic() + _SECONDS.get(event, _OTHERS), process))

    def finish(self, most: float = math.inf) -> list[tuple[str, str]]:
        """Wait at most ``most`` seconds until all are sent; return the events that could not be sent, and why."""
        self._wait(most=most)
        problems, self._problems = self._problems, []
        return problems

    def _wait(self, *, only_ended: bool = False, most: float = math.inf) -> None:
        until, sending, self._sending = time.monotonic() + most, self._sending, []
        for event, deadline, process in sending:
            left = min(deadline, until) - time.monotonic()
            try:
                process.wait(0.0 if only_ended else max(0.0, left))
                out, _ = process.communicate()
                found = out.decode(errors="replace").splitlines()
                if process.returncode and not found:
                    found = [f"its process exited with code {process.returncode}"]
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    self._sending.append((event, deadline, process))  # Still running.
                    continue
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                found = ["its process took too long, and was killed"]
            self._problems += [(event, problem) for problem in found]

    def report(self, most: float = math.inf) -> None:
        """Wait at most ``most`` seconds until all are sent, and write failures to stderr."""
        for event, problem in self.finish(most):
            print(f"allranks: notification of the {event} failed: {problem}", file=sys.stderr, flush=True)
