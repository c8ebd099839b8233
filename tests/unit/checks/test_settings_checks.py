from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from seen import found, seen_of

from allranks.checks.collect.gather import ProbeRequest
from allranks.checks.collect.machine import variables
from allranks.checks.known_variables import FAMILIES, KNOWN, OBSOLETE
from allranks.checks.model import Finding, Grade


def node(values: Mapping[str, str], **more: Any) -> dict[str, Any]:
    return {"variables": {"values": dict(values), "set": []}, **more}


def of_one(name: str, values: Mapping[str, str], job: Mapping[str, Any] | None = None, **more: Any) -> Finding:
    (finding,) = found(name, seen_of({"gpu01": node(values, **more)}, job))
    assert finding.host == "gpu01"
    return finding


def test_the_fact_has_what_matters_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_SECRET", "FI_PROVIDER", "HF_TOKEN", "HOME_OF_THE_SITE"):
        monkeypatch.setenv(name, "hunter22222")
    fact = variables(ProbeRequest((), variables=("HF_TOKEN", "HOME_OF_THE_SITE", "NOT_THERE")))
    assert fact["set"] == ["HF_TOKEN", "HOME_OF_THE_SITE"]
    assert {name for name, value in fact["values"].items() if value == "hunter22222"} == {"NCCL_DEBUG", "FI_PROVIDER"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"),
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBGU", "NCCL_DEBUG"),
        ("NCCL_IB_DISABLED", "NCCL_IB_DISABLE"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_DISTRIBUTE_DEBUG", "TORCH_DISTRIBUTED_DEBUG"),
        ("GLOO_SOCKET_IFNAMES", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_misspelt_variable_is_found(name: str, meant: str) -> None:
    finding = of_one("variables", {name: "1"})
    assert (finding.grade, finding.what, finding.fix) == (Grade.WARN, f"{name} is not known", f"did you mean {meant}?")


#: Images and modules set the first ones, plugins read the next, and others are of releases that nobody knows yet.
NOT_OURS = (
    *(
        "NCCL_VERSION",
        "NCCL_ROOT",
        "NCCL_HOME",
        "NCCL_INC",
        "NCCL_LIB",
        "NCCL_LIBRARY",
        "NCCL_INCLUDE_DIR",
        "NCCL_PATH",
    ),
    *("NCCL_SHARP_DISABLE", "NCCL_UCX_TLS", "NCCL_PLUGIN_P2P", "NCCL_FASTRAK_IFNAME", "GLOO_CLIENT_ID"),
    *("NCCL_PATH", "TORCH_SITE_LOCAL", "NCCL_GIN_IB_SL", "NCCL_IB"),
)


#: Of torch: some are called nearly like others, and do something else.
OF_TORCH = (
    *("TORCH_HOME", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_LINALG_PREFER_HIPSOLVER", "TORCH_DTRACE"),
    *("TORCH_XCCL_BLOCKING_WAIT", "TORCH_XCCL_NAN_CHECK", "TORCH_XCCL_ASYNC_ERROR_HANDLING"),
    *("TORCH_XCCL_HIGH_PRIORITY", "TORCH_XCCL_XPU_EVENT_CACHE"),
    *("TORCH_UCC_BLOCKING_WAIT", "TORCH_PG_HEARTBEAT_TIMEOUT_SEC"),
)


@pytest.mark.parametrize("name", [*NOT_OURS, "NCCL_P2P_DISABLE", *OF_TORCH])
def test_a_variable_of_a_build_a_plugin_or_a_newer_release_is_no_mistake(name: str) -> None:
    finding = of_one("variables", {name: "0"})
    assert finding == Finding(Grade.PASS, "1 variable of NCCL, torch and gloo", host="gpu01")


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "NCCL_TREE_THRESHOLD",
            "NCCL_TREE_THRESHOLD is not read any more since NCCL 2.5",
            "NCCL_ALGO instead of NCCL_TREE_THRESHOLD",
        ),
        (
            "NCCL_BLOCKING_WAIT",
            "NCCL_BLOCKING_WAIT is deprecated since torch 2.2",
            "TORCH_NCCL_BLOCKING_WAIT instead of NCCL_BLOCKING_WAIT",
        ),
        (
            "TORCH_CUDNN_V8_API_ENABLED",
            "TORCH_CUDNN_V8_API_ENABLED is not read any more since torch 2.0",
            "unset TORCH_CUDNN_V8_API_ENABLED",
        ),
        ("NCCL_LAUNCH_MODE", "NCCL_LAUNCH_MODE is deprecated since NCCL 2.9", "unset NCCL_LAUNCH_MODE"),
        (
            "NCCL_TIMEOUT",
            "no NCCL has ever read NCCL_TIMEOUT",
            "timeout= of init_process_group instead of NCCL_TIMEOUT",
        ),
    ],
)
def test_an_obsolete_variable_is_found_with_what_to_write(name: str, what: str, fix: str) -> None:
    finding = of_one("variables", {name: "1"})
    assert (finding.grade, finding.what, finding.fix) == (Grade.WARN, what, fix)


def test_what_became_obsolete_after_a_node_s_versions_is_not() -> None:
    values = {"NCCL_CHECK_POINTERS": "1", "NCCL_BLOCKING_WAIT": "1"}
    old = of_one("variables", values, torch={"version": "2.1.2+cu121", "cuda": "12.1", "nccl": "2.18.1"})
    new = of_one("variables", values, torch={"version": "2.13.0", "cuda": "13.0", "nccl": "2.30.4"})
    assert old.grade is Grade.PASS
    assert new.what == (
        "NCCL_CHECK_POINTERS is deprecated since NCCL 2.29.7; NCCL_BLOCKING_WAIT is deprecated since torch 2.2"
    )


def test_what_torch_does_anyway_is_told_from_that_version_on() -> None:
    values = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert of_one("variables", values, torch={"version": "2.7.1+cu126", "nccl": "2.26.2"}).grade is Grade.PASS
    new = of_one("variables", values, torch={"version": "2.8.0+cu128", "nccl": "2.27.3"})
    assert (new.grade, new.what) == (Grade.WARN, "TORCH_NCCL_AVOID_RECORD_STREAMS is always on since torch 2.8")
    assert new.fix == "unset TORCH_NCCL_AVOID_RECORD_STREAMS"


def test_the_tables_agree() -> None:
    assert {name for name in KNOWN if not name.startswith(FAMILIES)} == set()
    replaced = [entry.instead.partition("=")[0] for entry in OBSOLETE if entry.instead.startswith(FAMILIES)]
    assert {*replaced} <= {*KNOWN} - {entry.name for entry in OBSOLETE}
    assert len(replaced) > 15


def test_what_was_left_on_is_found_unless_the_job_debugs() -> None:
    values = {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "detail", "TORCH_SHOW_CPP_STACKTRACES": "0"}
    finding = of_one("debug", values)
    assert finding.grade is Grade.WARN
    assert finding.what == (
        "TORCH_DISTRIBUTED_DEBUG=detail: each collective is compared on all ranks first; "
        "CUDA_LAUNCH_BLOCKING=1: the CPU waits for each kernel"
    )
    assert of_one("debug", values, {"debug": True}).grade is Grade.PASS
    assert of_one("debug", {"NCCL_DEBUG": "WARN", "CUDA_LAUNCH_BLOCKING": "0"}).grade is Grade.PASS


@pytest.mark.parametrize("subsystems", ["ALL", "init,coll", "TUNING", "^NET"])
def test_nccl_that_tells_of_each_operation_is_left_on(subsystems: str) -> None:
    values = {"NCCL_DEBUG": "info", "NCCL_DEBUG_SUBSYS": subsystems}
    finding = of_one("debug", values)
    assert finding.grade is Grade.WARN
    assert finding.what == f"NCCL_DEBUG=info: with NCCL_DEBUG_SUBSYS={subsystems} it writes a line for each operation"
    assert of_one("debug", {**values, "NCCL_DEBUG": "WARN"}).what == "nothing is left on"


def test_nccl_that_tells_of_its_start_is_left_on() -> None:
    finding = of_one("debug", {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"})
    what = "NCCL_DEBUG=INFO: each rank writes many lines at its start, among which others are not seen"
    assert (finding.grade, finding.what) == (Grade.WARN, what)


def test_infiniband_that_is_turned_off_is_found_where_it_is_active() -> None:
    port = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "rate": "", "layer": "InfiniBand"}
    finding = of_one("debug", {"NCCL_IB_DISABLE": "1"}, infiniband=[port, {**port, "device": "mlx5_1"}])
    assert finding.what == "NCCL_IB_DISABLE=1, and InfiniBand is active: mlx5_0/1 and mlx5_1/1"
    for other in ({"state": "DOWN"}, {"layer": "Ethernet"}):
        assert of_one("debug", {"NCCL_IB_DISABLE": "1"}, infiniband=[{**port, **other}]).grade is Grade.PASS


@pytest.mark.parametrize(
    ("given", "cpus", "ranks", "grade", "what"),
    [
        (None, 2, 2, Grade.PASS, "OMP_NUM_THREADS is not set: it will be the CPUs of each rank"),
        ("2", 2, 2, Grade.WARN, "OMP_NUM_THREADS=2, with 2 CPUs for 2 ranks"),
        ("1", 2, 4, Grade.PASS, "OMP_NUM_THREADS=1, with 2 CPUs for 4 ranks"),
        ("1", 64, 8, Grade.WARN, "OMP_NUM_THREADS=1, with 64 CPUs for 8 ranks"),
        ("1", 32, 8, Grade.PASS, "OMP_NUM_THREADS=1, with 32 CPUs for 8 ranks"),
        ("4,2", 32, 8, Grade.PASS, "OMP_NUM_THREADS=4,2, with 32 CPUs for 8 ranks"),
        ("all", 32, 8, Grade.WARN, "invalid number of threads: OMP_NUM_THREADS=all"),
    ],
)
def test_threads_are_compared_with_the_cpus_of_each_rank(
    given: str | None, cpus: int, ranks: int, grade: Grade, what: str
) -> None:
    values = {"OMP_NUM_THREADS": given} if given else {}
    job = {"launch": {"nproc_per_node": ranks, "backend": "gloo"}}
    finding = of_one("threads", values, job, cpus={"all": 128, "allowed": cpus})
    assert (finding.grade, finding.what) == (grade, what)


def test_variables_that_the_site_needs_are_missed_where_they_are_not_set() -> None:
    job = {
        "checks": {"variables": "SITE_ROOT, FABRIC, HF_TOKEN"},
        "environment": {"variables": {"HF_TOKEN": "hunter22222"}},
    }
    facts = {
        "gpu01": {"variables": {"values": {}, "set": ["SITE_ROOT", "FABRIC"]}},
        "gpu02": {"variables": {"values": {}, "set": ["FABRIC"]}},
    }
    good, bad = found("site-variables", seen_of(facts, job))
    assert good == Finding(Grade.PASS, "set: SITE_ROOT, FABRIC and HF_TOKEN", host="gpu01")
    assert (bad.grade, bad.what, bad.host) == (Grade.FAIL, "not set: SITE_ROOT", "gpu02")
    _, unprepared = found("site-variables", seen_of(facts, job, is_prepared=False))
    assert unprepared.grade is Grade.SKIP
    assert of_one("site-variables", {}) == Finding(Grade.SKIP, "checks.variables names none", host="gpu01")


def test_the_node_whose_settings_differ_is_named() -> None:
    values: dict[str, dict[str, str]] = {f"gpu0{number}": {"NCCL_ALGO": "Ring"} for number in range(1, 4)}
    values["gpu02"] |= {"NCCL_SOCKET_IFNAME": "ib1", "NCCL_PROTO": "", "TORCH_HOME": "/x"}
    values["gpu03"] = {"NCCL_ALGO": "Tree"}
    findings = found("same-variables", seen_of({host: node(each) for host, each in values.items()}))
    assert [(finding.grade, finding.host, finding.what) for finding in findings] == [
        (Grade.WARN, "gpu03", "NCCL_ALGO is Tree, and Ring on the others"),
        (Grade.WARN, "gpu02", "NCCL_PROTO is empty, and not set on the others"),
    ]
    same = found("same-variables", seen_of({host: node({"NCCL_ALGO": "Ring"}) for host in values}))
    assert same == [Finding(Grade.PASS, "1 setting of NCCL, the same on 3 nodes")]
