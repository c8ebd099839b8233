"""How many ranks, over which backend, and why."""

from __future__ import annotations

import pytest

from allranks.errors import PreflightError
from allranks.job.spec import Job, Launch, Resources
from allranks.plan.layout import Layout, Machine, lay_out, this_machine

CPU_ONLY = Machine(cpus=8, gpus=0, gpus_from="no GPU on this machine")
FOUR_GPUS = Machine(cpus=16, gpus=4, gpus_from="4 on this machine")


def laid_out(machine: Machine, *, gpus: int | None = None, **launch: object) -> Layout:
    resources = Resources(gpus_per_node=gpus)
    return lay_out(Job(script="train.py", resources=resources, launch=Launch.model_validate(launch)), machine)


@pytest.mark.parametrize(
    ("machine", "gpus", "launch", "ranks", "backend"),
    [
        (CPU_ONLY, None, {}, 1, "gloo"),
        (CPU_ONLY, None, {"nproc_per_node": 3}, 3, "gloo"),
        (CPU_ONLY, None, {"nproc_per_node": "cpu"}, 8, "gloo"),
        (FOUR_GPUS, None, {}, 4, "nccl"),
        (FOUR_GPUS, None, {"nproc_per_node": "gpu"}, 4, "nccl"),
        (FOUR_GPUS, None, {"nproc_per_node": 2}, 2, "nccl"),
        (FOUR_GPUS, None, {"nproc_per_node": 6, "backend": "gloo"}, 6, "gloo"),
        (FOUR_GPUS, 2, {}, 2, "nccl"),
        (FOUR_GPUS, 0, {}, 1, "gloo"),
    ],
)
def test_ranks_and_backend(machine: Machine, gpus: int | None, launch: dict[str, object], ranks: int, backend: str):
    layout = laid_out(machine, gpus=gpus, **launch)
    assert (layout.nproc_per_node, layout.backend) == (ranks, backend)


def test_each_decision_has_its_reason():
    assert [(r.subject, r.value, r.why) for r in laid_out(FOUR_GPUS).reasons] == [
        ("ranks", "4", "one for each GPU: 4 on this machine"),
        ("backend", "nccl", "GPUs: 4 on this machine"),
    ]
    assert [(r.value, r.why) for r in laid_out(CPU_ONLY, nproc_per_node=2, backend="gloo").reasons] == [
        ("2", "as asked"),
        ("gloo", "as asked"),
    ]


@pytest.mark.parametrize(
    ("machine", "gpus", "launch", "what"),
    [
        (FOUR_GPUS, None, {"nproc_per_node": 5}, "5 ranks on 4 GPUs with backend nccl"),
        (FOUR_GPUS, 1, {"nproc_per_node": 2}, "2 ranks on 1 GPU with backend nccl"),
        (CPU_ONLY, None, {"backend": "nccl"}, "1 rank on 0 GPUs with backend nccl"),
        (CPU_ONLY, 1, {}, "1 GPU requested, 0 can be used"),
        (FOUR_GPUS, 8, {}, "8 GPUs requested, 4 can be used"),
        (CPU_ONLY, None, {"nproc_per_node": "gpu"}, "one rank per GPU was requested"),
    ],
)
def test_what_cannot_work(machine: Machine, gpus: int | None, launch: dict[str, object], what: str):
    with pytest.raises(PreflightError) as caught:
        laid_out(machine, gpus=gpus, **launch)
    assert caught.value.what == what
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("0", 1), ("2,3", 2), ("GPU-1a,GPU-2b", 2), ("0,-1,1", 1), ("-1", 0), (" 0 , 1 ", 2)],
)
def test_visible_devices(visible: str, count: int):
    machine = this_machine({"CUDA_VISIBLE_DEVICES": visible})
    assert (machine.gpus, machine.gpus_from) == (count, f"CUDA_VISIBLE_DEVICES={visible}")
    assert machine.cpus >= 1
