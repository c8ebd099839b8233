"""GPU checks, against what NVML answers on machines that are not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_nvml import RecordedNvml
from seen import found, seen_of

from allranks.checks.collect import gpus as probe
from allranks.checks.collect.gather import ProbeRequest, read_reports
from allranks.checks.model import Finding, Grade, Seen
from allranks.checks.probe import _BOOTSTRAP, _sent_along, program
from allranks.job.spec import Job
from waiting import PATIENCE

NEW_TORCH = {"version": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3"}
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"

Facts = dict[str, Any]
Ask = Callable[..., Facts]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ask:
    """Give a function that asks a machine what it has, as on a node."""
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(probe, "_DRIVERS", (str(driver),))
    monkeypatch.setattr(probe, "_AMD", str(tmp_path / "kfd"))

    def asked(machine: str | RecordedNvml, visible: str | None = None) -> Facts:
        monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(machine) if isinstance(machine, str) else machine)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return probe.gpus(ProbeRequest(("gpus",)))

    return asked


def seen(facts: Facts, ranks: int = 0, torch: Any = NEW_TORCH, **more: Any) -> Seen:
    """Return what checks are given of a job with so many ranks on GPUs; 0: it trains over gloo."""
    made = seen_of({"gpu01": {"gpus": facts, "torch": torch}})
    job = Job(**{"binary": "true", **more})
    backend = "nccl" if ranks else "gloo"
    return replace(made, job=job, plan=replace(made.plan, backend=backend, nproc_per_node=ranks or 1))


def one(check: str, given: Seen) -> Finding:
    (finding,) = found(check, given)
    return finding


def said(check: str, given: Seen) -> tuple[Grade, str]:
    finding = one(check, given)
    return finding.grade, finding.what


def test_a_healthy_node_with_eight(ask: Ask) -> None:
    given = seen(ask("8_h100"), ranks=8)
    names = ["count", "driver", "memory", "ecc", "throttle", "pcie", "peers"]
    assert [said(name, given) for name in ["nvlink", *(f"gpu-{name}" for name in names)]] == [
        (Grade.PASS, "18 links are up"),
        (Grade.PASS, f"8 x {H100}"),
        (Grade.PASS, "driver 570.124.06 (CUDA 12.8), torch 2.13.0+cu128 for CUDA 12.8"),
        (Grade.PASS, "99% or more of it is free on each GPU"),
        (Grade.PASS, "every error was corrected since the driver was loaded"),
        (Grade.PASS, "none is slowed down"),
        (Grade.PASS, "x16, as wide as card and slot can"),
        (Grade.PASS, "each reaches each other one"),
    ]


def test_the_facts_of_a_gpu(ask: Ask) -> None:
    facts = ask("8_h100")
    assert (facts["driver"], facts["cuda"], facts["installed"]) == ("570.124.06", "12.8", 8)
    assert (facts["is_amd"], facts["why"]) == (False, "")
    assert [gpu["index"] for gpu in facts["gpus"]] == [*range(8)]
    last = facts["gpus"][-1]
    assert (last["uuid"], last["name"], last["capability"]) == ("GPU-f1bbcdcb-fa53-e0a8-a5c5-87582da4de52", H100, "9.0")
    assert last["memory"] == {"total": 85520809984, "free": 84958773248}
    assert last["nvlinks"] == ["switch"] * 18
    assert last["pcie"] == {"width": 16, "max_width": 16, "generation": 5, "max_generation": 5}


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,1", [2, 1]),
        ("0,2,-1,1", [0, 2]),
        ("1, 9, 2", [1]),
        ("GPU-f1bb", [7]),
        ("GPU-", []),
        ("", []),
        ("none", []),
    ],
)
def test_only_visible_gpus_count(ask: Ask, visible: str, indices: list[int]) -> None:
    assert [gpu["index"] for gpu in ask("8_h100", visible)["gpus"]] == indices


def test_fewer_than_ranks(ask: Ask) -> None:
    finding = one("gpu-count", seen(ask("8_h100", "0,3"), ranks=4))
    assert (finding.grade, finding.host) == (Grade.FAIL, "gpu01")
    assert finding.what == "2 of 4 GPUs: CUDA_VISIBLE_DEVICES is '0,3', with 8 GPUs in this machine"
    assert "--gpus-per-node 2" in finding.fix
    assert said("gpu-count", seen(ask("4_a100_ecc"), ranks=8)) == (Grade.FAIL, "4 of 8 GPUs: 4 GPUs in this machine")


def test_fewer_than_asked_for_over_gloo(ask: Ask) -> None:
    given = seen(ask("4_a100_ecc"), resources={"gpus_per_node": 8})
    assert said("gpu-count", given) == (Grade.WARN, "4 of 8 GPUs: 4 GPUs in this machine")


def test_no_driver(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ask("no_driver")
    why = "the NVIDIA driver does not answer: Driver Not Loaded"
    assert said("gpu-count", seen(facts)) == (Grade.SKIP, f"the job asks for no GPU: {why}")
    assert said("gpu-count", seen(facts, ranks=2)) == (Grade.FAIL, f"0 of 2 GPUs: {why}")
    for name in ("gpu-driver", "gpu-memory", "gpu-ecc", "gpu-peers", "nvlink"):
        assert said(name, seen(facts)) == (Grade.SKIP, why)


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of NVIDIA is requested there, nor need there be anything to ask with."""
    monkeypatch.setattr(probe, "_DRIVERS", ("/dev/none",))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = probe.gpus(ProbeRequest(("gpus",)))
    assert (facts["why"], facts["gpus"]) == ("there is no NVIDIA driver (no /dev/none)", [])
    amd = seen({**facts, "is_amd": True}, ranks=2)
    assert said("gpu-count", amd) == (Grade.SKIP, "AMD GPUs are not checked")


