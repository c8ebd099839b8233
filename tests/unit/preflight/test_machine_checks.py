from __future__ import annotations

from seen import found, seen_of

from allranks.preflight.model import Finding, Grade

GB = 1 << 30


def test_little_shared_memory_is_found_on_its_node() -> None:
    facts = {"gpu01": {"shm": {"all": 8 * GB, "free": 8 * GB}}, "gpu02": {"shm": {"all": 1 << 20, "free": 1 << 20}}}
    good, bad = found("shm", seen_of(facts))
    assert good == Finding(Grade.PASS, "8.59 GB of 8.59 GB free", host="gpu01")
    assert (bad.grade, bad.what, bad.host) == (Grade.WARN, "1.05 MB of 1.05 MB free", "gpu02")
