"""``allranks plan --per-node``: what to type on each node."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

import pytest

MACHINES = ("--nodes", "gpu1,ada@gpu2", "--master-addr", "gpu1", "--master-port", "29400")


@pytest.fixture
def job(allranks: Any) -> Any:
    """Give the command, in a directory with a script and clusters."""
    allranks.script("")
    allranks.script("racks: {kind: ssh, resources: {hostfile: hosts}, launch: {backend: gloo}}\n", "clusters.yaml")
    allranks.script("gpu1 slots=2\ngpu2 slots=4\n", "hosts")
    return allranks


def _place(node: int, *, nodes: int = 2, address: str = "gpu1", port: int = 29400) -> str:
    return f"--nnodes {nodes} --node-rank {node} --master-addr {address} --master-port {port}"


def test_flags_stand_as_they_were_typed(job: Any):
    typed = ("--nproc_per_node=2", "--env", "A=x 'y'", "--env", "MY_TOKEN=secret", "--no-warm", "--backend", "gloo")
    done = job("plan", "train.py", "--per-node", *MACHINES, *typed, "--", "--lr", "a b")
    assert done.rc == 0, done.stderr
    flags = shlex.join(["--nproc-per-node", "2", "--backend", "gloo", "--no-warm", "--env", "A=x 'y'"])
    rest = f"{flags} --env MY_TOKEN -- --lr 'a b'"
    assert done.stdout.splitlines() == [
        "# node 0 on gpu1",
        f"allranks node train.py {_place(0)} {rest}",
        "# node 1 on ada@gpu2",
        f"allranks node train.py {_place(1)} {rest}",
    ]
    assert done.stderr == ""


def test_what_this_shell_says_the_nodes_are_told(job: Any):
    done = job("plan", "train.py", "--per-node", *MACHINES, NPROC_PER_NODE="3", ALLRANKS_WARM="0", BACKEND="gloo")
    assert done.stdout.splitlines()[1] == (
        f"allranks node train.py {_place(0)} --nproc-per-node 3 --backend gloo --no-warm"
    )


def test_numbers_of_ranks_from_a_file_of_hosts(job: Any):
    job.job("script: train.py\n")
    done = job("plan", "--on", "racks", "--per-node", "--master-addr", "gpu1", "--json")
    port = json.loads(done.stdout)[0]["line"].split()[10]
    assert json.loads(done.stdout) == [
        {
            "node": node,
            "host": f"gpu{node + 1}",
            "line": f"allranks node job.yaml {_place(node, port=port)} --nproc-per-node {ranks} --on racks",
        }
        for node, ranks in enumerate((2, 4))
    ]


def test_nodes_that_only_the_person_knows(job: Any):
    done = job("plan", "-m", "my.train", "--per-node", "--nnodes", "3", "--master-addr", "10.0.0.1")
    assert done.stdout.splitlines() == [
        line
        for node in range(3)
        for line in (
            f"# node {node} on 10.0.0.1" if node == 0 else f"# node {node}",
            f"allranks node --module my.train {_place(node, nodes=3, address='10.0.0.1', port=29500)}",
        )
    ]


@pytest.mark.parametrize(
    ("flags", "module", "last"),
    [
        (["--launcher", "legacy"], "launch", ""),
        (["--no-agent"], "run", " --max_restarts=0"),
    ],
)
def test_lines_that_need_no_allranks(job: Any, flags: list[str], module: str, last: str):
    words = ("--nproc-per-node", "2", "--env", "A=x y", "--env", "MY_TOKEN=secret")
    done = job("plan", "train.py", "--per-node", *MACHINES, *flags, *words, "--", "--lr", "a b")
    folder, python = shlex.quote(str(job.folder)), shlex.quote(sys.executable)
    script = shlex.quote(str(job.folder / "train.py"))
    assert done.stdout.splitlines()[1::2] == [
        f"(cd -- {folder} && export A='x y' && export MY_TOKEN=\"${{MY_TOKEN?set it before}}\" && "
        f"{python} -m torch.distributed.{module} --nproc_per_node=2 --nnodes=2 --node_rank={node} "
        f"--master_addr=gpu1 --master_port=29400{last} {script} --lr 'a b')"
        for node in (0, 1)
    ]
