"""Agents of several nodes, started by hand with what a scheduler's script would tell them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.record.files import KEY_BYTES, copy_node_code, write_key
from allranks.system.processes import marked
from node_orders import NODE
from waiting import PATIENCE

#: Starts a command on a node, with an environment and files for stdout and stderr.
Popen = Callable[..., "subprocess.Popen[bytes]"]


def free_port() -> int:
    """Return a port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass
class ByHand:
    """One run of a script on several nodes, in ``folder``.

    Attributes:
        folder: the run's directory.
        env: what every agent gets, before what tells it its place.
        nodes: how many agents there are to be.
        host: where they meet.
        key: of the run.
        popen: starts a command on a node; on this machine by default.
    """

    folder: Path
    env: Mapping[str, str]
    nodes: int = 2
    host: str = "127.0.0.1"
    popen: Callable[[int], Popen] = lambda node: subprocess.Popen
    port: int = field(default_factory=free_port)
    key: bytes = field(default_factory=lambda: os.urandom(KEY_BYTES))
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def orders(self, script: str, *args: str, **fields: Any) -> None:
        """Write the orders that all nodes share, and the script."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / "train.py"
        target.write_text(script)
        write_key(self.folder / contract.KEY_FILE, self.key)
        run = {"run_id": self.folder.name, "run_dir": str(self.folder), "nnodes": self.nodes, "min_nodes": self.nodes}
        spec = NODE._replace(**{**run, "target": str(target), "args": args, **fields})
        (self.folder / "node.json").write_text(spec.to_json())
        if not (self.folder / "code").exists():
            copy_node_code(self.folder / "code")

    def start(self, *nodes: int, ranks: int = 2, **env: str | None) -> None:
        """Start the agents of these nodes, of all by default; ``env`` is added, None removes."""
        for node in nodes or range(self.nodes):
            place = {
                contract.RUN_DIR: str(self.folder),
                contract.ATTEMPT: "0",
                contract.NODE_RANK: str(node),
                contract.NODE_COUNT: str(self.nodes),
                contract.NODE_NPROC: str(ranks),
                contract.RDZV_HOST: self.host,
                contract.RDZV_PORT: str(self.port),
            }
            given = {name: value for name, value in {**self.env, **place, **env}.items() if value is not None}
            with (self.folder / f"agent-{node}.log").open("ab") as log:
                self.agents[node] = self.popen(node)(
                    [sys.executable, str(self.folder / "code"), str(self.folder / "node.json")],
                    env=given,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def wait(self, *nodes: int, seconds: float = PATIENCE) -> list[int]:
        """Wait for the end of agents, of all by default; return their exit codes."""
        deadline = time.monotonic() + seconds
        return [self.agents[node].wait(deadline - time.monotonic()) for node in nodes or sorted(self.agents)]

    def events(self, node: int, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events that a node's agent has told so far, all or of one kind."""
        path = self.folder / contract.node_dir(0, node) / contract.AGENT_EVENTS
        text = path.read_text() if path.exists() else ""
        told = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in told if kind in (None, event["kind"])]

    def event(self, node: int, kind: str, number: int = 1) -> dict[str, Any]:
        """Wait for an event of a kind, or for so many of them, and return the last."""
        deadline = time.monotonic() + PATIENCE
        while len(found := self.events(node, kind)) < number:
            assert time.monotonic() < deadline, f"waited for {kind} of node {node}: {self.log(node)}"
            time.sleep(0.01)
        return found[number - 1]

    def ended(self, node: int) -> tuple[str, int, int | None, str | None]:
        """Return how a node's agent says that it has ended: state, exit code, blamed rank and reason."""
        (event,) = self.events(node, contract.ENDED)
        return event["state"], event["exit_code"], event["because_of_rank"], event["reason"]

    def said(self, node: int, rank: int, stream: str = "out") -> str:
        """Return what a rank of a node has written."""
        path = self.folder / contract.node_dir(0, node) / contract.rank_log(rank, stream)
        return path.read_text() if path.exists() else ""

    def log(self, node: int) -> str:
        """Return what a node's agent has written."""
        return (self.folder / f"agent-{node}.log").read_text()

    def pids(self, node: int, generation: int = 1) -> list[int]:
        """Wait for a generation of ranks, and return the process ids of a node's."""
        return [rank["pid"] for rank in self.event(node, contract.RANKS_STARTED, generation)["ranks"]]

    def close(self) -> None:
        """Kill all that is left."""
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        deadline = time.monotonic() + PATIENCE
        while left := marked(contract.RUN_DIR, str(self.folder)):
            assert time.monotonic() < deadline, f"processes of {self.folder} do not end: {left}"
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
