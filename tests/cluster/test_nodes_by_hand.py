"""``allranks node`` on each node, by people who may not ssh between nodes and share no filesystem between them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import wait_until
from nodes import Network
from ranks_told import PLACES, UP, WHO, who
from trainings import SCRIPT, undisturbed

from exact_runs import weights_in
from waiting import PATIENCE

#: So many steps that a training which is slow until it is let go cannot end before it is stopped.
OPTIONS = ("--epochs", "12", "--every", "10", "--quiet")


@dataclass
class ByHand:
    """Nodes of a network, on each of which a person types a command, in a directory that only this node has.

    Attributes:
        network: the nodes.
        folder: holds the directories of the nodes.
        env: what each command gets.
    """

    network: Network
    folder: Path
    env: Mapping[str, str]
    typed: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def at(self, node: int) -> Path:
        """Return the directory of a node."""
        folder = self.folder / f"of-{node}"
        folder.mkdir(exist_ok=True)
        return folder

    def type(self, node: int, *words: str | Path) -> None:
        """Type a command on a node."""
        self.typed[node] = self.network.nodes[f"gpu{node + 1:02}"].popen(
            ["sh", "-c", 'echo $$ >typed; exec "$@"', "sh", sys.executable, "-m", "allranks", *words],
            self.at(node),
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def start(self, nodes: int, script: str | Path, *flags: str, ranks: int = 1) -> None:
        """Type ``allranks node`` on each node, on the first one last."""
        for node in reversed(range(nodes)):
            place = ("--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "gpu01")
            if isinstance(script, str):
                (self.at(node) / "train.py").write_text(script)
            target = "train.py" if isinstance(script, str) else script
            self.type(node, "node", target, *place, "--nproc-per-node", str(ranks), *flags)

    def said(self, node: int) -> tuple[int, str, str]:
        """Wait for the end of a node's command; return its exit code, stdout and stderr."""
        out, err = self.typed[node].communicate(timeout=PATIENCE)
        return self.typed[node].returncode, out, err

    def run(self, node: int) -> Path:
        """Return the directory of a node's only run."""
        (run,) = [folder for folder in (self.at(node) / "runs").glob("[!.]*") if not folder.is_symlink()]
        return run

    def record(self, node: int) -> dict[str, Any]:
        """Return what the record of a node's only run holds."""
        record: dict[str, Any] = json.loads((self.run(node) / "record.json").read_text())
        return record


@pytest.fixture
def network(bare_network: Network) -> Network:
    """Give nodes that need no sshd: all of them restart after each test."""
    return bare_network


