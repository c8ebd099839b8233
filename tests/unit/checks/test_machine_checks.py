"""What is said of machines, from what they tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from seen import found, seen_of

from allranks.checks.model import Finding, Grade

GB = 1 << 30


def _found(name: str, facts: dict[str, Any], job: dict[str, Any] | None = None) -> tuple[Grade, str]:
    (finding,) = found(name, seen_of({"gpu01": facts}, job))
    assert finding.host == "gpu01"
    assert bool(finding.fix) == (finding.grade in (Grade.WARN, Grade.FAIL))
    return finding.grade, finding.what


def _disk(**more: Any) -> dict[str, Any]:
    return {"path": "/r", "there": "/r", "all": 9 * GB, "free": 5 * GB, "files": 10**6, "error": None, **more}


@pytest.mark.parametrize(
    ("name", "facts", "grade", "what"),
    [
        ("shm", {"shm": {"all": 8 * GB, "free": 8 * GB}}, Grade.PASS, "8.59 GB of 8.59 GB free"),
        ("shm", {"shm": {"all": 1 << 20, "free": 1 << 20}}, Grade.WARN, "1.05 MB of 1.05 MB free"),
        ("shm", {"shm": {"all": 64 << 20, "free": 64 << 20}}, Grade.WARN, "67.1 MB of 67.1 MB free"),
        ("shm", {"shm": {"all": 8 * GB, "free": 256 << 20}}, Grade.PASS, "268 MB of 8.59 GB free"),
        ("shm", {"shm": None}, Grade.WARN, "there is no /dev/shm"),
        ("cpus", {"cpus": {"all": 8, "allowed": 4}}, Grade.PASS, "4 of 8 CPUs may be used"),
        (
            "memory",
            {"memory": {"total": 8 * GB, "available": 4 * GB, "limit": None}},
            Grade.PASS,
            "4.29 GB of 8.59 GB free",
        ),
        (
            "memory",
            {"memory": {"total": 8 * GB, "available": 4 * GB, "limit": 100 << 20}},
            Grade.WARN,
            "4.29 GB of 8.59 GB free, of which this process may use 105 MB; the ranks (1) take about 262 MB",
        ),
        ("room", {"disks": {"runs": _disk()}}, Grade.PASS, "5.37 GB free in /r (runs)"),
        (
            "room",
            {"disks": {"runs": _disk(), "temporary": _disk(path="/tmp", free=0, error="No space left on device")}},
            Grade.WARN,
            "/tmp (temporary) cannot be written: No space left on device",
        ),
        (
            "room",
            {"disks": {"runs": _disk(error="No space left on device"), "temporary": _disk(free=5)}},
            Grade.FAIL,
            "/r cannot be written: No space left on device",
        ),
        ("room", {"disks": {"runs": _disk(files=0)}}, Grade.PASS, "5.37 GB free in /r (runs)"),
        ("open-files", {"limits": {"nofile": [1024, 1048576]}}, Grade.PASS, "1024, at most 1048576"),
        ("open-files", {"limits": {"nofile": [1024, 1024]}}, Grade.WARN, "1024, at most 1024"),
        ("open-files", {"limits": {"nofile": [None, None]}}, Grade.PASS, "unlimited"),
        ("processes", {"limits": {"nproc": [100, 100], "tasks": None}}, Grade.WARN, "100"),
        ("processes", {"limits": {"nproc": [9000, 9000], "tasks": 200}}, Grade.WARN, "200"),
        ("processes", {"limits": {"nproc": [None, None], "tasks": 9000}}, Grade.PASS, "9000"),
        ("processes", {"limits": {"nproc": [None, None], "tasks": None}}, Grade.PASS, "unlimited"),
        ("leftovers", {"leftovers": []}, Grade.PASS, "none"),
    ],
)
def test_a_machine(name: str, facts: dict[str, Any], grade: Grade, what: str) -> None:
    assert _found(name, facts) == (grade, what)


def test_fewer_cpus_than_asked_for() -> None:
    facts = {"cpus": {"all": 8, "allowed": 2}}
    asked = {"resources": {"cpus_per_node": 4}}
    assert _found("cpus", facts, asked) == (Grade.WARN, "2 of 8 CPUs may be used, and 4 are requested")
    ranks = {"launch": {"nproc_per_node": 4}}
    assert _found("cpus", facts, ranks) == (Grade.WARN, "2 of 8 CPUs may be used, by 4 ranks")


def test_numbers_of_ranks_that_no_machine_holds() -> None:
    most = {"launch": {"nproc_per_node": 64}}
    far = {"launch": {"nproc_per_node": 65}}
    cpus = {"cpus": {"all": 4, "allowed": 4}}
    assert _found("cpus", cpus, most) == (Grade.WARN, "4 of 4 CPUs may be used, by 64 ranks")
    assert _found("cpus", cpus, far) == (Grade.FAIL, "4 of 4 CPUs may be used, by 65 ranks")
    memory = {"memory": {"total": 1 << 30, "available": 1 << 30, "limit": None}}
    assert _found("memory", memory, most) == (
        Grade.WARN,
        "1.07 GB of 1.07 GB free; the ranks (64) take about 16.8 GB",
    )
    (finding,) = found("memory", seen_of({"gpu01": memory}, most))
    assert finding.fix == "--nproc-per-node 4, or a node with more"
    what = "1.07 GB of 1.07 GB free; 65 ranks take 1.09 GB at least"
    assert _found("memory", memory, far) == (Grade.FAIL, what)
    limited = {"memory": {"total": 9 << 30, "available": 9 << 30, "limit": 1 << 30}}
    assert _found("memory", limited, far)[0] is Grade.FAIL
    limits = {"limits": {"nproc": [64, 64], "tasks": None}}
    assert _found("processes", limits, most) == (Grade.WARN, "64")
    assert _found("processes", limits, far) == (Grade.FAIL, "64 at most, and 65 ranks are requested")
    kernel = {"limits": {"nproc": [None, None], "tasks": None, "kernel": 64}}
    assert _found("processes", kernel, most) == (Grade.PASS, "unlimited")
    assert _found("processes", kernel, far) == (Grade.FAIL, "64 at most, and 65 ranks are requested")


def test_less_memory_than_asked_for() -> None:
    facts = {"memory": {"total": 8 * GB, "available": 4 * GB, "limit": None}}
    asked = {"resources": {"memory": "6GB"}}
    assert _found("memory", facts, asked) == (Grade.WARN, "4.29 GB of 8.59 GB free; 6.44 GB are requested")


PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "layer": "InfiniBand"}
ETHERNET = {**PORT, "device": "mlx5_1", "layer": "Ethernet"}


def _memlock(
    soft: int | None, *ports: dict[str, Any], backend: str = "nccl", nodes: int = 2, prepared: bool = True, **more: Any
) -> Finding:
    """Check a node, one of several, with ports, variables and what else its limits are."""
    values = {name: more.pop(name) for name in [*more] if name.startswith("NCCL_")}
    facts = {
        "limits": {"memlock": [soft, soft], "locks_any": False, "verbs": True, **more},
        "infiniband": [*ports],
        "variables": {"values": values, "set": []},
    }
    seen = seen_of({f"gpu0{number}": facts for number in range(1, nodes + 1)}, is_prepared=prepared)
    first, *_ = found("memlock", replace(seen, plan=replace(seen.plan, backend=backend)))
    return first


def test_locked_memory_matters_where_nccl_goes_by_infiniband() -> None:
    low = 64 << 10
    assert _memlock(low, PORT) == Finding(
        Grade.FAIL,
        "65.5 KB, and mlx5_0 is active",
        "'memlock unlimited' in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd or sshd",
        "gpu01",
    )
    assert _memlock(low, ETHERNET, PORT).what == "65.5 KB, and mlx5_0 is active"
    assert _memlock(None, PORT).grade is Grade.PASS
    assert _memlock(low).grade is Grade.PASS
    assert _memlock(low, {**PORT, "state": "DOWN"}).grade is Grade.PASS
    assert _memlock(low, PORT, backend="gloo").grade is Grade.PASS
    assert _memlock(low, PORT, nodes=1).grade is Grade.PASS
    assert _memlock(low, PORT, verbs=False).grade is Grade.PASS
    assert _memlock(low, PORT, NCCL_IB_DISABLE="1").grade is Grade.PASS
    assert _memlock(low, PORT, NCCL_NET="Socket").grade is Grade.PASS
    free = _memlock(low, PORT, locks_any=True)
    assert (free.grade, free.what) == (Grade.PASS, "65.5 KB, which does not bind a process with CAP_IPC_LOCK")


def test_a_limit_of_locked_memory_that_nccl_may_do_with_refuses_no_job() -> None:
    low = 64 << 10
    assert _memlock(8 << 20, PORT).grade is Grade.WARN
    assert _memlock(low, ETHERNET).grade is Grade.WARN
    assert _memlock(low, PORT, NCCL_IB_DISABLE="0", NCCL_NET="IB").grade is Grade.FAIL
    assert _memlock(low, PORT, NCCL_IB_HCA="mlx5_1").grade is Grade.WARN
    assert _memlock(low, PORT, NCCL_NET="AWS Libfabric").grade is Grade.WARN
    assert _memlock(low, PORT, prepared=False).grade is Grade.WARN


def test_what_bounds_processes_is_what_to_raise() -> None:
    for nproc, tasks, fix in ((100, 900, "'nproc unlimited'"), (900, 100, "TasksMax=infinity")):
        (finding,) = found("processes", seen_of({"gpu01": {"limits": {"nproc": [nproc, nproc], "tasks": tasks}}}))
        assert finding.what == "100"
        assert finding.fix.startswith(fix)


@pytest.mark.parametrize(("most", "grade"), [(511, Grade.WARN), (512, Grade.PASS)])
def test_each_rank_may_start_256_processes_and_threads(most: int, grade: Grade) -> None:
    seen = seen_of({"gpu01": {"limits": {"nproc": [most, most], "tasks": None}}}, {"launch": {"nproc_per_node": 2}})
    assert [finding.grade for finding in found("processes", seen)] == [grade]


def test_what_an_earlier_run_has_left_is_named() -> None:
    left = [
        {"pid": pid, "run": "/r/old-1", "command": "python train.py", "seconds": 60, "memory": 5 << 20}
        for pid in (11, 12, 13, 14)
    ]
    (finding,) = found("leftovers", seen_of({"gpu01": {"leftovers": left}}))
    told = ", ".join(f"{pid} (python train.py, 5.24 MB)" for pid in (11, 12, 13))
    assert finding.what == f"4 of /r/old-1: {told} and 1 more"
    assert (finding.grade, finding.fix) == (Grade.WARN, "kill 11 12 13 14")
