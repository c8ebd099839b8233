"""``allranks check --full`` over SSH: where data goes slowly between nodes, it names the one at fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from nodes import Network


@pytest.fixture
def slow(mended: Network) -> Iterator[str]:
    """Give the name of a node that sends slowly."""
    node = mended.nodes["gpu03"]
    node.run("tc qdisc add dev eth0 root tbf rate 40mbit burst 16kb latency 200ms")
    yield node.name
    node.run("tc qdisc delete dev eth0 root")


@pytest.mark.timeout(400)  # Each of some ten measurements starts four processes; alone it takes 40 s.
def test_a_slow_node_is_named_and_left_out(ssh: Any, slow: str) -> None:
    nodes = ("--hosts", "gpu[01-04]", "--nproc-per-node", "1", "--backend", "gloo")
    done = ssh("check", *nodes, "--only", "culprit", "--json", timeout=300)
    (finding,) = json.loads(done.stdout)["checks"]
    assert (finding["grade"], finding["host"]) == ("WARN", slow), (finding, done.stderr)
    assert finding["what"].startswith("with each node that it was tried with at ")
    assert finding["fix"].endswith(f"; or leave it out: --exclude {slow}")
    ssh.script("import socket\nprint(socket.gethostname())")
    left = ssh("run", "train.py", *nodes, "--exclude", slow, "--no-check")
    assert left.rc == 0, left.stderr
    assert sorted(line.split()[-1] for line in left.stdout.splitlines()) == ["gpu01", "gpu02", "gpu04"]


@pytest.mark.timeout(400)
def test_two_nodes_that_do_not_reach_each_other_are_named(ssh: Any, mended: Network, undo: Any) -> None:
    """Nobody comes to the end of the first collective: the search tells why."""
    node, other = mended.nodes["gpu03"], mended.nodes["gpu04"].ip
    node.run(f"ip route add blackhole {other}")
    undo(node, f"ip route delete blackhole {other}")
    nodes = ("--hosts", "gpu[01-04]", "--nproc-per-node", "1", "--backend", "gloo")
    done = ssh("check", *nodes, "--only", "all-reduce,culprit", "--timeout", "10", "--json", timeout=300)
    all_reduce, culprit = json.loads(done.stdout)["checks"]
    assert (done.rc, all_reduce["grade"], culprit["grade"]) == (3, "FAIL", "FAIL"), done.stderr
    assert culprit["what"].startswith(
        "between gpu03 and gpu04, each of which does well with others: nothing got through"
    )
    assert culprit["fix"].endswith("; or leave it out: --exclude gpu04")