@pytest.fixture
def by_hand(network: Network, tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[ByHand]:
    """Give the nodes; they are whole again afterwards."""
    yield ByHand(network, tmp_path, {**allranks_env, "OMP_NUM_THREADS": "1"})
    for name in network.nodes:
        network.kill(name)
    network.start_nodes(network.nodes)


@pytest.mark.smoke
@pytest.mark.parametrize(("nodes", "script"), [(2, WHO), (4, PLACES)])
def test_all_meet(by_hand: ByHand, nodes: int, script: str) -> None:
    """It takes more than 10 s on a slow machine: where ranks meet, agents import torch on two nodes."""
    by_hand.start(nodes, script, ranks=2)
    told = []
    for node in range(nodes):
        code, out, err = by_hand.said(node)
        name = by_hand.run(node).name
        place = f"2 ranks on this machine, node {node} of {nodes} that meet at gpu01, port 29500"
        first, *_, last = err.splitlines()
        assert first == f"allranks: {name}: {place}, backend gloo (no GPU on this machine)"
        assert last.startswith(f"allranks: {name} succeeded in ")
        assert code == 0
        told += who(out)
        record = by_hand.record(node)
        assert (record["world_size"], record["nnodes"], record["status"]["state"]) == (2 * nodes, nodes, "SUCCEEDED")
    world = 2 * nodes
    assert told == [[rank, rank % 2, world, 2, f"gpu{rank // 2 + 1:02}", world] for rank in range(world)]


def test_a_training_that_was_stopped_on_one_node_goes_on_exactly(by_hand: ByHand, allranks: Any) -> None:
    """It takes more than 10 s: a training, its continuation, and the undisturbed one."""
    by_hand.start(2, SCRIPT, "--", "--folder", "checkpoints", "--slow-until", "go", *OPTIONS)
    latest = by_hand.at(0) / "checkpoints" / "latest"
    wait_until("a checkpoint", latest.exists)
    _type_ctrl_c(by_hand, 1)
    codes, shown = zip(*((code, err) for code, _, err in map(by_hand.said, (0, 1))), strict=True)
    assert codes == (130, 130)
    assert re.search(r"was cancelled at step \d+, with a checkpoint \(node 1 \(gpu02\): got SIGINT\)\n", shown[0])
    assert "was cancelled (got SIGINT)\n" in shown[1]
    assert not (by_hand.at(1) / "checkpoints").exists()  # The second node needs none: the first one tells it.
    for node in (0, 1):
        (by_hand.at(node) / "go").touch()
        by_hand.type(node, "resume")
    (code, out, err), (other, _, _) = map(by_hand.said, (0, 1))
    assert (code, other) == (0, 0), err
    assert re.search(r"continuing from checkpoints/step-\d+ \(\d+ epochs? done, step [1-9]\d*\)", err)
    assert weights_in(out) == undisturbed(allranks, *OPTIONS)


def test_a_rank_that_fails_is_named_on_all_nodes(by_hand: ByHand) -> None:
    by_hand.start(2, f'import os\nif os.environ["RANK"] == "1":\n    raise ValueError("no data")\n{UP}')
    (code, _, err), (other, _, shown) = map(by_hand.said, (0, 1))
    assert (code, other) == (1, 1)
    assert err.splitlines()[-2:] == [
        "error: rank 1 on gpu02 exited with code 1",
        "  fix: allranks logs --rank 1 where that rank ran: its output is not here",
    ]
    name = by_hand.run(1).name
    assert shown.splitlines()[-4:] == [
        "error: rank 1 on gpu02 exited with code 1",
        "  why: ValueError: no data (train.py:3)",
        "  fix: correct train.py:3, then: start each node again",
        f"  see: runs/{name}/attempts/000/node-001/rank-1.err",
    ]


def test_a_node_that_loses_power_is_named_at_once(by_hand: ByHand, network: Network) -> None:
    by_hand.start(3, UP)
    log = "attempts/000/node-000/rank-0.out"
    wait_until("all to be up", lambda: _text(lambda: by_hand.run(0) / log) == "up\n")
    network.kill("gpu03")
    for node in (0, 1):
        code, _, err = by_hand.said(node)
        assert code == 1
        assert "node 2 (gpu03) was lost: the connection broke" in err
    assert by_hand.record(0)["status"]["state"] == "FAILED"


def test_nodes_that_were_told_different_things(by_hand: ByHand) -> None:
    script = "raise SystemExit('must not start')\n"
    by_hand.start(1, script, "--nnodes", "2")
    (by_hand.at(1) / "train.py").write_text(script)
    (by_hand.at(2) / "other.py").write_text(script)
    place = ("--master-addr", "gpu01")
    by_hand.type(1, "node", "train.py", "--nnodes", "3", "--node-rank", "2", *place)
    by_hand.type(2, "node", "other.py", "--nnodes", "2", "--node-rank", "1", *place)
    code, _, err = by_hand.said(1)
    assert code == 1
    assert err.splitlines()[-3:] == [
        "error: node 2 (gpu02) was rejected by the agent at gpu01:29500",
        "  why: the agent there expects 2 nodes",
        "  fix: --master-addr and --master-port must be the same on all nodes of a job, and no other's",
    ]
    assert_another_key(by_hand, 2)
    _type_ctrl_c(by_hand, 0)
    assert by_hand.said(0)[0] == 130


def assert_another_key(by_hand: ByHand, node: int) -> None:
    """The agent of node 0 has not let it in, and it says what may be the reason."""
    code, _, err = by_hand.said(node)
    assert code == 1
    assert err.splitlines()[-3:] == [
        f"error: node 1 (gpu{node + 1:02}) cannot reach node 0 at gpu01:29500 for 3 s",
        "  why: the agent there has another key, or has ended",
        "  fix: another run may have that port; nodes that are started by hand need the same job name, --master-addr, "
        "--master-port and key: ~/.config/allranks/key, or the file that ALLRANKS_KEY_FILE names",
    ]


def test_nodes_with_different_keys_do_not_meet_and_with_the_same_they_do(by_hand: ByHand) -> None:
    """As where each node has a home directory of its own."""
    for node, digits in ((0, "00"), (1, "11"), (2, "00")):
        (by_hand.at(node) / "mine").write_text(digits * 32)
    by_hand.env = {**by_hand.env, "ALLRANKS_KEY_FILE": "mine"}
    by_hand.start(1, PLACES, "--nnodes", "2")
    for node in (1, 2):
        (by_hand.at(node) / "train.py").write_text(PLACES)
        by_hand.type(node, "node", "train.py", "--nnodes", "2", "--node-rank", "1", "--master-addr", "gpu01")
        if node == 1:
            assert_another_key(by_hand, 1)
    assert [by_hand.said(node)[0] for node in (0, 2)] == [0, 0]
    log = next((by_hand.at(0) / "runs").glob("train-*/attempts/000/node-000/agent.log")).read_text()
    assert log.count(": it does not know the run's key; others are only counted\n") == 1


def test_a_port_that_is_taken(by_hand: ByHand, network: Network) -> None:
    holder = "import socket; s = socket.create_server(('', 29500)); print('held', flush=True); s.accept()"
    held = network.nodes["gpu01"].popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    by_hand.start(1, "", "--nnodes", "2")
    code, _, err = by_hand.said(0)
    assert code == 1
    address = network.nodes["gpu01"].ip
    assert err.splitlines()[-3:] == [
        "error: cannot listen on port 29500 of this machine",
        f"  why: Address already in use (while attempting to bind on address ('{address}', 29500))",
        "  fix: launch.master_port (--master-port) must be a free port of node 0",
    ]


def _type_ctrl_c(by_hand: ByHand, node: int) -> None:
    """Do what a terminal does: tell the command in its foreground, once it has started the run."""
    wait_until("the run", lambda: (by_hand.at(node) / "runs" / "latest").exists())
    by_hand.network.nodes[f"gpu{node + 1:02}"].run(["kill", "-INT", (by_hand.at(node) / "typed").read_text().strip()])


def _text(path: Callable[[], Path]) -> str:
    try:
        return path().read_text()
    except (OSError, ValueError):
        return ""
