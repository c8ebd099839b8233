"""``allranks shell`` on a real Slurm, in a real terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

from terminals import Terminal

#: Each rank tells where it is, after all of them have met.
WHO = """\
import os, socket
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("who", os.environ["RANK"], socket.gethostname(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def lab(slurm: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a directory that knows the test cluster as ``lab``."""
    allranks.env.update(slurm.env, SHELL="/bin/sh", PS1="ready> ")
    allranks.script("lab: {kind: slurm, resources: {time: 5min}}\n", "clusters.yaml")
    return allranks


def queue(slurm: SlurmCluster) -> list[str]:
    return slurm.run("squeue", "--noheader", "--format=%i").split()


def test_a_shell_on_the_first_node_from_which_all_nodes_are_used(
    lab: Any, slurm: SlurmCluster, terminals: list[Terminal]
) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch on each node of the shell."""
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
    terminal.read_until(r"succeeded in")
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
    # salloc misses a signal that comes before it listens for its nodes: then a person types it again.
    slurm.wait_until("the request to be gone", lambda: terminal.type("\x03") or not queue(slurm))
    assert terminal.wait() == 1


def test_a_window_that_is_closed_gives_the_nodes_back(lab: Any, slurm: SlurmCluster, terminals: list[Terminal]) -> None:
    """It takes more than 10 s: an interactive shell ignores SIGTERM, and Slurm waits for the site's KillWait, 30 s."""
    terminal = Terminal(lab, "shell", "--on", "lab")
    terminals.append(terminal)
    terminal.read_until("ready> ")
    terminal.close()
    slurm.wait_until("the nodes to be given back", lambda: not queue(slurm))


def test_a_refused_request_ends_with_slurms_own_words(lab: Any, slurm: SlurmCluster) -> None:
    done = lab("shell", "--on", "lab", "--partition", "nothere")
    assert (done.rc, done.stdout) == (1, "")
    assert "salloc: error: invalid partition specified: nothere" in done.stderr
