"""What is said of machines, from what they tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from seen import found, seen_of

from allranks.preflight.model import Grade

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
            "4.29 GB of 8.59 GB free, of which this process may use 105 MB",
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
        ("processes", {"limits": {"nproc": [100, 100]}}, Grade.WARN, "100"),
        ("processes", {"limits": {"nproc": [None, None]}}, Grade.PASS, "unlimited"),
        ("leftovers", {"leftovers": []}, Grade.PASS, "none"),
    ],
)
def test_a_machine(name: str, facts: dict[str, Any], grade: Grade, what: str) -> None:
    assert _found(name, facts) == (grade, what)


def test_fewer_cpus_than_asked_for() -> None:
    facts = {"cpus": {"all": 8, "allowed": 2}}
    asked = {"resources": {"cpus_per_node": 4}}
    assert _found("cpus", facts, asked) == (Grade.WARN, "2 of 8 CPUs may be used, and 4 are asked for")
    ranks = {"launch": {"nproc_per_node": 4}}
    assert _found("cpus", facts, ranks) == (Grade.WARN, "2 of 8 CPUs may be used, by 4 ranks")


def test_less_memory_than_asked_for() -> None:
    facts = {"memory": {"total": 8 * GB, "available": 4 * GB, "limit": None}}
    asked = {"resources": {"memory": "6GB"}}
    assert _found("memory", facts, asked) == (Grade.WARN, "4.29 GB of 8.59 GB free; 6.44 GB are asked for")


def test_locked_memory_matters_where_there_is_infiniband() -> None:
    port = {"device": "mlx5_0", "state": "4: ACTIVE"}

    def grade(soft: int | None, *ports: dict[str, str], backend: str = "nccl") -> Grade:
        seen = seen_of({"gpu01": {"limits": {"memlock": [soft, soft]}, "infiniband": ports}})
        (finding,) = found("memlock", replace(seen, plan=replace(seen.plan, backend=backend)))
        return finding.grade

    assert grade(8 << 20, port) is Grade.FAIL
    assert grade(8 * GB, port) is Grade.WARN
    assert grade(None, port) is Grade.PASS
    assert grade(8 << 20) is Grade.PASS
    assert grade(8 << 20, {**port, "state": "1: DOWN"}) is Grade.PASS
    assert grade(8 << 20, port, backend="gloo") is Grade.PASS


def test_what_an_earlier_run_has_left_is_named() -> None:
    left = [
        {"pid": pid, "run": "/r/old-1", "command": "python train.py", "seconds": 60, "memory": 5 << 20}
        for pid in (11, 12, 13, 14)
    ]
    (finding,) = found("leftovers", seen_of({"gpu01": {"leftovers": left}}))
    told = ", ".join(f"{pid} (python train.py, 5.24 MB)" for pid in (11, 12, 13))
    assert finding.what == f"4 of /r/old-1: {told} and 1 more"
    assert (finding.grade, finding.fix) == (Grade.WARN, "kill 11 12 13 14")
