"""Agents on nodes with networks of their own: which address and interface they take, and what a cut cable does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Network

from agents_by_hand import ByHand
from allranks import contract
from waiting import PATIENCE

NAMES = ["gpu01", "gpu02", "gpu03"]
TRAIN = """\
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(value)
names = "RANK WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME"
print(*(os.environ[name] for name in names.split()), int(value), flush=True)
while "HANG" in os.environ:
    dist.barrier()
    time.sleep(0.02)
"""


@pytest.fixture
def network(bare_network: Network) -> Network:
    """Give nodes that need no sshd: all of them restart after each test."""
    return bare_network


@pytest.fixture
def run(network: Network, tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[ByHand]:
    """Give a run on all nodes; they are whole again afterwards."""

    def popen(number: int) -> Any:
        def start(command: list[str], cwd: Path, start_new_session: bool, **options: Any) -> subprocess.Popen[bytes]:
            return network.nodes[NAMES[number]].popen(command, cwd, **options)

        return start

    run = ByHand(tmp_path / "runs" / "by-hand", allranks_env, nodes=3, host=NAMES[0], popen=popen)
    yield run
    for name in NAMES:
        network.kill(name)
    network.start_nodes(NAMES)


def line(run: ByHand, node: int, rank: int, text: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while text not in run.said(node, rank).splitlines():
        assert time.monotonic() < deadline, f"{run.said(node, rank)}{run.said(node, rank, 'err')}{run.log(node)}"
        time.sleep(0.02)


def test_nodes_meet_by_the_name_of_the_first_over_the_interface_of_the_route(network: Network, run: ByHand) -> None:
    """It takes more than 10 s: ranks import torch on each node."""
    run.orders(TRAIN)
    run.start(1, 2, 0, ranks=1)
    assert run.wait() == [0, 0, 0]
    address = network.nodes["gpu01"].ip
    assert [run.said(node, node) for node in range(3)] == [f"{node} 3 {address} eth0 3\n" for node in range(3)]
    (told,) = run.events(1, contract.SETTINGS)
    values = {setting["name"]: (setting["value"], setting["why"]) for setting in told["settings"]}
    assert values["GLOO_SOCKET_IFNAME"] == ("eth0", "it carries the route to gpu01")
    assert "GLOO_SOCKET_IFNAME=eth0: it carries the route to gpu01\n" in run.log(1)


def test_a_cable_that_is_pulled_parts_the_nodes(network: Network, run: ByHand) -> None:
    """The greater part continues; the node that is cut off ends, though nobody can tell it to.

    It takes more than 10 s on a slow machine: ranks import torch on each node, and the cut must be noticed.
    """
    run.orders(TRAIN, min_nodes=2)
    run.start(ranks=1, HANG="1")
    address = network.nodes["gpu01"].ip
    line(run, 2, 2, f"2 3 {address} eth0 3")
    network.cut("gpu02")
    line(run, 2, 1, f"1 2 {address} eth0 1")
    assert run.wait(1) == [1]
    state, _, rank, reason = run.ended(1)
    assert (state, rank) == ("FAILED", None)
    assert str(reason).startswith("node 0 (gpu01) was lost: the connection broke: ")
    (lost,) = run.events(0, contract.NODE_LOST)
    assert (lost["node"], lost["host"]) == (1, "gpu02")
    assert lost["why"].startswith("the connection broke: ")


def test_a_node_that_loses_power_ends_all_if_it_is_needed(network: Network, run: ByHand) -> None:
    """It takes more than 10 s on a slow machine: ranks import torch on each node, and the loss must be noticed."""
    run.orders(TRAIN, max_restarts=3)
    run.start(ranks=1, HANG="1")
    line(run, 0, 0, f"0 3 {network.nodes['gpu01'].ip} eth0 3")
    network.kill("gpu03")
    assert run.wait(0, 1) == [1, 1]
    assert run.ended(0) == run.ended(1)
    state, _, rank, reason = run.ended(0)
    assert (state, rank) == ("FAILED", None)
    assert str(reason).startswith("node 2 (gpu03) was lost: the connection broke: ")
    assert str(reason).endswith("(2 of 3 nodes left, 3 needed)")
