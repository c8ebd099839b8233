"""Runs on PBS, as a person types them: all shapes, both launchers, and what they are given on each node."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from followed_runs import Followed, files_with, follow, given_to, hosts_of, run_named
from needed import need
from pbs_cluster import PbsCluster, StandInPbs
from ranks_told import PLACES, expected, told, who
from ssh_nodes import SshNodes, why_no_sshd

from allranks import contract

BOTH = ("torchrun", "direct")
#: A secret that no quoting of shells, schedulers or JSON must alter; what starts it stands nowhere else.
SECRET = "s3same'\"\\$HOME`,;&\n% \té="
#: Tells what this rank has been given, and ends when there is a file ``go``.
GIVEN = """\
import hashlib, json, os, socket, time
secret = hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest()
names = ["PLAIN", "OMP_NUM_THREADS", "PBS_NODENUM"]
print("given", json.dumps([socket.gethostname(), secret, *map(os.environ.get, names)]), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


def _assert_all_met(run: Followed, pbs: PbsCluster, counts: list[int]) -> None:
    """Assert that a run has succeeded, with so many ranks on each of its hosts, which have all met."""
    done = run.end()
    assert done.rc == 0, done.stderr
    hosts = hosts_of(pbs, run.job)
    assert who(done.stdout) == expected(counts, hosts)
    record = run.lab.record(run.folder)
    found = record["status"]["state"], record["nnodes"], record["world_size"]
    assert found == ("SUCCEEDED", len(counts), sum(counts))


def test_what_ranks_are_given_on_each_node(pbs_lab: Any, pbs: PbsCluster) -> None:
    """PBS sets threads for one rank that has all CPUs of its node, and hands values with quotes on altered."""
    pbs_lab.script(GIVEN)
    pbs_lab.job(
        "script: train.py\nresources: {nodes: 2, cpus_per_node: 6}\nlaunch: {nproc_per_node: 2}\n"
        "environment: {variables: {MY_TOKEN: <secret>, PLAIN: \"a, 'b' $c\"}}\n"
    )
    runs = [follow(pbs_lab, name, "job.yaml", "--launcher", name, MY_TOKEN=SECRET) for name in BOTH]
    digest, plain = sha256(SECRET.encode()).hexdigest(), "a, 'b' $c"
    for run in runs:
        pbs.wait_until("all ranks", lambda run=run: len(given_to(run)) == 4)
        hosts = hosts_of(pbs, run.job)
        ranks = [[host, digest, plain, "3"] for host in hosts for _ in range(2)]
        found = given_to(run)
        assert sorted(rank[:4] for rank in found) == sorted(ranks)
        assert {(rank[0], rank[4]) for rank in found} == {(hosts[0], "0"), (hosts[1], "1")}
        assert "MY_TOKEN" not in "\n".join(pbs.job(run.job).values())
        assert files_with(run.folder, b"s3same") == [(run.folder / "secrets.sh", 0o600)]
    (pbs_lab.folder / "go").touch()
    for run in runs:
        assert run.end().rc == 0, run.stderr
        assert "MY_TOKEN" not in "\n".join(pbs.job(run.job).values())
        assert files_with(run.folder, b"s3same") == []


def test_a_job_that_waits_does_not_hinder_the_script_by_hand(pbs_lab: Any, pbs: PbsCluster) -> None:
    """The script that a run has left is submitted from elsewhere: the run is found in that job, as the newest."""
    pbs_lab.script(PLACES)
    pbs_lab.job("script: train.py\nresources: {nodes: 2}\nscheduler: {directives: ['-h']}\n")
    elsewhere = pbs_lab.folder / "else where"
    elsewhere.mkdir()
    jobs = {}
    for name, without in (("whole", "-h"), ("packed", "-h|.*place=scatter")):
        assert pbs_lab("run", "job.yaml", "--on", "lab", "--name", name, "--detach").rc == 0
        script = run_named(pbs_lab, name) / "script.pbs"
        script.write_text(re.sub(rf"^#PBS ({without})\n", "", script.read_text(), flags=re.MULTILINE))
        jobs[name] = pbs.qsub(script, folder=elsewhere)
    hosts = {}
    for name, job in jobs.items():
        pbs.wait_for_state(job)
        hosts[name] = hosts_of(pbs, job)
    found = {name: _status(pbs_lab, name) for name in jobs}
    assert {name: found[name]["job"] for name in jobs} == jobs
    assert found["whole"]["state"] == "SUCCEEDED  F (finished)"
    logs = run_named(pbs_lab, "whole").glob("attempts/000/node-*/rank-*.out")
    assert who("".join(log.read_text() for log in logs)) == expected([1, 1], hosts["whole"])
    assert (found["packed"]["state"], found["packed"]["exit code"]) == ("FAILED  F (finished)", "1")
    (host,) = hosts["packed"]
    (log,) = run_named(pbs_lab, "packed").glob("pbs-*.out")
    needed = f"PBS gave the hosts {host}, and the job needs 2 different ones: ask for -l place=scatter"
    assert log.read_text() == f"{contract.ATTEMPT_STARTS}\nallranks: {needed}\n"


def _status(lab: Any, name: str) -> dict[str, str]:
    """Return what status says of a run, by what it calls it."""
    return dict(re.findall(r"^([a-z]+(?: [a-z]+)?)  +(.*)$", lab("status", name).stdout, re.MULTILINE))


def test_chunks_that_share_a_host_are_told_with_what_to_ask_for(pbs_lab: Any, pbs: PbsCluster) -> None:
    pbs_lab.script(PLACES)
    pbs_lab.job("script: train.py\nresources: {nodes: 2}\nscheduler: {directives: ['-l place=pack']}\n")
    run = follow(pbs_lab, "packed", "job.yaml").end()
    (host,) = hosts_of(pbs, run.job)
    name, number = run.folder.name, run.job.partition(".")[0]
    assert run.rc == 1
    assert run.stderr.splitlines()[-3:] == [
        f"error: {name} FAILED with exit code 1 before any rank had started",
        f"  why: PBS gave the hosts {host}, and the job needs 2 different ones: ask for -l place=scatter",
        f"  see: runs/{name}/pbs-{number}.out",
    ]


@pytest.mark.parametrize("launcher", BOTH)
def test_whatever_starts_the_tasks(pbs_lab: Any, pbs: PbsCluster, launcher: str) -> None:
    pbs_lab.script(PLACES)
    _assert_startedfiles_with(pbs_lab, pbs, launcher, {"pbs_tmrsh": "", "pbsdsh": ""})


@pytest.fixture
def sshds(standin: StandInPbs, tmp_path: Path) -> Iterator[SshNodes]:
    """Give an sshd on each node of the stand-in."""
    need("sshd", why_no_sshd())
    folder = tmp_path / "ssh"
    folder.mkdir()
    nodes = SshNodes(standin.network, folder)
    nodes.start()
    yield nodes
    nodes.stop()
    for name in standin.nodes:
        standin.run_on(name, ["umount", "/etc/passwd"])


@pytest.mark.parametrize("launcher", BOTH)
def test_starting_tasks_over_ssh(standin_lab: Any, standin: StandInPbs, sshds: SshNodes, launcher: str) -> None:
    """It takes more than 10 s: four runs of four ranks each, and an sshd on each node for them."""
    standin_lab.script(PLACES)
    path = f"export PATH={shlex.quote(str(sshds.folder / 'bin'))}:$PATH"
    of_root = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    setup = "environment: {{setup: ['{}']}}".format
    setups = {"ssh": setup(path), "mpiexec": setup(f"{path}; {of_root}")}
    _assert_startedfiles_with(standin_lab, standin, launcher, setups)


def _assert_startedfiles_with(lab: Any, pbs: PbsCluster, launcher: str, setups: dict[str, str]) -> None:
    """Have all ranks meet that are started with each of these, at once, and rank 2 of another run fail."""
    lab.script("import os, sys, time\nif os.environ['RANK'] == '2':\n    sys.exit(7)\ntime.sleep(100)\n", "fail.py")
    runs, failing = [], []
    for starter, more in setups.items():
        for script in ("train", "fail"):
            job = f"script: {script}.py\nresources: {{nodes: 2}}\nscheduler: {{start_with: {starter}}}\n{more}\n"
            lab.job(job, f"{script}-{starter}.yaml")
            flags = ("--nproc-per-node", 2, "--launcher", launcher)
            run = follow(lab, f"{script}-{starter}", f"{script}-{starter}.yaml", *flags)
            (runs if script == "train" else failing).append(run)
    for run in runs:
        _assert_all_met(run, pbs, [2, 2])
        orders = json.loads((run.folder / "supervisor.json").read_text())
        assert orders["start_with"] == run.name.partition("-")[2]
    for run in failing:
        assert run.end().rc == 7, run.stderr
        assert f"error: rank 2 on {hosts_of(pbs, run.job)[1]} exited with code 7\n" in run.stderr
        assert told(lab, run.folder)[1:] == ("FAILED", "7")
