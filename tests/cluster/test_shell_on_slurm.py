"""``allranks shell`` on a real Slurm, in a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

#: Each rank tells where it is, after all of them have met.
WHO = """\
import os, socket
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("who", os.environ["RANK"], socket.gethostname(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


class Terminal:
    """A command in a terminal of its own, and a person who types there."""

    def __init__(self, lab: Any, *words: str) -> None:
        self._end, inner = pty.openpty()
        # A session of its own, whose terminal this is: Ctrl-C comes from there.
        command = ["setsid", "--ctty", sys.executable, "-m", "allranks", *words]
        self.process = subprocess.Popen(command, cwd=lab.folder, env=lab.env, stdin=inner, stdout=inner, stderr=inner)
        os.close(inner)
        self.shown, self._seen = "", 0

    def type(self, text: str) -> None:
        """Type something."""
        os.write(self._end, text.encode())

    def read_until(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """Read until something is shown after what was found before, and return it."""
        deadline = time.monotonic() + seconds
        while not (found := re.compile(pattern).search(self.shown, self._seen)):
            assert self._read(deadline), f"no {pattern!r} in {self.shown[self._seen :]!r}"
        self._seen = found.end()
        return found

    def wait(self, seconds: float = 60) -> int:
        """Read to the end, and return the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(10)

    def close(self) -> None:
        """Take the terminal away, as a window that is closed."""
        if self._end >= 0:
            os.close(self._end)
        self._end = -1

    def _read(self, deadline: float) -> bool:
        """Read more; tell whether there may be any after it."""
        if not select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        with suppress(OSError):  # EIO: nobody has the terminal open any more.
            self.shown += os.read(self._end, 65536).decode(errors="replace")
            return True
        return False


@pytest.fixture
def lab(slurm: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a folder that knows the test cluster as ``lab``."""
    allranks.env.update(slurm.env, SHELL="/bin/sh", PS1="ready> ")
    allranks.script("lab: {kind: slurm, resources: {time: 5min}}\n", "clusters.yaml")
    return allranks


@pytest.fixture
def terminals(slurm: SlurmCluster) -> Iterator[list[Terminal]]:
    """Give a list for terminals, whose commands are ended after the test."""
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()
        terminal.process.kill()
        terminal.process.wait()


def queue(slurm: SlurmCluster) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").split()


def test_a_shell_on_the_first_node_from_which_all_nodes_are_used(
    lab: Any, slurm: SlurmCluster, terminals: list[Terminal]
) -> None:
    lab.script(WHO)
    terminal = Terminal(lab, "shell", "--on", "lab", "--nodes", "2", "--gpus-per-node", "2", "--cpus-per-node", "4")
    terminals.append(terminal)
    asked = "salloc --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=4 --time=00:05:00 "
    terminal.read_until(f"allranks: {asked}srun --interactive --preserve-env --pty /bin/sh\r\n")
    terminal.read_until("ready> ")
    terminal.type("hostname; echo gpus $SLURM_GPUS_ON_NODE; tty\n")
    terminal.read_until(r"\r\nnode01\r\ngpus 2\r\n/dev/\S+\r\n")
    terminal.type("srun hostname\n")
    both = [terminal.read_until(r"(node\d\d)\r\n")[1] for _ in range(2)]
    assert sorted(both) == ["node01", "node02"]
    terminal.read_until("ready> ")  # What is typed before goes to srun.
    terminal.type("allranks run train.py --backend gloo\n")
    terminal.read_until(r"succeeded in", 120)
    terminal.type("exit 3\n")
    assert terminal.wait() == 3
    told = sorted(re.findall(r"who (\d) (\S+) of (\d)", terminal.shown))
    assert told == [("0", "node01", "4"), ("1", "node01", "4"), ("2", "node02", "4"), ("3", "node02", "4")]
    slurm.wait_until("the nodes to be given back", lambda: not queue(slurm))


def test_a_command_instead_of_the_shell_and_no_terminal(lab: Any, slurm: SlurmCluster) -> None:
    lab.job("resources: {nodes: 2}\n")
    done = lab("shell", "--on", "lab", "--", "sh", "-c", "echo $SLURM_JOB_NUM_NODES at $(hostname); exit 4")
    assert (done.rc, done.stdout) == (4, "2 at node01\n")
    assert "pty" not in done.stderr


def test_ctrl_c_while_it_waits_leaves_no_request(lab: Any, slurm: SlurmCluster, terminals: list[Terminal]) -> None:
    terminal = Terminal(lab, "shell", "--on", "lab", "--nodes", "5")
    terminals.append(terminal)
    terminal.read_until("queued and waiting for resources")
    assert len(queue(slurm)) == 1
    terminal.type("\x03")
    assert terminal.wait() == 1
    slurm.wait_until("the request to be gone", lambda: not queue(slurm), 10)


def test_a_window_that_is_closed_gives_the_nodes_back(lab: Any, slurm: SlurmCluster, terminals: list[Terminal]) -> None:
    terminal = Terminal(lab, "shell", "--on", "lab")
    terminals.append(terminal)
    terminal.read_until("ready> ")
    terminal.close()
    slurm.wait_until("the nodes to be given back", lambda: not queue(slurm))


def test_a_refused_request_ends_with_slurms_own_words(lab: Any, slurm: SlurmCluster) -> None:
    done = lab("shell", "--on", "lab", "--partition", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert "salloc: error: invalid partition specified: nothere" in done.stderr
