"""What the launch guide shows for clusters starts the ranks that it promises, on the nodes that it promises.

Scripts here import no torch: where the ranks are is the subject.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import missing_commands
from followed_runs import hosts_of, run_named
from grid_engine_cluster import GridEngineCluster
from needed import need
from nodes import Network
from pbs_cluster import PbsCluster
from ranks_told import PLACES, expected, who
from slurm_cluster import SlurmCluster
from slurm_conf import Shape
from slurm_daemons import why_no_slurm

from launch_guide import Way, arguments, typed, ways
from terminals import Terminal
from waiting import PATIENCE

BIN = str(Path(sys.executable).parent)
#: Nothing is checked, as in all tests; only Slurm and PBS believe in their GPUs.
HERE_TOO = ["--no-check", "--backend", "gloo"]
MACHINES = ["gpu01", "gpu02"]
WIDE = "Many nodes, torchrun on each: 4 × 8"


def in_a_shell(lab: Any, way: Way) -> list[str]:
    """Return the words of ``allranks shell``, the way's first line, with its second line as what is typed there."""
    shell, run = map(arguments, way.lines)
    line = shlex.join(["cd", str(lab.folder)]) + " && " + shlex.join([f"{BIN}/allranks", *run, *HERE_TOO])
    return [*shell, "--", "sh", "-c", line]


def test_over_ssh(ssh: Any, network: Network) -> None:
    """It takes more than 10 s on a slow machine: it is seven commands on two machines."""
    need("pdsh", missing_commands({"pdsh": "pdsh"}))
    ssh.script(PLACES)
    ssh.script("gpu01\ngpu02\n", "hosts.txt")
    ssh.script("lab: {kind: pdsh, resources: {hosts: 'gpu[01-04]'}}\n", "clusters.yaml")
    ssh.env["PDSH_RCMD_TYPE"] = "ssh"
    by_hand, check = "One torchrun line for each machine", "Looking at each machine first"
    here = ways("Machines over SSH")
    for heading in ("A loop of ssh", "A file of hosts", "pdsh"):
        assert who(typed(ssh, here[heading])) == expected(here[heading].counts, MACHINES), heading
    pasted = [
        network.nodes[host].popen(
            ["bash", "-c", line], ssh.folder, env={**ssh.env, "PATH": f"{BIN}:{ssh.env['PATH']}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host, line in zip(MACHINES, here[by_hand].lines, strict=True)
    ]  # fmt: skip
    said = [process.communicate(timeout=PATIENCE) for process in pasted]
    assert who("".join(out for out, _ in said)) == expected(here[by_hand].counts, MACHINES), said
    count = len(ssh.runs())
    checked = ssh(*here[check].words)
    assert (checked.rc, len(ssh.runs())) == (0, count), checked.stderr
    assert {*here} == {by_hand, "A loop of ssh", "A file of hosts", "pdsh", check}


def test_on_slurm(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: it is seven jobs, and the ranks of the small test import torch on two nodes."""
    lab.script(PLACES)
    here = ways("Slurm")
    batch = ["A batch script for one node", "Many nodes, torchrun on each: 2 × 4", "srun that starts the ranks"]
    for heading in batch:
        assert who(typed(lab, here[heading])) == expected(here[heading].counts), heading
    own = here["A batch script of your own"]
    line = f"--wrap={own.lines[0]} {' '.join(HERE_TOO)}"
    job = slurm.sbatch("--nodes=2", "--gres=gpu:4", "--output=log", line, folder=lab.folder)
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    assert who((lab.folder / "log").read_text()) == expected(own.counts)
    shell = lab(*in_a_shell(lab, here["salloc"]))
    assert who(shell.stdout) == expected(here["salloc"].counts), shell.stderr
    small = lab(*here["A small test job"].words)
    assert small.rc == 0, small.stderr
    record = lab.record(run_named(lab, "test"))
    assert [record["world_size"] // record["nnodes"]] * record["nnodes"] == here["A small test job"].counts
    assert {*here} == {*batch, WIDE, "A batch script of your own", "salloc", "A small test job"}


def test_on_nodes_with_eight_gpus(allranks: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It takes more than 10 s: it has a cluster of its own."""
    shape = Shape(gpus=8)
    need("Slurm cluster", why_no_slurm(shape))
    allranks.script(PLACES)
    allranks.script("lab: {kind: slurm, launch: {backend: gloo}}\n", "clusters.yaml")
    way = ways("Slurm")[WIDE]
    with SlurmCluster(tmp_path_factory.mktemp("eight"), shape) as cluster:
        allranks.env.update(cluster.env)
        assert who(typed(allranks, way)) == expected(way.counts)


def test_on_pbs(pbs_lab: Any, pbs: PbsCluster, terminals: list[Terminal]) -> None:
    """It takes more than 10 s on a slow machine: two jobs, one after the other."""
    pbs_lab.script(PLACES)
    pbs_lab.env.update(SHELL="/bin/sh", PATH=f"{BIN}:{pbs_lab.env['PATH']}")
    here = ways("PBS")
    text = typed(pbs_lab, here["qsub"])
    job = pbs_lab.record()["handle"]["job_id"]
    assert who(text) == expected(here["qsub"].counts, hosts_of(pbs, job))
    terminal = Terminal(pbs_lab, *in_a_shell(pbs_lab, here["qsub -I"]))
    terminals.append(terminal)
    job = terminal.read_until(r"qsub: waiting for job (\S+) to start")[1]
    assert terminal.wait() == 0, terminal.shown
    assert who(terminal.shown.replace("\r", "")) == expected(here["qsub -I"].counts, hosts_of(pbs, job))
    assert {*here} == {"qsub", "qsub -I"}


def test_on_grid_engine(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """It takes more than 10 s on a slow machine: two jobs, one after the other."""
    grid_engine_lab.script(PLACES)
    here = ways("Grid Engine")
    for heading, say in {"qsub -pe": here["qsub -pe"].words, "qrsh": in_a_shell(grid_engine_lab, here["qrsh"])}.items():
        done = grid_engine_lab(*say)
        assert done.rc == 0, done.stderr
        told = who(done.stdout)
        hosts = list(dict.fromkeys(rank[4] for rank in told))
        assert told == expected(here[heading].counts, hosts), heading
    assert {*here} == {"qsub -pe", "qrsh"}
