"""GPU checks on GPUs that are there: what NVML tells is what torch sees, and nothing is found on a healthy machine."""

from __future__ import annotations

import json
import os

import pytest
import torch

from allranks.checks.collect.gather import ProbeRequest
from allranks.checks.collect.gpus import gpus
from allranks.checks.model import Grade
from allranks.checks.topics.gpus import judge_computed as judge
from allranks.selftest.computing import measure_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


def test_nvml_tells_what_torch_sees():
    pytest.importorskip("pynvml")
    told = gpus(ProbeRequest(("gpus",)))
    count = torch.cuda.device_count()
    assert [gpu["error"] for gpu in told["gpus"]] == [""] * count
    seen = [torch.cuda.get_device_properties(number) for number in range(count)]
    assert sorted(gpu["capability"] for gpu in told["gpus"]) == sorted(f"{each.major}.{each.minor}" for each in seen)
    assert sorted(gpu["uuid"].split("-", 1)[1] for gpu in told["gpus"]) == sorted(str(each.uuid) for each in seen)
    for gpu in told["gpus"]:
        assert 0 < gpu["memory"]["free"] <= gpu["memory"]["total"]


def test_only_visible_gpus_are_told(monkeypatch):
    pytest.importorskip("pynvml")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = gpus(ProbeRequest(("gpus",)))
    assert (told["gpus"], told["installed"] > 0) == ([], True)


def test_the_command_finds_nothing_that_cannot_work(allranks):
    pytest.importorskip("pynvml")
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        allranks.env["CUDA_VISIBLE_DEVICES"] = visible
    names = "gpu-count,gpu-driver,gpu-memory,gpu-ecc,gpu-throttle,gpu-pcie,nvlink,gpu-peers"
    done = allranks("check", "--json", "--only", names)
    assert done.rc == 0, done.stdout
    grades = {found["check"]: (found["grade"], found["what"]) for found in json.loads(done.stdout)["checks"]}
    assert grades["gpu-count"][0] == "PASS", grades
    assert grades["gpu-driver"][0] == "PASS", grades
    assert not [found for found in grades.values() if found[0] == "FAIL"]


def test_each_gpu_computes_right():
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    measured = [measure_products(device) for device in devices]
    has_bf16 = [torch.cuda.get_device_capability(device) >= (8, 0) for device in devices]
    assert [each["fp32"]["wrong"] for each in measured] == [0] * len(measured), measured
    assert [each["bf16"]["wrong"] for each in measured if "bf16" in each] == [0] * has_bf16.count(True), measured
    (finding,) = judge({"here": measured})
    assert finding.grade is not Grade.FAIL, finding
