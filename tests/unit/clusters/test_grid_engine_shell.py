"""From a job to the command that gives a shell on the nodes it asks for."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from allranks.clusters.grid_engine import GridEngineCluster
from allranks.job.spec import Job

#: Starts a command as Grid Engine's qrsh_starter does on a busy node: in a process group of its own, which gets the
#: terminal when the command is already waiting for it (SIGUSR1), or has stopped (SIGCHLD).
STARTER = """
import os, signal, subprocess, sys
awaited = {signal.SIGUSR1, signal.SIGCHLD}
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

def begin():
    os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

os.environ["STARTER"] = str(os.getpid())
command = subprocess.Popen(["/bin/sh", "-c", sys.argv[1]], preexec_fn=begin)
if signal.sigwait(awaited) == signal.SIGCHLD:
    command.kill()
    sys.exit("stopped")
os.tcsetpgrp(0, command.pid)
sys.exit(command.wait())
"""


def test_a_shell_waits_until_the_terminal_is_its_own(tmp_path: Path) -> None:
    """A shell that is faster stops itself, and its user would wait for a prompt for ever."""
    waits = tmp_path / "bin/sleep"
    waits.parent.mkdir()
    waits.write_text('#!/bin/sh\nkill -USR1 "$STARTER"\nexec /bin/sleep "$@"\n')
    waits.chmod(0o755)
    environ = {"PATH": f"{waits.parent}:{os.defpath}", "SHELL": "/bin/sh"}
    job = Job.model_validate({"cluster": "hall", "scheduler": {"parallel_environment": "four"}})
    *_, command = GridEngineCluster().shell_command(job, (), environ, terminal=True)
    end, inner = pty.openpty()
    words = ["setsid", "--ctty", sys.executable, "-c", STARTER, command]
    with subprocess.Popen(words, cwd=tmp_path, env=environ, stdin=inner, stdout=inner, stderr=subprocess.PIPE) as shell:
        os.write(end, b"exit 3\n")
        said = shell.communicate()[1]
    assert shell.returncode == 3, said
    os.close(inner)
    os.close(end)
