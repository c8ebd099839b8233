"""``allranks check --quick`` of 4 nodes over SSH / starting Python with torch on them; then of 64 nodes / of 4.

The nodes are namespaces of this machine with an sshd each, and share its CPUs: on few cores 64 of them wait for each
other, as 64 machines would not. So the second ratio is measured in two ways: with these nodes, for which there is no
bar, and with a stand-in for ssh that waits as long as one real node took and then tells what that node told, as 64
machines with CPUs of their own would. Needs root and openssh, as ``make cluster`` does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from harness import ALLRANKS, PYTHON, in_turn, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cluster"))

from nodes import why_no_nodes
from ssh_nodes import SSH, SshNodes, why_no_sshd
from ssh_start import reached

from allranks.checks.collect.gather import ProbeRequest, gather, report_lines
from allranks.clusters.ssh.transport import run_all, ssh_command
from allranks.job.hosts import parse_hosts

FEW, MANY = 4, 64
ROUNDS = 5
#: It answers when as much time has gone by as a node takes. Its last word ends with the node's number.
STAND_IN = """\
#!/bin/bash
[ "$1" != -V ] || exec {ssh} -V
case " $* " in *" -G "*) exec {ssh} "$@" ;; esac
cat >/dev/null
sleep {seconds}
last="${{@: -1}}"
cat '{folder}'/node-"${{last##* }}"
"""


def main() -> None:
    if why := why_no_nodes() or why_no_sshd():
        print(f"skipped: {why}")
        return
    with reached(MANY) as (nodes, environ):
        _measure(nodes, environ)


def _measure(nodes: SshNodes, environ: Mapping[str, str]) -> None:
    names, folder = [*nodes.network.nodes], nodes.folder
    (folder / "train.py").write_text("import torch\n")
    torch = [ssh_command(host, [PYTHON, "-c", "import torch"]) for host in parse_hosts(names[:FEW])]

    def start_torch() -> float:
        began = time.perf_counter()
        answers = run_all(torch, environ)
        if failed := [answer for answer in answers if answer.code]:
            sys.exit(f"torch was not imported: {failed[0].err}")
        return time.perf_counter() - began

    one, few, many, peer = in_turn(
        ROUNDS,
        lambda: _check(names[:1], folder, environ),
        lambda: _check(names[:FEW], folder, environ),
        lambda: _check(names, folder, environ),
        start_torch,
    )
    report(f"check of {FEW} nodes; peer: Python with torch on them", few, peer, "s", "<= 2.0")
    report(f"check of {MANY} nodes that share this machine; peer: of {FEW}", many, few, "s", "none")
    _as_if_apart(folder, names, environ, one)


def _as_if_apart(folder: Path, names: list[str], environ: Mapping[str, str], seconds: float) -> None:
    """Measure with a stand-in for ssh: what the command itself takes for more nodes."""
    found = gather(
        ProbeRequest(("host", "cpus", "memory", "shm", "limits", "disks", "torch", "variables", "leftovers"))
    )
    for number in range(MANY):
        (folder / f"node-{number}").write_text("\n".join(report_lines(number, found)) + "\n")
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(STAND_IN.format(ssh=SSH, seconds=f"{seconds:.3f}", folder=folder))
    few, many = in_turn(ROUNDS, lambda: _check(names[:FEW], folder, environ), lambda: _check(names, folder, environ))
    report(f"check of {MANY} nodes with CPUs of their own (stand-in for ssh); peer: of {FEW}", many, few, "s", "<= 1.5")


def _check(names: list[str], folder: Path, environ: Mapping[str, str]) -> float:
    command = [*ALLRANKS, "check", "train.py", "--nodes", ",".join(names), "--backend", "gloo", "--nproc-per-node", "1"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--skip", "shared"], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
