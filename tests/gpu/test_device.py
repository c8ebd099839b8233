"""Devices on a machine that has GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]

SCRIPT = "import allranks\nwith allranks.init() as ctx:\n    print(ctx.backend, ctx.device, ctx.sum(1))\n"


def ranks(local_ranks, free_port):
    world = len(local_ranks)
    processes = []
    for rank, local_rank in enumerate(local_ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }
        command = [sys.executable, "-c", SCRIPT]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return [(process, *process.communicate(timeout=120)) for process in processes]


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nccl_on_the_first_gpu(free_port):
    ((process, out, err),) = ranks([0], free_port)
    assert (process.returncode, out) == (0, "nccl cuda:0 [1.0]\n"), err
    assert "destroy_process_group" not in err


def test_two_ranks_on_one_gpu_are_told_so_on_both(free_port):
    for process, _, err in ranks([0, 0], free_port):
        assert process.returncode == 1
        assert "DeviceError: ranks 0 and 1 on " in err
        assert "are bound to the same GPU" in err


def test_a_local_rank_beyond_the_gpus(free_port):
    count = torch.cuda.device_count()
    ((process, _, err),) = ranks([count], free_port)
    assert process.returncode == 1
    assert f"needs GPU {count}, but there " in err
