"""Ties the agents on other machines to this process: when it is gone, or the way to it, they end."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Mapping, Sequence

from allranks import contract
from allranks.clusters import ssh_kept

#: How often each machine hears that this process is alive; ``ssh_script.ending`` has the patience of a machine.
_BEAT_SECONDS = contract.scaled_wait(5.0)


class Attached:
    """Holds a command on each machine that ends the run there when it hears nothing more.

    Args:
        commands: of ssh, for ``ssh_script.HELD``.
        environ: of ssh.
    """

    def __init__(self, commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> None:
        kept = ssh_kept.keeping(environ)
        self._over = threading.Event()
        self._held = [
            subprocess.Popen(
                [command[0], *kept, *command[1:]],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is ours to pass on.
            )
            for command in commands
        ]
        threading.Thread(target=self._beat, daemon=True).start()

    def let_go(self) -> None:
        """End the commands: the run has ended."""
        self._over.set()
        for process in self._held:
            process.terminate()
            process.wait()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            for process in self._held:
                assert process.stdin
                with contextlib.suppress(OSError):  # It has ended: the run's agent there has, or the connection.
                    process.stdin.write(b"\n")
                    process.stdin.flush()
