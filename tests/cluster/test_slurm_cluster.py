"""The test cluster is what the tests of Slurm take it for: each feature of it that they lean on, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tools import ClusterError
from slurm_cluster import SlurmCluster

from waiting import PATIENCE

NAMES = ["node01", "node02", "node03", "node04"]
RENDEZVOUS = """
import os, socket, sys
address = ("node01", 29500)
if os.environ["SLURM_PROCID"] == "0":
    with socket.create_server(("0.0.0.0", 29500)) as server:
        peer, (host, _) = server.accept()
        assert socket.gethostbyaddr(host)[0] == "node02", host
        peer.sendall(b"all here")
else:
    while True:
        try:
            with socket.create_connection(address) as peer:
                print(peer.recv(100).decode(), flush=True)
                break
        except ConnectionRefusedError:
            pass
"""
# Ends by itself at SIGUSR1 only; says so, for a test to wait for.
TRAPS = """#!/bin/bash
trap 'echo warned; exit 0' USR1
echo ready
while :; do sleep 60 & wait $!; done
"""


def script(folder: Path, text: str, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def said(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def test_four_idle_nodes_with_four_gpus(slurm: SlurmCluster) -> None:
    rows = slurm.run("sinfo", "--noheader", "--partition=main", "-N", "-o", "%N %T %G").splitlines()
    assert rows == [f"{name} idle gpu:4" for name in NAMES]


def test_each_node_has_its_name_and_its_address(slurm: SlurmCluster) -> None:
    assert sorted(slurm.run("srun", "--nodes=4", "hostname").split()) == NAMES
    answers = slurm.run("srun", "--nodes=4", "getent", "hosts", *NAMES).splitlines()
    assert len(answers) == 16 and len({*answers}) == 4
    assert slurm.run_on("node03", "ls /sys/class/net").split() == ["eth0", "lo"]


def test_gpus_are_given_out(slurm: SlurmCluster) -> None:
    shown = slurm.run("srun", "--gres=gpu:2", "--overlap", "printenv", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")
    assert shown.split() == ["0,1", "2"]


def test_two_jobs_share_a_node(slurm: SlurmCluster, work: Path) -> None:
    one = script(work, "#!/bin/sh\necho $CUDA_VISIBLE_DEVICES; sleep 60\n")
    jobs = [slurm.sbatch("--gres=gpu:2", "--nodelist=node02", "--output=%j.out", one, folder=work) for _ in range(2)]
    for job in jobs:
        slurm.wait_for_state(job, "RUNNING")
    outputs = [work / f"{job}.out" for job in jobs]
    slurm.wait_until("both to say their GPUs", lambda: all(said(path, "\n") for path in outputs))
    assert [path.read_text().strip() for path in outputs] == ["0,1", "2,3"]


def test_uneven_nodes(slurm: SlurmCluster) -> None:
    shown = slurm.run("srun", "--nodes=2", "--ntasks=3", "sh", "-c", "echo $SLURM_PROCID $(hostname) $SLURM_LOCALID")
    assert sorted(shown.splitlines()) == ["0 node01 0", "1 node01 1", "2 node02 0"]


def test_batch_of_python(slurm: SlurmCluster, work: Path) -> None:
    text = "#!/usr/bin/env python\nimport os, sys\nprint(sys.executable, os.getcwd(), sys.argv[1:])\n"
    job = slurm.sbatch(script(work, text, "job.py"), "an argument", folder=work)
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    executable, rest = (work / f"slurm-{job}.out").read_text().strip().split(" ", 1)
    assert Path(executable).parent == Path(sys.executable).parent
    assert rest == f"{work} ['an argument']"


def test_nodes_meet(slurm: SlurmCluster, work: Path) -> None:
    path = script(work, RENDEZVOUS, "meet.py")
    assert slurm.run("srun", "--nodes=2", "python", path, timeout=PATIENCE).strip() == "all here"


def test_cancel(slurm: SlurmCluster, work: Path) -> None:
    job = slurm.sbatch("--nodes=2", "--wrap=srun sleep 60", folder=work)
    slurm.wait_for_state(job, "RUNNING")
    slurm.run("scancel", str(job))
    assert slurm.wait_for_state(job)["JobState"] == "CANCELLED"


def test_requeue(slurm: SlurmCluster, work: Path) -> None:
    """It takes more than 10 s: a requeued job waits 11 s."""
    path = script(work, "#!/bin/sh\necho attempt ${SLURM_RESTART_COUNT:-0}\n[ $SLURM_RESTART_COUNT ] || sleep 60\n")
    job = slurm.sbatch("--requeue", "--open-mode=append", "--output=out", path, folder=work)
    slurm.wait_until("the first attempt", lambda: said(work / "out", "attempt 0"))
    slurm.run("scontrol", "requeue", str(job))
    assert slurm.wait_for_state(job, "COMPLETED")["Restarts"] == "1"
    assert (work / "out").read_text().splitlines()[-1] == "attempt 1"


def test_preemption_warns(slurm: SlurmCluster, work: Path) -> None:
    wanted = ["--partition=low", "--nodes=4", "--exclusive", "--signal=B:USR1@60", "--output=out"]
    low = slurm.sbatch(*wanted, script(work, TRAPS), folder=work)
    slurm.wait_until("the job to be ready", lambda: said(work / "out", "ready"))
    high = slurm.sbatch("--partition=high", "--wrap=true", folder=work)
    slurm.wait_until("the warning", lambda: said(work / "out", "warned"))
    assert slurm.wait_for_state(high)["JobState"] == "COMPLETED"
    # It has ended by itself, so it is not requeued: that is for the job to do.
    ended = slurm.wait_for_state(low)  # Some of its nodes may be cleaned up later than the one that the other has got.
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0")


def test_warning_ahead_of_the_end(slurm: SlurmCluster, work: Path) -> None:
    """It takes more than 10 s: Slurm looks at time limits twice a minute."""
    job = slurm.sbatch("--time=2", "--signal=B:USR1@100", "--output=out", script(work, TRAPS), folder=work)
    slurm.wait_until("the job to be ready", lambda: said(work / "out", "ready"))
    slurm.wait_until("the warning", lambda: said(work / "out", "warned"))
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"


def test_dead_node(slurm: SlurmCluster, work: Path) -> None:
    """It takes more than 10 s on a slow machine: Slurm waits for 8 s for a node that is silent."""
    wanted = ["--nodes=2", "--nodelist=node03,node04", "--no-requeue", "--output=out"]
    job = slurm.sbatch(*wanted, "--wrap=srun sh -c 'hostname; sleep 60'", folder=work)
    slurm.wait_until("both tasks", lambda: said(work / "out", "node03") and said(work / "out", "node04"))
    slurm.kill_node("node04")
    with pytest.raises(ClusterError, match="node04 is dead"):
        slurm.run_on("node04", ["true"])
    assert slurm.wait_for_state(job)["JobState"] == "NODE_FAIL"
    assert slurm.states()["node04"] == "down*"
    slurm.start_node("node04")
    slurm.wait_idle()


def test_cut_cable(slurm: SlurmCluster) -> None:
    there = ["timeout", "2", "bash", "-c", "</dev/tcp/node02/6818"]

    def is_reached() -> bool:
        return not subprocess.call(slurm.network.nodes["node01"].enter(there))

    slurm.wait_until("node02 to be reached", is_reached)
    slurm.cut("node02")
    with pytest.raises(ClusterError):
        slurm.run_on("node01", there)
    slurm.mend("node02")
    slurm.wait_until("node02 to be reached again", is_reached)


def test_forgotten_jobs(slurm: SlurmCluster, work: Path) -> None:
    job = slurm.sbatch("--wrap=true", folder=work)
    slurm.wait_for_state(job, "COMPLETED")
    slurm.forget_jobs()
    assert slurm.job(job) == {}


def test_accounting(slurm_with_accounting: SlurmCluster, work: Path) -> None:
    cluster = slurm_with_accounting
    job = cluster.sbatch("--account=lab", "--qos=urgent", "--wrap=exit 3", folder=work)
    assert cluster.wait_for_state(job)["JobState"] == "FAILED"
    rows = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode,Account"]
    cluster.wait_until("the record of the end", lambda: cluster.run(*rows) == "FAILED|3:0|lab\n")
    with pytest.raises(ClusterError, match="Invalid account"):
        cluster.sbatch("--account=nobody", "--wrap=true", folder=work)
