"""What agents sample of GPUs that are there."""

from __future__ import annotations

import pytest
import torch

from allranks.system.gpus import Gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that torch can use"),
]


def test_clocks_and_temperatures_are_those_of_a_gpu_that_works():
    gpus = Gpus()
    work = torch.ones(2048, 2048, device="cuda")
    for _ in range(20):
        work = (work @ work).clamp(0, 1)
        torch.cuda.synchronize()
        found = gpus.sample()
    assert [gpu["number"] for gpu in found] == [*range(gpus.count)]
    first = found[0]
    assert 0 < first["memory"] <= first["total"]
    assert 0 < first["clock"] <= first["max_clock"]
    assert 10 < first["temperature"] < 110
    assert len(Gpus("0").sample()) == 1
