"""``allranks test``, the ranks of ``check --full`` and the search for what is at fault, on GPUs over NCCL.

One is enough, but for what says two.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from allranks.record.selftest import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
HOST = socket.gethostname()


@pytest.fixture
def allranks(allranks):
    """Give the command, seeing the GPUs that this process sees."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        allranks.env["CUDA_VISIBLE_DEVICES"] = visible
    return allranks


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=two_gpus)])
def test_all_is_right(allranks, count):
    done = allranks("test", "--full", "--nproc-per-node", str(count), "--backend", "nccl", "--json", timeout=170)
    assert done.rc == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [(who["backend"], who["device"]) for who in told["ranks"]] == [
        ("nccl", f"cuda:{rank}") for rank in range(count)
    ]
    parts = {part["name"]: part for part in told["parts"]}
    assert {part["wrong"] for part in parts.values()} == {""}
    names = [name for name, part in parts.items() if part["kind"] in ("link", "training", "gpus")]
    ways = [f"rank {one} on {HOST} to rank {1 - one} on {HOST}" for one in (0, 1)] if count == 2 else []
    assert names == [*ways, "training (ddp)", "training (flat)", f"GPUs of {HOST}"]


@pytest.mark.parametrize("variable", ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=two_gpus)])
def test_tf32_is_no_fault(allranks, variable, count):
    options = ("--nproc-per-node", str(count), "--backend", "nccl", "--env", f"{variable}=1")
    done = allranks("test", *options, timeout=170)
    assert done.rc == 0, done.stdout + done.stderr


def test_a_full_check_computes_on_the_gpu(allranks):
    options = ("--nproc-per-node", "1", "--backend", "nccl", "--json", "--only", "all-reduce,training,gpu-compute")
    done = allranks("check", *options, timeout=170)
    assert done.rc == 0, done.stdout + done.stderr
    found = [(each["check"], each["grade"]) for each in json.loads(done.stdout)["checks"]]
    assert sorted(found) == [
        ("all-reduce", "PASS"),
        ("gpu-compute", "PASS"),
        ("training", "PASS"),
        ("training", "PASS"),
    ]


@two_gpus
def test_the_search_measures_over_nccl(tmp_path):
    """Each rank is a node to it: both are this machine, with a GPU each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in range(2):
        log = tmp_path / f"node-{rank}" / f"rank-{rank}.out"
        log.parent.mkdir()
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ALLRANKS_BACKEND": "nccl"}
        with log.open("w") as out:
            command = [sys.executable, "-m", "allranks.selftest.search", "--timeout", "40"]
            ranks.append(subprocess.Popen(command, env={**shared, **mine}, stdout=out))
    assert [rank.wait(170) for rank in ranks] == [0, 0]
    (told,) = read(tmp_path)
    assert (told.is_bad, told.culprits, told.silent, told.error) == (False, (), (), "")
    assert told.seconds > 0
