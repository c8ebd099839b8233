"""``allranks check --full`` over SSH: where data goes slowly between nodes, it names the one at fault."""

from __future__ import annotations

import json
from typing import Any

from links import shaped
from nodes import Network

from waiting import PATIENCE

#: One more than two: of two nodes alone nobody could say which is at fault.
THREE = ("--hosts", "gpu[01,03-04]", "--nproc-per-node", "1", "--backend", "gloo")


def test_a_slow_node_is_named_and_left_out(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: ranks of the search import torch, and what is slow must be measured, several times.

    Alone it takes a minute: each of some ten measurements starts three processes.
    """
    slow = "gpu03"
    with shaped(mended, slow):
        done = ssh("check", *THREE, "--only", "culprit", "--json", timeout=2 * PATIENCE)
    found = json.loads(done.stdout)["checks"]
    named = [(finding["grade"], finding["host"], finding["exclude"]) for finding in found]
    assert named == [("WARN", slow, slow)], (found, done.stderr)
    (finding,) = found
    assert finding["what"].startswith("with each node that it was tried with at ")
    assert finding["fix"].endswith(f"; or leave it out: --exclude {slow}")
    ssh.script("import socket\nprint(socket.gethostname())")
    left = ssh("run", "train.py", *THREE, "--exclude", slow, "--no-check")
    assert left.rc == 0, left.stderr
    assert sorted(line.split()[-1] for line in left.stdout.splitlines()) == ["gpu01", "gpu04"]


def test_two_nodes_that_do_not_reach_each_other_are_named(ssh: Any, mended: Network, undo: Any) -> None:
    """No rank comes to the end of the first collective: the search says why, after its timeouts of 10 s."""
    node, other = mended.nodes["gpu03"], mended.nodes["gpu04"].ip
    node.run(f"ip route add blackhole {other}")
    undo(node, f"ip route delete blackhole {other}")
    done = ssh("check", *THREE, "--only", "all-reduce,culprit", "--timeout", "10", "--json", timeout=2 * PATIENCE)
    all_reduce, culprit = json.loads(done.stdout)["checks"]
    assert (done.rc, all_reduce["grade"], culprit["grade"]) == (3, "FAIL", "FAIL"), done.stderr
    assert culprit["what"].startswith(
        "between gpu03 and gpu04, each of which does well with others: nothing got through"
    )
    assert culprit["fix"].endswith("; or leave it out: --exclude gpu04")
