"""A command on 64 nodes over SSH, all at the same time: ours / pdsh, then ours over kept connections / ours at first.

The nodes are namespaces of this machine with an sshd each. Needs root, openssh and pdsh, as ``make cluster`` does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness import NOT_USUAL, in_turn, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from nodes import Network, why_no_nodes
from ssh_nodes import SSH, SshNodes, why_no_sshd

from allranks.clusters.ssh.transport import run_all, ssh_command
from allranks.job.hosts import parse_hosts

NODES = 64
ROUNDS = 5
#: Both sides' processes of the connections before have ended by then.
SETTLE_SECONDS = 1.0


def main() -> None:
    if why := why_no_nodes() or why_no_sshd() or (None if shutil.which("pdsh") else "there is no pdsh"):
        print(f"skipped: {why}")
        return
    with reached(NODES, PDSH_RCMD_TYPE="ssh") as (nodes, environ):
        _measure(nodes, environ)


@contextmanager
def reached(count: int, **variables: str) -> Iterator[tuple[SshNodes, dict[str, str]]]:
    """Give nodes with an sshd each, and an environment whose ssh reaches them."""
    with tempfile.TemporaryDirectory(prefix="ssh-") as own:
        network = Network(Path(own), [f"gpu{number:02}" for number in range(1, count + 1)])
        network.start()
        try:
            nodes = SshNodes(network, Path(own))
            nodes.start()
            _by_address(network, Path(own))
            usual = {name: value for name, value in os.environ.items() if name not in NOT_USUAL}
            try:
                yield nodes, nodes.env({**usual, **variables})
            finally:
                nodes.stop()
        finally:
            network.stop()


def _measure(nodes: SshNodes, environ: Mapping[str, str]) -> None:
    network = nodes.network
    commands = [ssh_command(host, ["true"]) for host in parse_hosts([*network.nodes])]

    def ours() -> float:
        time.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        answers = run_all(commands, environ)
        seconds = time.perf_counter() - began
        if failed := [answer for answer in answers if answer.code]:
            sys.exit(f"{len(failed)} of {NODES} nodes were not reached: {failed[0].err}")
        return seconds

    def first() -> float:
        nodes.end_kept()
        return ours()

    at_first, again, theirs = in_turn(ROUNDS, first, ours, lambda: _pdsh([*network.nodes], environ))
    report(f"a command on {NODES} nodes", at_first, theirs, "s", "<= 1.0")
    report("the next one, over kept connections; peer: ours at first", again, at_first, "s", "<= 0.2")


def _by_address(network: Network, folder: Path) -> None:
    """Have ssh know the nodes' addresses itself: a namespace for each ssh costs more than the ssh."""
    config = folder / "config"
    known = [f"Host {name}\n    HostName {node.ip}\n" for name, node in network.nodes.items()]
    config.write_text("".join(known) + config.read_text())
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {config} "$@"\n')


def _pdsh(names: list[str], environ: Mapping[str, str]) -> float:
    time.sleep(SETTLE_SECONDS)
    began = time.perf_counter()
    command = ["pdsh", "-S", "-f", str(NODES), "-w", ",".join(names), "true"]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pdsh ended with {done.returncode}: {done.stderr}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
