"""What is wrong with the network between machines is put in for real, and found, with the right one named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from cluster_tools import called, missing_commands, wait_until
from findings import Found, bad, found_by
from needed import need
from nodes import Network, Node

FOUR = ("--nodes", "gpu01,gpu02,gpu03,gpu04")
TWO = ("--nodes", "gpu01,gpu02")
QUICK = ("hostname", "master-name", "dns", "interface", "mtu", "speed", "infiniband", "port", "reach", "clock")
ABROAD = "198.19.0"
#: A clock that is wrong for what asks for the time of day, and right for what measures how long something takes.
WRONG = "export LD_PRELOAD={library}/libfaketime.so.1 FAKETIME=-100s FAKETIME_DONT_FAKE_MONOTONIC=1"
CHAIN = "nft add table inet test && nft add chain inet test {way} '{{ type filter hook {way} priority 0; }}'"
DROP = "&& nft add rule inet test {way} {what} drop"

Undo = Callable[[Node, str], object]


@pytest.fixture
def drop(mended: Network, undo: Undo) -> Callable[[str, str, str], None]:
    """Give what has a node's firewall drop some packets that come in (``input``) or leave it (``output``)."""
    need("firewall", missing_commands({"nft": "nftables"}))

    def drop(name: str, way: str, what: str) -> None:
        mended.nodes[name].run((CHAIN + DROP).format(way=way, what=what))
        undo(mended.nodes[name], "nft delete table inet test")

    return drop


def check(ssh: Any, *args: str, only: tuple[str, ...] = QUICK, node_setup: str = ":") -> Found:
    """Check machines; return what was found."""
    ssh.job(json.dumps({"binary": "true", "environment": {"node_setup": [node_setup]}}))
    flags = ("--backend", "gloo", "--nproc-per-node", "1", "--json", "--only", ",".join(only))
    return found_by(ssh("check", "job.yaml", *flags, *args))


def good(found: Found, name: str) -> list[tuple[str, str]]:
    """Return grades and words of a check."""
    return [(each["grade"], each["what"]) for each in found if each["check"] == name]


def test_nothing_is_wrong_between_healthy_machines(ssh: Any, network: Network) -> None:
    found = check(ssh, *FOUR, "--full", "--master-port", "29710", only=(*QUICK, "mesh"))
    assert bad(found) == {}
    first = network.nodes["gpu01"]
    assert good(found, "master-name") == [("PASS", f"gpu01 means {first.ip}")]
    assert good(found, "hostname")[1] == ("PASS", f"gpu02 means {network.nodes['gpu02'].ip}")
    assert good(found, "interface")[0] == ("PASS", f"eth0, {first.ip}")
    assert good(found, "mtu") == [("PASS", "1500 bytes on all nodes")]
    assert good(found, "port") == [("PASS", "29710 is free")]
    assert good(found, "mesh") == [("PASS", "12 connections between 4 nodes")]
    ((grade, what),) = good(found, "reach")
    assert grade == "PASS" and what.startswith("3 of 3 reach gpu01 at port 29710, there and back in ")
    assert [grade for grade, _ in good(found, "clock")] == ["PASS"]


def test_each_fault_is_found_on_its_machine(ssh: Any, mended: Network, undo: Undo, drop: Any) -> None:
    """A wrong clock and its own name, as Debian has it, on gpu02; a firewall on gpu03; two wrong settings on gpu04.

    It takes more than 10 s: the first machine waits for 10 s for those that cannot reach it.
    """
    need("wrong clock", missing_commands({"faketime": "faketime"}))
    library = called(["sh", "-c", "dirname /usr/lib/*/faketime/libfaketime.so.1"]).strip()
    clock = f'if [ "$(hostname)" = gpu02 ]; then {WRONG.format(library=library)}; fi'
    known = mended.nodes["gpu01"].hosts.read_text().splitlines()
    for name, wrong in (("gpu02", "gpu02"), ("gpu04", "gpu01")):
        others = [line for line in known if not line.endswith(f" {wrong}")]
        own = ssh.script("\n".join([f"127.0.1.1 {wrong}", *others]) + "\n", f"hosts-of-{name}")
        mended.nodes[name].run(["mount", "--bind", str(own), "/etc/hosts"])
        undo(mended.nodes[name], "umount /etc/hosts")
    drop("gpu03", "output", f"ip daddr {mended.nodes['gpu01'].ip}")
    mended.nodes["gpu04"].run("ip link set eth0 mtu 9000")
    undo(mended.nodes["gpu04"], "ip link set eth0 mtu 1500")
    found = check(ssh, *FOUR, "--master-port", "29711", node_setup=clock)
    assert bad(found) == {
        ("hostname", "gpu02"): ("WARN", "gpu02 means 127.0.1.1"),
        ("clock", "gpu02"): ("WARN", "100.0 s behind gpu01"),
        ("reach", "gpu03"): ("FAIL", "it cannot reach gpu01 at port 29711: no answer within 5 s"),
        ("master-name", "gpu04"): ("FAIL", "gpu01 means 127.0.1.1"),
        ("mtu", "gpu04"): ("WARN", "9000 at eth0, and 1500 on the others"),
        ("reach", "gpu04"): ("FAIL", "it cannot reach gpu01 at port 29711: connection refused"),
    }
    ((_, what),) = [each for each in good(found, "reach") if each[0] == "PASS"]
    assert what.startswith("1 of 3 reach gpu01 at port 29711")
    assert next(each["fix"] for each in found if each["check"] == "reach").endswith(
        "; or leave it out: --exclude gpu03"
    )


