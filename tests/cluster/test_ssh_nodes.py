"""The nodes that are reached over ssh: names, keys, and what breaks either."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from needed import need
from nodes import Network
from ssh_nodes import SshNodes, why_no_sshd

from waiting import PATIENCE

BATCH = ("-o", "BatchMode=yes")


@pytest.fixture(scope="module")
def network(bare_network: Network) -> Network:
    """Give nodes that no other test has sshds on."""
    return bare_network


@pytest.fixture(scope="module")
def ssh_nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Give sshds of this module's own: one test ends them for good."""
    need("sshd", why_no_sshd())
    ssh_nodes = SshNodes(network, tmp_path_factory.mktemp("ssh"))
    ssh_nodes.start()
    yield ssh_nodes
    ssh_nodes.stop()


@pytest.fixture
def nodes(ssh_nodes: SshNodes) -> Iterator[SshNodes]:
    """Give the nodes; what a test broke is whole again afterwards."""
    yield ssh_nodes
    ssh_nodes.know_all()
    for name in ssh_nodes.network.nodes:
        ssh_nodes.restart(name)


def ssh(nodes: SshNodes, *words: str) -> tuple[int, str, str]:
    """Run the user's ssh on this machine."""
    done = subprocess.run(
        ["ssh", *words], env=nodes.env(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "hostname"), [*((f"gpu{number:02}",) * 2 for number in range(1, 5)), ("alias01", "gpu01")]
)
def test_a_name_leads_to_its_node(ssh_nodes: SshNodes, name: str, hostname: str) -> None:
    assert ssh(ssh_nodes, name, "hostname") == (0, f"{hostname}\n", "")


def test_an_address_leads_to_its_node(ssh_nodes: SshNodes) -> None:
    assert ssh(ssh_nodes, ssh_nodes.network.nodes["gpu03"].ip, "hostname") == (0, "gpu03\n", "")


def test_one_node_reaches_another_by_the_name_that_ssh_tells_here(ssh_nodes: SshNodes) -> None:
    code, told, _ = ssh(ssh_nodes, "-G", "alias01")
    (name,) = [line.split()[1] for line in told.splitlines() if line.startswith("hostname ")]
    assert (code, name) == (0, "gpu01")
    other = ssh_nodes.network.nodes["gpu02"]
    # SSH_CONNECTION holds both addresses: it says that the connection came from that node.
    came = other.run(["ssh", *BATCH, name, "hostname; echo $SSH_CONNECTION"], env=ssh_nodes.env(os.environ)).split()
    assert came[:2] == ["gpu01", other.ip]


def test_a_key_that_is_not_known(nodes: SshNodes) -> None:
    nodes.forget_key("gpu02")
    code, out, err = ssh(nodes, *BATCH, "gpu02", "hostname")
    assert (code, out) == (255, "")
    assert err.splitlines()[-1] == "Host key verification failed."
    assert ssh(nodes, *BATCH, "gpu01", "hostname") == (0, "gpu01\n", "")
    nodes.know_all()
    assert ssh(nodes, *BATCH, "gpu02", "hostname") == (0, "gpu02\n", "")


def test_a_user_who_is_locked_out(nodes: SshNodes) -> None:
    nodes.lock_out("gpu02")
    denied = "root@gpu02: Permission denied (publickey).\n"
    assert ssh(nodes, *BATCH, "gpu02", "hostname") == (255, "", denied)
    assert ssh(nodes, *BATCH, "gpu01", "hostname") == (0, "gpu01\n", "")
    nodes.restart("gpu02")
    assert ssh(nodes, *BATCH, "gpu02", "hostname") == (0, "gpu02\n", "")


def test_a_node_that_was_started_anew(nodes: SshNodes, network: Network) -> None:
    network.kill("gpu04")
    assert nodes.processes("gpu04") == []
    network.start_nodes(["gpu04"])
    nodes.restart("gpu04")
    assert ssh(nodes, *BATCH, "gpu04", "hostname") == (0, "gpu04\n", "")


def test_nothing_is_left_after_the_end(nodes: SshNodes) -> None:
    with subprocess.Popen(
        ["ssh", *BATCH, "gpu01", "echo up; exec cat"],
        env=nodes.env(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as connected:
        assert connected.stdout is not None
        assert connected.stdout.readline() == b"up\n"
        # One that listens, and those of the connection.
        assert len(nodes.processes("gpu01")) > 1
        assert all(nodes.processes(name) for name in nodes.network.nodes)
        nodes.stop()
        assert [nodes.processes(name) for name in nodes.network.nodes] == [[], [], [], []]
        assert connected.wait(timeout=PATIENCE) == 255
    code, _, err = ssh(nodes, *BATCH, "gpu01", "hostname")
    assert (code, err) == (255, "ssh: connect to host gpu01 port 22: Connection refused\n")
