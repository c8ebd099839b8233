"""What is said of GPUs that have computed, and how that is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seen import found, seen_of

from allranks.checks.model import Finding, Grade
from allranks.checks.registry import chosen
from allranks.checks.topics.gpus import judge_computed as judge
from allranks.selftest import computing

Facts = dict[str, Any]
H100 = "NVIDIA H100 80GB HBM3"


def computed(index: int, fp32: float = 50.0, bf16: float = 700.0, wrong: int = 0, **more: Any) -> Facts:
    result = {"values": 1 << 24}
    parts = {"fp32": {**result, "wrong": 0, "tflops": fp32}, "bf16": {**result, "wrong": wrong, "tflops": bf16}}
    return {"index": index, "name": H100, "capability": "9.0", "arches": ["sm_90"], **parts, **more}


def test_gpus_that_compute() -> None:
    measured = {"gpu01": [computed(0), computed(1, bf16=680.0)], "gpu02": [computed(0, fp32=48.04), computed(1)]}
    what = f"{H100}: 48 to 50 in fp32, 680 to 700 in bf16 TFLOP/s, and right"
    assert list(judge(measured)) == [Finding(Grade.PASS, what, host=host) for host in ("gpu01", "gpu02")]


def test_a_gpu_that_computes_wrongly_or_slowly() -> None:
    measured = {
        "gpu01": [computed(0), computed(1, wrong=3)],
        "gpu02": [computed(0, bf16=480.0), computed(1)],
        "gpu03": [{**computed(0), "bf16": {"error": "CUDA error: x"}}],
        "gpu04": [{"index": 0, "name": "B200", "capability": "10.0", "arches": ["sm_80", "sm_90"]}],
    }
    assert [(finding.grade, finding.what, finding.host) for finding in judge(measured)] == [
        (Grade.FAIL, "GPU 1: computes wrongly: 3 of 16777216 values of a product in bf16", "gpu01"),
        (Grade.WARN, "GPU 0: reaches 480 TFLOP/s in bf16, others 700", "gpu02"),
        (Grade.FAIL, "GPU 0: cannot compute in bf16: CUDA error: x", "gpu03"),
        (Grade.FAIL, "GPU 0: is of compute capability 10.0, and torch is built for sm_80, sm_90", "gpu04"),
    ]


def test_gpus_without_bf16() -> None:
    (fp32,) = [{**computed(0, fp32=9.0), "name": "Tesla P100"}]
    del fp32["bf16"]
    (finding,) = judge({"gpu01": [fp32, {**fp32, "index": 1}]})
    assert finding == Finding(Grade.PASS, "Tesla P100: 9 in fp32 TFLOP/s, and right", host="gpu01")
    (slow,) = judge({"gpu01": [fp32, {**fp32, "index": 1, "fp32": {**fp32["fp32"], "tflops": 4.0}}]})
    assert slow.what == "GPU 1: reaches 4 TFLOP/s in fp32, others 9"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("6.0", ("fp32",)),
        ("7.5", ("fp32",)),
        ("8.0", ("fp32", "bf16")),
        ("10.0", ()),
        ("", ("fp32", "bf16")),  # AMD's
        (None, ("fp32", "bf16")),
    ],
)
def test_the_precisions_of_a_gpu(capability: str | None, expected: tuple[str, ...]) -> None:
    build = {"capability": capability, "arches": ["sm_60", "sm_70", "sm_75", "sm_80"]}
    assert computing.precisions(build) == expected


def test_what_fails_in_one_precision_is_no_loss_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "_PRECISIONS", {"fp32": torch.float32, "int4": torch.quint4x2})
    measured = computing.measure_products(torch.device("cpu"))
    assert measured["fp32"]["wrong"] == 0
    assert [*measured["int4"]] == ["error"]


def test_nodes_are_looked_at_when_it_is_the_only_check() -> None:
    (check,) = chosen(["gpu-compute"], [], is_full=False)
    assert check.facts == ("host",)


def test_what_the_ranks_of_a_trial_have_computed() -> None:
    (finding,) = found("gpu-compute", seen_of({"gpu01": {"gpu-compute": [computed(0, wrong=1)]}}))
    assert (finding.grade, finding.host) == (Grade.FAIL, "gpu01")
    (skipped,) = found("gpu-compute", seen_of({"gpu01": {}}))
    assert skipped == Finding(Grade.SKIP, "no rank has computed on a GPU")


def test_a_gpu_is_compared_with_the_others() -> None:
    (finding,) = judge({"gpu01": [computed(0), computed(1, bf16=480.0)]})
    assert (finding.grade, finding.what) == (Grade.WARN, "GPU 1: reaches 480 TFLOP/s in bf16, others 700")


def test_a_product_is_exact_and_an_error_is_found() -> None:
    measured = computing.measure_products(torch.device("cpu"))
    assert [(measured[name]["wrong"], measured[name]["values"]) for name in ("fp32", "bf16")] == [(0, 65536)] * 2
    left, right, expected = (matrix.to(torch.bfloat16) for matrix in computing._matrices(256))
    left[3, 7] += 1
    assert computing._count_wrong(left @ right, expected) == 256  # A row of it.


@pytest.mark.parametrize(
    ("arch", "runs_on"),
    [
        ("sm_80", ["8.0", "8.6"]),
        ("sm_100a", ["10.0"]),
        ("sm_100f", ["10.0", "10.3"]),
        ("sm_120", ["12.0"]),
        ("compute_86", ["8.6", "9.0", "10.0", "10.3", "12.0"]),
    ],
)
def test_code_runs_on_its_architectures(arch: str, runs_on: list[str]) -> None:
    there = ("7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0")
    assert [each for each in there if computing.is_built_for(each, [arch])] == runs_on
