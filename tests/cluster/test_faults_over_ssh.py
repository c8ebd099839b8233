"""What goes wrong with machines and networks, put in for real while ``allranks run`` uses them over SSH."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster_tools import called, wait_until
from nodes import Network
from ranks_told import PLACES, UP, WHO, ranks_saying, who
from ssh_nodes import SshNodes
from ssh_runs import left_on, wait_for_ranks

from allranks import contract
from allranks.system.processes import marked
from exact_runs import SCRIPT, trained, undisturbed, weights, weights_in
from waiting import PATIENCE

OPTIONS = ("--epochs", "2", "--quiet")
#: Sums are rounded as their parts are shared by threads, and variables of this shell stay here.
EXACT = ("--nproc-per-node", "1", "--env", "OMP_NUM_THREADS=1")
TWO = ("--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
#: What two ranks on two nodes tell.
BOTH = [[0, 0, 2, 1, "gpu01", 2], [1, 0, 2, 1, "gpu02", 2]]
NETWORK = "print('network', os.environ['GLOO_SOCKET_IFNAME'], os.environ['MASTER_ADDR'], flush=True)\n"
#: A disk of 16 KiB without any space left.
FULL = "mount -t tmpfs -o size=16k tmpfs '{0}' && head -c 16384 /dev/zero >'{0}/filled'"


@contextmanager
def text_of(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Have another text in a file for a while."""
    before = path.read_text()
    path.write_text(change(before))
    try:
        yield
    finally:
        path.write_text(before)


def last_lines(text: str, count: int, run: Path) -> list[str]:
    """Return the last lines, in which the run's directory is ``RUN``."""
    return text.replace(str(run), "RUN").splitlines()[-count:]


def test_the_weights_are_those_of_one_machine(ssh: Any) -> None:
    """It takes more than 10 s: trainings on several machines and on one."""
    done = ssh("run", SCRIPT, "--nodes", "gpu[01-03]", *EXACT, "--", *OPTIONS)
    assert weights(done) == weights_in(trained(ssh, "of-one-machine", *OPTIONS, ranks=3)[0])


