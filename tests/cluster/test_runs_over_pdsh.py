"""``allranks run`` through pdsh: one for all machines, and the failure of none is lost."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest
from cluster_tools import missing_commands, wait_until
from needed import need
from nodes import Network
from ranks_told import UP, ranks_saying
from ssh_runs import left_on

from waiting import PATIENCE

OPTIONS = ("--epochs", "2", "--quiet")
LAB = """\
lab:
  kind: pdsh
  resources: {hosts: 'gpu[01-04]'}
  launch: {nproc_per_node: 1}
  environment: {variables: {OMP_NUM_THREADS: 1}}  # Sums are rounded as their parts are shared by threads.
"""


@pytest.fixture
def lab(ssh: Any) -> Any:
    """Give the command in a directory that knows the nodes as ``lab``, at a site where pdsh uses ssh."""
    need("pdsh", missing_commands({"pdsh": "pdsh"}))
    ssh.env["PDSH_RCMD_TYPE"] = "ssh"
    ssh.script(LAB, "clusters.yaml")
    return ssh


def test_no_such_machine(lab: Any, network: Network) -> None:
    lab.script(UP)
    done = lab("run", "train.py", "--no-check", "--on", "lab", "--hosts", "gpu01,gpu99,gpu02")
    assert done.rc == 1
    assert "error: cannot reach gpu99\n  why: ssh: Could not resolve hostname gpu99: " in done.stderr
    assert left_on(network, lab.run()) == {}


def test_a_machine_on_which_the_setup_fails(lab: Any, network: Network) -> None:
    lab.script(UP)
    lab.job("script: train.py\nenvironment: {node_setup: ['[ $HOSTNAME = gpu01 ] || cp /nowhere/data .']}\n")
    done = lab("run", "job.yaml", "--on", "lab", "--nodes", "2")
    assert done.rc == 1
    assert "error: on gpu02: line 1 of environment.node_setup failed: cp /nowhere/data .\n" in done.stderr
    assert left_on(network, lab.run()) == {}


def test_a_machine_without_the_folder(lab: Any, mended: Network) -> None:
    lab.script(UP)
    mended.nodes["gpu02"].run(["mount", "-t", "tmpfs", "tmpfs", str(lab.folder)])
    done = lab("run", "train.py", "--no-check", "--on", "lab", "--nodes", "2")
    mended.nodes["gpu02"].run(["umount", str(lab.folder)])
    assert done.rc == 1
    assert "error: gpu02 does not see the run's directory\n" in done.stderr
    assert left_on(mended, lab.run()) == {}


SECRET = "it's 'secret'"
VARIABLES = f'variables: {{API_KEY: "{SECRET}"}}'


def test_ctrl_c_while_the_machines_are_set_up(lab: Any, network: Network) -> None:
    lab.script(UP)
    setup = "node_setup: [': >here-$HOSTNAME', '[ $HOSTNAME = gpu01 ] || sleep 1000']"
    lab.job(f"script: train.py\nenvironment: {{{setup}, {VARIABLES}}}\n")
    process = lab.popen("run", "job.yaml", "--on", "lab", "--nodes", "2")
    wait_until("both to be set up", lambda: len([*lab.folder.glob("here-gpu*")]) == 2)
    run = lab.run()
    file = run / "secrets.sh"
    assert oct(file.stat().st_mode) == "0o100600"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == f"error: {run.name} was cancelled before it had started"
    assert (left_on(network, run), file.exists()) == ({}, False)
    assert lab.record(run)["status"]["state"] == "CANCELLED"
    left = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True)
    assert left.stdout == ""


def test_a_secret_reaches_the_ranks_and_no_command_line(lab: Any, network: Network) -> None:
    lab.script("import os\nprint(os.environ['API_KEY'][::-1])\n")
    lab.job(f"script: train.py\nenvironment: {{{VARIABLES}}}\n")
    done = lab("run", "job.yaml", "--on", "lab", "--nodes", "2")
    assert done.rc == 0, done.stderr
    assert ranks_saying(done.stdout, "'terces' s'ti") == ranks_saying(done.stdout, ".*") == [0, 1]
    assert (
        "note: pdsh passes no stdin: until all nodes have started, secrets are in secrets.sh of the run's"
        in done.stderr
    )
    found = subprocess.run(["grep", "-r", SECRET, str(lab.run())], capture_output=True, text=True)
    assert (found.stdout, (lab.run() / "secrets.sh").exists()) == ("", False)