def test_a_driver_and_nothing_to_ask_it_with(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'allranks[gpu]'")):
        ask(None)  # What import finds where there is None is nothing.


def test_what_asks_is_sent_along() -> None:
    """A node has a driver, and a Python with nothing but the standard library."""
    assert _sent_along(["host"]) == []
    sent = program(ProbeRequest(("gpus",)), _sent_along(["gpus"]))
    driver = "import pathlib\npathlib.Path.exists = lambda path: str(path) == '/dev/nvidiactl'\n"
    python = [sys.executable, "-I", "-S", "-c", driver + _BOOTSTRAP, "0"]
    done = subprocess.run(python, input=sent, capture_output=True, text=True, timeout=PATIENCE)
    told = read_reports(done.stdout)[0]
    assert told["errors"] == {}, done.stderr
    if not Path("/dev/nvidiactl").exists():
        assert told["facts"]["gpus"]["why"] == "the NVIDIA driver does not answer: NVML Shared Library Not Found"


def test_gpus_that_are_lost(ask: Ask) -> None:
    facts = ask("8_h100_lost")
    given = seen(facts, ranks=8)
    assert said("gpu-count", given) == (Grade.FAIL, "GPU [4,6]: does not answer (GPU is lost)")
    assert said("gpu-count", seen(facts, ranks=6))[0] is Grade.WARN
    assert said("gpu-ecc", given)[0] is Grade.PASS  # The others are looked at.


@pytest.mark.parametrize(
    ("built", "driver", "grade"),
    [
        ("12.8", "12.8", Grade.PASS),
        ("12.8", "12.2", Grade.PASS),
        ("12.8", "13.0", Grade.PASS),
        ("11.8", "11.0", Grade.PASS),
        ("13.0", "12.9", Grade.FAIL),
        ("12.1", "11.8", Grade.FAIL),
        ("10.2", "10.1", Grade.FAIL),
    ],
)
def test_the_driver_serves_torch(ask: Ask, built: str, driver: str, grade: Grade) -> None:
    facts = {**ask("8_h100"), "cuda": driver}
    assert said("gpu-driver", seen(facts, torch={"version": "2.9", "cuda": built}))[0] is grade


def test_an_old_driver_is_named(ask: Ask) -> None:
    finding = one("gpu-driver", seen(ask("2_2080ti_hot"), ranks=2))
    has = "driver 470.57.02 (CUDA 11.4), torch 2.13.0+cu128 for CUDA 12.8, which the driver is too old for"
    assert (finding.grade, finding.what, finding.host) == (Grade.FAIL, has, "gpu01")
    assert "a torch for CUDA 11" in finding.fix


def test_torch_without_cuda(ask: Ask) -> None:
    cpu, facts = {"version": "2.13.0+cpu", "cuda": None}, ask("8_h100")
    what = "driver 570.124.06 (CUDA 12.8), torch 2.13.0+cpu built without CUDA"
    assert said("gpu-driver", seen(facts, torch=cpu)) == (Grade.WARN, what)
    assert said("gpu-driver", seen(facts, 8, cpu, launch={"backend": "nccl"})) == (Grade.FAIL, what)
    assert said("gpu-driver", seen(facts, torch=None)) == (Grade.SKIP, "there is no torch")


def test_memory_that_others_hold(ask: Ask) -> None:
    nvml = RecordedNvml("4_a100_held")
    for kind in ("Compute", "Graphics"):
        nvml.devices[0][f"nvmlDeviceGet{kind}RunningProcesses"][0]["pid"] = os.getpid()
    facts = ask(nvml)
    finding = one("gpu-memory", seen(facts))
    me = f"{Path('/proc/self/comm').read_text().strip()} {os.getpid()} of {Path('/proc/self').owner()}"
    first = f"GPU 0: 60.1 GB of 85.9 GB free, held by {me}: 25 GB"
    second = "GPU 2: 2.15 GB of 85.9 GB free, held by process 5000001 of another user: 83 GB, "
    second += "process 5000003 of another user: 300 MB"
    assert (finding.grade, finding.what) == (Grade.WARN, f"{first}; {second}")
    assert (finding.fix, finding.exclude) == (f"on gpu01: kill {os.getpid()}", "gpu01")
    assert one("gpu-memory", seen(facts, ranks=4)).grade is Grade.FAIL  # A rank gets GPU 2.
    assert one("gpu-memory", seen(facts, ranks=2)).grade is Grade.WARN  # None does.
    assert one("gpu-memory", seen(ask(nvml, "0,1"), ranks=2)).grade is Grade.WARN


def test_errors_of_memory(ask: Ask) -> None:
    facts = ask("4_a100_ecc")
    finding = one("gpu-ecc", seen(facts, ranks=4))
    first = "bad rows of its memory are replaced at its next reset, "
    first += "2 errors of its memory were not corrected since the driver was loaded"
    second = "bad rows of its memory could not be replaced"
    assert (finding.grade, finding.what, finding.host) == (Grade.FAIL, f"GPU 1: {first}; GPU 2: {second}", "gpu01")
    assert finding.exclude == "gpu01"
    assert one("gpu-ecc", seen(facts, ranks=2)).grade is Grade.WARN  # The one that has failed gets no rank.
    alone = one("gpu-ecc", seen(ask("4_a100_ecc", "0,1"), ranks=2))
    assert (alone.grade, alone.what) == (Grade.WARN, f"GPU 1: {first}")
    assert "nvidia-smi --gpu-reset -i 1" in alone.fix


@pytest.mark.parametrize(
    ("action", "grade", "word"),
    [
        (1, Grade.FAIL, "reset"),
        (2, Grade.FAIL, "reboot"),
        (4, Grade.WARN, "drain and reset"),
        (9, Grade.WARN, "recovery action 9"),
    ],
)
def test_what_the_driver_asks_for(ask: Ask, action: int, grade: Grade, word: str) -> None:
    nvml = RecordedNvml("8_h100")
    nvml.devices[5]["nvmlDeviceGetFieldValues(230)"] = [{"nvmlReturn": 0, "value": {"uiVal": action}}]
    facts = ask(nvml)
    assert one("gpu-ecc", seen(facts)).grade is Grade.WARN  # Nothing runs on it.
    assert said("gpu-ecc", seen(facts, ranks=8)) == (grade, f"GPU 5: the driver asks for a {word}")


def test_hot_and_slowed_down(ask: Ask) -> None:
    given = seen(ask("2_2080ti_hot"))
    why = "GPU 1: slowed down: hardware slowdown, heat (driver), heat (hardware)"
    assert said("gpu-throttle", given) == (Grade.WARN, why)
    assert said("gpu-pcie", given) == (Grade.WARN, "GPU 1: x4 of x16 lanes")


def test_what_an_old_card_does_not_tell(ask: Ask) -> None:
    facts = ask("2_2080ti_hot", "0")
    (gpu,) = facts["gpus"]
    unknown = (gpu["remapped"], gpu["recovery"], gpu["ecc"], gpu["nvlinks"])
    assert unknown == (None, None, {"uncorrected": None}, [])
    assert said("gpu-ecc", seen(facts)) == (Grade.SKIP, "these GPUs do not check their memory")
    assert said("nvlink", seen(facts)) == (Grade.SKIP, "these GPUs have no NVLink")
    assert said("gpu-pcie", seen(facts))[0] is Grade.PASS  # It idles in the first generation.


def test_a_slower_slot_and_a_card_that_idles(ask: Ask) -> None:
    nvml = RecordedNvml("4_a100_ecc")
    nvml.devices[0]["nvmlDeviceGetMaxPcieLinkGeneration"] = 3
    nvml.devices[0]["nvmlDeviceGetCurrPcieLinkGeneration"] = 3
    assert said("gpu-pcie", seen(ask(nvml))) == (Grade.WARN, "GPU 0: generation 3 of PCIe, where others have 4")
    assert said("gpu-pcie", seen(ask(nvml, "0")))[0] is Grade.PASS
    idle = RecordedNvml("2_2080ti_hot")
    idle.each["nvmlDeviceGetCurrPcieLinkWidth"] = 8
    assert said("gpu-pcie", seen(ask(idle, "0")))[0] is Grade.PASS


def test_links_that_are_down(ask: Ask) -> None:
    facts = ask("4_a100_nvlink")
    given = seen_of({"gpu01": {"gpus": ask("4_a100_ecc")}, "gpu02": {"gpus": facts}})
    good, bad = found("nvlink", given)
    assert (good.grade, good.what) == (Grade.PASS, "12 links are up")
    what = "GPU 3: NVLink [4-5] down, and up on others of its model"
    assert (bad.grade, bad.what, bad.host) == (Grade.WARN, what, "gpu02")


def test_links_that_are_down_everywhere_are_not_wired(ask: Ask) -> None:
    nvml = RecordedNvml("4_a100_ecc")
    nvml.each["nvmlDeviceGetNvLinkState(11)"] = 0
    assert said("nvlink", seen(ask(nvml))) == (Grade.PASS, "11 links are up")


@pytest.mark.parametrize(("remote", "grade"), [(0, Grade.PASS), (2, Grade.WARN)])
def test_a_gpu_without_a_bridge_is_no_fault(ask: Ask, remote: int, grade: Grade) -> None:
    nvml = RecordedNvml("4_a100_ecc")
    for link in range(12):
        nvml.each[f"nvmlDeviceGetNvLinkRemoteDeviceType({link})"] = remote
        nvml.devices[3][f"nvmlDeviceGetNvLinkState({link})"] = 0
    assert said("nvlink", seen(ask(nvml)))[0] is grade


def test_gpus_that_do_not_reach_each_other(ask: Ask) -> None:
    nvml = RecordedNvml("4_a100_ecc")
    nvml.devices[0].update({f"nvmlDeviceGetP2PStatus({other} 0)": 3 for other in (1, 2)})
    what = "2 of 6 pairs cannot reach each other: GPU 0-[1-2]: topology"
    assert said("gpu-peers", seen(ask(nvml))) == (Grade.WARN, what)
    usual = "GPUs of this model do not reach each other: NCCL goes through the machine's memory"
    assert said("gpu-peers", seen(ask("2_2080ti_hot"))) == (Grade.PASS, usual)


@pytest.mark.parametrize("visible", [None, "0", "0,1", "MIG-", "GPU-,MIG-"])
def test_one_part_of_a_divided_gpu_can_be_used(ask: Ask, visible: str | None) -> None:
    parts = [part["nvmlDeviceGetUUID"] for part in RecordedNvml("2_a100_mig").devices[0]["parts"]]
    facts = ask("2_a100_mig", f"{parts[1]},{parts[0]}" if visible == "MIG-" else visible)
    if visible == "GPU-,MIG-":  # What names several names none.
        assert facts["why"] == "CUDA_VISIBLE_DEVICES is 'GPU-,MIG-', which shows none of 2"
        return
    (gpu,) = facts["gpus"]
    number = 1 if visible == "MIG-" else 0
    assert (gpu["index"], gpu["part"], gpu["uuid"]) == (0, number, parts[number])
    assert (gpu["name"], gpu["memory"]["total"]) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20937965568)
    alone = "1 of 2 GPUs: a process can use one part of a divided GPU (MIG), and no other GPU beside it"
    assert said("gpu-count", seen(facts, ranks=2)) == (Grade.FAIL, alone)
    assert said("gpu-peers", seen(facts)) == (Grade.SKIP, "there are no two whole GPUs")


def test_a_divided_machine_has_a_gpu_that_is_not(ask: Ask) -> None:
    (gpu,) = ask("2_a100_mig", "1")["gpus"]
    assert (gpu["index"], gpu["part"]) == (1, None)


def test_nodes_with_other_gpus(ask: Ask) -> None:
    h100, a100 = ({"gpus": ask(machine)} for machine in ("8_h100", "4_a100_ecc"))
    none = {"gpus": {**ask("no_driver")}}
    given = seen_of({"gpu01": h100, "gpu02": a100, "gpu03": h100, "gpu04": none})
    usual = f"where 2 nodes have 8 x {H100}"
    assert [(finding.grade, finding.what, finding.host) for finding in found("gpu-same", given)] == [
        (Grade.WARN, f"4 x {A100}, {usual}", "gpu02"),
        (Grade.WARN, f"no GPU, {usual}", "gpu04"),
    ]
    (same,) = found("gpu-same", seen_of({"gpu01": h100, "gpu02": h100}))
    assert (same.grade, same.what) == (Grade.PASS, f"8 x {H100} on each node")
    (skipped,) = found("gpu-same", seen_of({"gpu01": none, "gpu02": none}))
    assert skipped.grade is Grade.SKIP