def test_a_cable_that_is_cut_for_five_seconds_changes_nothing(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: a training, and five seconds of it without a cable."""
    ssh.env[contract.WAITS] = "1"
    flags = ("--nodes", "gpu01,gpu02", *EXACT)
    process = ssh.popen("run", SCRIPT, *flags, "--", "--slow-until", "go", *OPTIONS)
    wait_until("a checkpoint", (ssh.folder / "checkpoints" / "latest").exists)
    mended.cut("gpu02")
    time.sleep(5)  # The fault itself.
    mended.mend("gpu02")
    (ssh.folder / "go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert weights_in(out.decode()) == undisturbed(ssh, *OPTIONS)
    assert (process.returncode, err.decode().count(" was lost")) == (0, 0)


def test_a_machine_that_loses_power_before_all_have_met(ssh: Any, mended: Network) -> None:
    ssh.script(UP)
    lines = "[': >here-$HOSTNAME', '[ $HOSTNAME != gpu02 ] || sleep 600']"
    ssh.job(f"script: train.py\nenvironment: {{node_setup: {lines}}}\n")
    process = ssh.popen("run", "job.yaml", "--nodes", "gpu[01-03]", "--nproc-per-node", "1")
    wait_until("all to be set up", lambda: len([*ssh.folder.glob("here-gpu*")]) == 3)
    mended.kill("gpu02")
    _, err = process.communicate(timeout=PATIENCE)  # Agents wait for each other ten times as long.
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        "error: cannot reach gpu02",
        "  why: the connection broke",
        "  fix: see whether gpu02 has lost its power, or its network",
    ]
    assert left_on(mended, ssh.run()) == {}


def test_a_machine_that_loses_power_in_the_middle_of_a_checkpoint(
    ssh: Any, mended: Network, ssh_nodes: SshNodes
) -> None:
    """It takes more than 10 s: three trainings import torch on each node."""
    options = ("--width", "300000", *OPTIONS)
    slow = ("--slow-until", "go")
    process = ssh.popen("run", SCRIPT, "--nodes", "gpu01,gpu02", *EXACT, "--", *slow, *options)
    folder = ssh.folder / "checkpoints"
    wait_until("a checkpoint", (folder / "latest").exists)
    here = Path(f"/proc/{mended.nodes['gpu01'].pid}/ns/pid").readlink()
    ranks = [pid for pid in marked(contract.RUN_DIR, str(ssh.run())) if Path(f"/proc/{pid}/ns/pid").readlink() == here]

    def signal_all(number: int) -> None:
        """Signal the ranks from here: a save may be over before a command on their node has started."""
        for rank in ranks:
            os.kill(rank, number)

    def are_still() -> bool:
        """Whether each thread is stopped: the signal waits for a system call, the one that ends the save as well."""
        states = set[str]()
        for stat in [stat for rank in ranks for stat in Path(f"/proc/{rank}/task").glob("*/stat")]:
            with suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
                states.add(stat.read_text().rpartition(")")[2].split()[0])
        return states == {"T"}

    def is_caught() -> bool:
        """Stop the ranks while they save, or let them continue."""
        if not [*folder.glob(".step-*.tmp-*")]:
            return False
        signal_all(signal.SIGSTOP)
        wait_until("all their threads to stand still", are_still, every=0.001)
        caught = bool([*folder.glob(".step-*.tmp-*")])
        if not caught:
            signal_all(signal.SIGCONT)
        return caught

    wait_until("the middle of another one", is_caught, every=0.001)
    whole = (folder / "latest").resolve().name
    mended.kill("gpu01")
    mended.start_nodes(["gpu01"])  # It says itself that it knows nothing of the connections it had.
    ssh_nodes.restart("gpu01")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert " FAILED: node 0 (gpu01) was lost: " in err.decode()
    assert [*folder.glob(".step-*.tmp-*")] != []
    (ssh.folder / "go").touch()
    done = ssh("resume")
    assert f"continuing from checkpoints/{whole} " in done.stderr
    assert [*folder.glob(".step-*")] == []
    assert weights(done) == undisturbed(ssh, *options)


def test_a_machine_without_torch(ssh: Any, network: Network) -> None:
    ssh.script(f"import torch\n{UP}")
    other = f'#!/bin/sh\n[ "$(hostname)" != gpu02 ] || set -- -S "$@"\nexec {sys.executable} "$@"\n'
    wrapper = ssh.script(other, "python")
    wrapper.chmod(0o755)
    done = ssh("run", "train.py", "--no-check", *TWO, "--python", wrapper)
    assert done.rc == 1
    assert last_lines(done.stderr, 9, ssh.run()) == [
        f"error: on gpu02: {sys.executable} cannot import torch",
        "  why: No module named 'torch'",
        "  fix: install torch there, or name the environment that has it: environment.venv, .conda or .python",
        "  see: RUN/attempts/000/node-001/agent.log",
    ]
    assert left_on(network, ssh.run()) == {}


def test_a_machine_without_the_environment(ssh: Any, mended: Network, undo: Any) -> None:
    ssh.script(UP)
    called([sys.executable, "-m", "venv", "--without-pip", ssh.folder / "env"])
    (packages,) = ssh.folder.glob("env/lib/python*/site-packages")
    (packages / "of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    node = mended.nodes["gpu02"]
    node.run(["mount", "-t", "tmpfs", "tmpfs", str(ssh.folder / "env")])
    undo(node, ["umount", str(ssh.folder / "env")])
    done = ssh("run", "train.py", "--no-check", *TWO, "--venv", ssh.folder / "env")
    assert done.rc == 1
    assert last_lines(done.stderr, 9, ssh.run()) == [
        f"error: on gpu02: environment.venv: there is no virtual environment at {ssh.folder}/env",
        "  fix: make it there, or correct environment.venv",
        "  see: RUN/attempts/000/node-001/agent.log",
    ]
    assert left_on(mended, ssh.run()) == {}


def test_a_machine_with_another_torch(ssh: Any, mended: Network, undo: Any) -> None:
    """It takes more than 10 s on a slow machine: agents import torch on each machine before they meet."""
    ssh.script(f"import torch\n{UP}")
    real, here = Path(sysconfig.get_path("purelib"), "torch", "version.py"), version("torch")
    changed = ssh.script(real.read_text().replace(f"'{here}'", "'1.99.0+cpu'"), "version.py")
    node = mended.nodes["gpu02"]
    node.run(["mount", "--bind", str(changed), str(real)])
    undo(node, ["umount", str(real)])
    done = ssh("run", "train.py", "--no-check", *TWO, "--env", "PYTHONDONTWRITEBYTECODE=1")
    assert done.rc == 1
    versions = f"it has torch 1.99.0, and node 0 (gpu01) has torch {here.partition('+')[0]}"
    assert done.stderr.splitlines()[-1] == (f"error: {ssh.run().name} FAILED: node 1 (gpu02) was rejected: {versions}")
    assert left_on(mended, ssh.run()) == {}


def test_a_machine_that_cannot_write_the_run_down(ssh: Any, ssh_nodes: SshNodes, mended: Network, undo: Any) -> None:
    ssh.script(UP)
    ssh.env[contract.WAITS] = "1"  # The cable is cut for as long as a command takes to start.
    ssh_nodes.end_kept()
    mended.cut("gpu02")  # Its agent is started when there is a directory to be filled, and it is.
    process = ssh.popen("run", "train.py", *TWO)
    wait_until("the run", lambda: [*ssh.folder.glob("runs/*/attempts/000/node-001")])
    folder, node = ssh.run() / "attempts/000/node-001", mended.nodes["gpu02"]
    node.run(FULL.format(folder))
    undo(node, ["umount", str(folder)])
    mended.mend("gpu02")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        "error: gpu02 cannot write to the run's directory",
        "  why: date: write error: No space left on device",
        "  fix: free some space, or see why the directory cannot be written there",
    ]
    assert left_on(mended, ssh.run()) == {}


def test_a_machine_that_cannot_write_checkpoints(ssh: Any, mended: Network, undo: Any) -> None:
    """It takes more than 10 s: trainings import torch on each machine."""
    folder, node = ssh.folder / "checkpoints", mended.nodes["gpu02"]
    folder.mkdir()
    node.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)])
    undo(node, ["umount", str(folder)])
    done = ssh("run", SCRIPT, "--nodes", "gpu02,gpu01", *EXACT, "--", "--width", "2000", *OPTIONS)
    assert "error: the checkpoint of step 2 could not be saved to checkpoints\n" in done.stderr
    assert "  why: rank 0 on gpu02: No space left on device\n" in done.stderr
    assert weights(done) == undisturbed(ssh, "--width", "2000", *OPTIONS)


def test_a_machine_with_a_full_folder_for_temporary_files(ssh: Any, mended: Network, undo: Any) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch on each machine."""
    ssh.script(WHO)
    (ssh.folder / "full").mkdir()
    node = mended.nodes["gpu02"]
    node.run(FULL.format(ssh.folder / "full"))
    undo(node, ["umount", str(ssh.folder / "full")])
    done = ssh("run", "train.py", *TWO, "--env", f"TMPDIR={ssh.folder / 'full'}")
    assert (done.rc, who(done.stdout)) == (0, BOTH), done.stderr


def test_a_port_that_is_taken_on_the_first_machine(ssh: Any, network: Network) -> None:
    holder = "import socket; s = socket.create_server(('', 29700)); print('held', flush=True); input()"
    with network.nodes["gpu01"].popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == "held\n"
        ssh.script(UP)
        done = ssh("run", "train.py", "--no-check", *TWO, "--master-port", "29700")
        held.communicate("\n")
    assert done.rc == 1
    assert last_lines(done.stderr, 9, ssh.run()) == [
        "error: on gpu01: cannot listen on port 29700 of this machine",
        f"  why: Address already in use (while attempting to bind on address ('{network.nodes['gpu01'].ip}', 29700))",
        "  fix: launch.master_port (--master-port) must be a free port of node 0",
        "  see: RUN/attempts/000/node-000/agent.log",
    ]
    assert left_on(network, ssh.run()) == {}


def test_machines_whose_own_names_mean_their_loopback(ssh: Any, mended: Network, undo: Any) -> None:
    """As Debian writes /etc/hosts: 127.0.1.1 and the machine's own name.

    It takes more than 10 s on a slow machine: ranks import torch on each machine.
    """
    for name in ("gpu01", "gpu02"):
        node = mended.nodes[name]
        others = [line for line in node.hosts.read_text().splitlines() if not line.endswith(f" {name}")]
        own = ssh.script("\n".join([f"127.0.1.1 {name}", *others]) + "\n", f"hosts-of-{name}")
        node.run(["mount", "--bind", str(own), "/etc/hosts"])
        undo(node, ["umount", "/etc/hosts"])
    assert mended.nodes["gpu01"].run("getent hosts gpu01").split() == ["127.0.1.1", "gpu01"]
    ssh.script(WHO + NETWORK)
    done = ssh("run", "train.py", *TWO)
    assert (done.rc, who(done.stdout)) == (0, BOTH), done.stderr
    assert ranks_saying(done.stdout, f"network eth0 {mended.nodes['gpu01'].ip}") == [0, 1]


def test_machines_with_two_networks_use_that_of_the_route(ssh: Any, mended: Network, undo: Any) -> None:
    """It takes more than 10 s: ranks import torch on each machine."""
    nodes = [mended.nodes[name] for name in ("gpu01", "gpu02")]
    ends = [["name", "eth1", "netns", str(node.pid)] for node in nodes]
    called(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    undo(nodes[0], "ip link delete eth1")
    for number, node in enumerate(nodes, 1):
        node.run(f"ip addr add 198.19.0.{number}/24 dev eth1 && ip link set eth1 up")
    ssh.script(WHO + NETWORK)
    for flags, met in (((), f"eth0 {nodes[0].ip}"), (("--master-addr", "198.19.0.1"), "eth1 198.19.0.1")):
        done = ssh("run", "train.py", *TWO, *flags)
        assert (done.rc, who(done.stdout)) == (0, BOTH), done.stderr
        assert ranks_saying(done.stdout, f"network {met}") == [0, 1]


def test_machines_that_have_ipv6_only(ssh: Any, mended: Network, ssh_nodes: SshNodes, undo: Any) -> None:
    """It takes more than 10 s: two runs, and ranks of the first import torch on each machine."""
    keys = ""
    for number, name in enumerate(("gpu01", "gpu02"), 1):
        node = mended.nodes[name]
        node.run(f"ip addr flush dev eth0 scope global && ip addr add fdac::{number}/64 dev eth0 nodad")
        undo(node, f"ip addr flush dev eth0 scope global && ip addr add {node.address} dev eth0")
        keys += f"fdac::{number} {(ssh_nodes.folder / f'{name}.pub').read_text()}"
    called(["ip", "addr", "add", "fdac::254/64", "dev", mended.link, "nodad"])
    ssh.script(WHO + NETWORK)
    with text_of(ssh_nodes.folder / "known_hosts", lambda known: known + keys):
        done = ssh("run", "train.py", "--nodes", "fdac::1,fdac::2", "--nproc-per-node", "1")
        ssh.script(PLACES + NETWORK)
        asked = ssh(
            "run", "train.py", "--nodes", "fdac::1,fdac::2", "--nproc-per-node", "1", "--master-addr", "fdac::1"
        )
    called(["ip", "addr", "delete", "fdac::254/64", "dev", mended.link])
    for each in (done, asked):
        assert (each.rc, who(each.stdout)) == (0, BOTH), each.stderr
        assert ranks_saying(each.stdout, "network eth0 fdac::1") == [0, 1]


def test_a_slow_link(ssh: Any, mended: Network, undo: Any) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch on each machine, and meet over a slow link."""
    ssh.env[contract.WAITS] = "1"  # A packet may take 5 s.
    node = mended.nodes["gpu02"]
    node.run("tc qdisc add dev eth0 root tbf rate 300kbit burst 2000 latency 5s")
    undo(node, "tc qdisc delete dev eth0 root")
    ssh.script(WHO)
    done = ssh("run", "train.py", *TWO)
    assert (done.rc, who(done.stdout)) == (0, BOTH), done.stderr


def test_a_machine_behind_another_one(ssh: Any, mended: Network, ssh_nodes: SshNodes, undo: Any) -> None:
    node, outside = mended.nodes["gpu02"], f"{mended.subnet}.254"
    node.run(f"ip route add blackhole {outside}")
    undo(node, f"ip route delete blackhole {outside}")
    ssh.script(PLACES)
    ssh_nodes.end_kept()  # They go the direct way, which there is no more.
    with text_of(ssh_nodes.folder / "config", lambda config: f"Host gpu02\n    ProxyJump gpu01\n{config}"):
        done = ssh("run", "train.py", *TWO)
    assert (done.rc, who(done.stdout)) == (0, BOTH), done.stderr


def test_a_run_that_has_lost_its_launcher_ends_well(ssh: Any, network: Network) -> None:
    ssh.script("import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n")
    process = ssh.popen("run", "train.py", *TWO)
    run = wait_for_ranks(ssh, "0:0", "1:1")
    process.kill()
    process.wait()
    follower = ssh.popen("logs", "-f")
    (ssh.folder / "go").touch()
    out, _ = follower.communicate(timeout=PATIENCE)
    assert follower.returncode == 0
    assert ranks_saying(out.decode(), "up") == ranks_saying(out.decode(), ".*") == [0, 1]
    assert re.search(r"^state +SUCCEEDED\b", ssh("status", run.name).stdout, re.MULTILINE)
    assert left_on(network, run) == {}


def test_a_run_is_cancelled_while_a_cable_is_cut(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: ssh tries to reach the machine for 10 s."""
    ssh.script(UP)
    ssh.env[contract.WAITS] = "1"  # The cable is cut for as long as a command takes to start.
    process = ssh.popen("run", "train.py", *TWO)
    run = wait_for_ranks(ssh, "0:0", "1:1")
    mended.cut("gpu02")
    done = ssh("cancel")
    assert done.rc == 1
    assert done.stderr.splitlines() == [
        f"error: gpu02 cannot be reached; on the other machines nothing of {run.name} is left",
        "  why: gpu02: ssh: connect to host gpu02 port 22: Connection timed out",
        "  fix: an agent that is cut off from the others ends by itself; allranks cancel again to make sure",
    ]
    mended.mend("gpu02")
    wait_until("nothing left on any machine", lambda: left_on(mended, run) == {})
    _, err = process.communicate(timeout=PATIENCE)
    assert f"allranks: {run.name} was cancelled" in err.decode()
    assert re.search(r"^state +CANCELLED\b", ssh("status", run.name).stdout, re.MULTILINE)