def test_a_port_that_is_in_use(ssh: Any, network: Network) -> None:
    code = "import socket\nheld = socket.create_server(('', 29712))\nprint('held', flush=True)\ninput()"
    with network.nodes["gpu01"].popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as held:
        assert held.stdout.readline() == "held\n"
        pid = network.nodes["gpu01"].run(["pgrep", "-f", "29712"]).split()[0]
        found = check(ssh, *FOUR, "--master-port", "29712")
        held.communicate("\n")
    ((key, (grade, what)),) = bad(found).items()
    assert (key, grade) == (("port", "gpu01"), "FAIL")
    assert what.startswith(f"29712: address already in use, by process {pid}: {sys.executable} -c import socket")
    assert good(found, "reach") == [("SKIP", "gpu01 cannot listen at port 29712: see check port")]


def test_a_first_machine_that_lets_nobody_in(ssh: Any, drop: Any) -> None:
    """It takes more than 10 s: the first machine waits for 10 s for the others."""
    drop("gpu01", "input", "tcp dport 29714")
    assert bad(check(ssh, *FOUR, "--master-port", "29714")) == {
        ("reach", "gpu01"): ("FAIL", "none of 3 other nodes reaches gpu01 at port 29714: no answer within 5 s")
    }


def test_a_link_that_two_machines_do_not_have(ssh: Any, drop: Any, mended: Network) -> None:
    """All reach the first machine: only who tries each link can find it."""
    drop("gpu02", "output", f"ip daddr {mended.nodes['gpu03'].ip}")
    found = check(ssh, *FOUR, "--full", "--master-port", "29715", only=("reach", "mesh"))
    assert bad(found) == {
        ("mesh", "gpu02"): ("FAIL", "it and gpu03 cannot connect to each other: no answer within 5 s")
    }


def test_an_interface_that_is_down(ssh: Any, mended: Network, undo: Undo) -> None:
    """A second network, where they are to meet, that gpu02 has no cable to any more.

    It takes more than 10 s: the first machine waits for 10 s for the other one.
    """
    first, second = mended.nodes["gpu01"], mended.nodes["gpu02"]
    ends = [["name", "eth1", "netns", str(node.pid)] for node in (first, second)]
    called(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    undo(first, "ip link delete eth1")
    for number, node in enumerate((first, second), 1):
        node.run(f"ip addr add {ABROAD}.{number}/24 dev eth1 && ip link set eth1 up")
    second.run("ip link set eth1 down")

    def state() -> str:
        """What the kernel says of a cable without another end: down, or lowerlayerdown, as its peer is numbered."""
        return first.run("cat /sys/class/net/eth1/operstate").strip()

    wait_until("eth1 to be down", lambda: state() != "up")
    found = check(ssh, *TWO, "--master-addr", f"{ABROAD}.1", "--master-port", "29716")
    assert bad(found) == {
        ("interface", "gpu01"): ("FAIL", f"eth1 is {state()}"),
        ("interface", "gpu02"): ("FAIL", f"there is no route to {ABROAD}.1: Network is unreachable"),
        ("reach", "gpu02"): ("FAIL", f"it cannot reach {ABROAD}.1 at port 29716: network is unreachable"),
    }
