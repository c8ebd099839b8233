"""Which backend and device a rank gets; nothing here needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from allranks.errors import DeviceError, RankError
from allranks.runtime.device import bind, choose, gpu_identity, no_gpu, physical_number
from allranks.runtime.environment import RankEnvironment
from allranks.runtime.seed import rank_seed, seed_all

RANK = RankEnvironment("torchrun", rank=5, world_size=8, local_rank=1, local_world_size=4)


@pytest.fixture(params=[False, True], ids=["no GPU", "GPUs"])
def gpus(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.delenv("ALLRANKS_BACKEND", raising=False)
    return request.param


def chosen(backend=None, device=None):
    name, where = choose(backend, device, RANK)
    return name, str(where)


def test_defaults_follow_the_machine(gpus):
    assert chosen() == (("nccl", "cuda:1") if gpus else ("gloo", "cpu"))


def test_the_argument_wins_over_the_variable_and_the_variable_over_the_machine(gpus, monkeypatch):
    monkeypatch.setenv("ALLRANKS_BACKEND", "gloo")
    assert chosen() == ("gloo", "cpu")
    assert chosen("nccl") == ("nccl", "cuda:1")
    assert chosen(device="cuda") == ("gloo", "cuda:1")


def test_a_device_that_the_script_names_wins(gpus, monkeypatch):
    monkeypatch.setenv("ALLRANKS_BACKEND", "nccl")
    assert chosen(device="cpu") == ("gloo", "cpu")
    assert chosen(device="cuda:3") == ("nccl", "cuda:3")
    assert chosen("cpu:gloo,cuda:nccl") == ("cpu:gloo,cuda:nccl", "cuda:1")
    with pytest.raises(DeviceError, match="backend nccl cannot work on device cpu"):
        chosen("nccl", "cpu")


@pytest.mark.parametrize(
    ("backend", "device", "parts"),
    [
        ("ncl", None, ["invalid backend: 'ncl'", "expected one of 'gloo', 'nccl', ", "did you mean backend='nccl'?"]),
        ("cpu:gloo,cuda:ncl", None, ["invalid backend: 'cpu:gloo,cuda:ncl'"]),
        ("slurm", None, ["invalid backend: 'slurm'", "fix: backend='gloo'"]),
        (None, "gpu", ["invalid device: 'gpu'", "a GPU by its number, such as 'cuda:1'", "fix: device='cuda'"]),
        (None, "cuda:first", ["invalid device: 'cuda:first'"]),
    ],
)
def test_backends_and_devices_that_do_not_exist(gpus, backend, device, parts):
    with pytest.raises(RankError) as caught:
        chosen(backend, device)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_local_rank_beyond_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu07")
    assert str(no_gpu(RANK, 1, 1, True)) == (
        "rank 5 (local rank 1) on gpu07 needs GPU 1, but there is 1\n"
        "  why: torch sees 1 GPU; CUDA_VISIBLE_DEVICES is '3'\n"
        "  fix: start at most 1 rank per node (--nproc-per-node 1), or let each rank see all GPUs"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert no_gpu(RANK, 0, 0, True).why == "torch sees 0 GPUs; CUDA_VISIBLE_DEVICES is not set"
    assert no_gpu(RANK, 0, 0, False).why == "this torch was built without CUDA"


def test_binding_checks_the_number_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="needs GPU 1, but there is 1"):
        bind(torch.device("cuda", 1), RANK)
    bind(torch.device("cpu"), RANK)
    assert gpu_identity(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("index", "variables", "number"),
    [
        (1, {}, "number 1"),
        (0, {"CUDA_VISIBLE_DEVICES": "3"}, "number 3"),
        (1, {"CUDA_VISIBLE_DEVICES": "2, 5,7"}, "number 5"),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, "number GPU-8932f937"),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, "number 2"),
        (1, {"CUDA_VISIBLE_DEVICES": ""}, "number 1"),
        (0, {"ROCR_VISIBLE_DEVICES": "6"}, "number 0 ROCR_VISIBLE_DEVICES=6 index 0"),
    ],
)
def test_the_number_that_other_processes_know_a_gpu_by(index, variables, number):
    assert physical_number(index, variables) == number


def test_a_torch_that_knows_no_uuid_tells_gpus_apart_by_what_each_rank_sees(monkeypatch):
    properties = SimpleNamespace(name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def identity(visible, index=0):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return gpu_identity(torch.device("cuda", index))

    assert identity("0") == "H200 number 0"
    assert identity("1") == identity("0,1", index=1) == "H200 number 1"
    properties.uuid = "11450b5b"
    assert identity("0") == "11450b5b"


def test_seeds_differ_between_ranks_and_neighbouring_seeds():
    seeds = {rank_seed(seed, rank) for seed in range(20) for rank in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_repeats():
    seed_all(3, 1)
    first = torch.rand(2)
    seed_all(3, 1)
    assert torch.equal(first, torch.rand(2))
