"""How to continue without a node is told where there is such a way."""

from __future__ import annotations

import pytest
from seen import seen_of

from allranks.checks.model import Check, Finding, Grade
from allranks.checks.preflight import run_checks
from allranks.clusters.registry import load_kind


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("local", "look at it"),
        ("ssh", "look at it; or leave it out: --exclude gpu03"),
        ("pdsh", "look at it; or leave it out: --exclude gpu03"),
        ("slurm", "look at it; or leave it out: --exclude gpu03"),
        ("pbs", "look at it; or have PBS leave it out: pbsnodes -o gpu03"),
    ],
)
def test_a_node_that_is_at_fault_is_left_out_as_the_cluster_can(kind: str, fix: str) -> None:
    bad = Finding(Grade.WARN, "slow", "look at it", "gpu03", exclude="gpu03")
    seen = seen_of({}, without=load_kind(kind).without)
    (result,) = run_checks([Check("own", "", lambda _: [bad])], seen)
    assert (result.finding.fix, result.to_json()["exclude"]) == (fix, "" if kind == "local" else "gpu03")


def test_a_fault_of_no_node_has_no_such_way() -> None:
    bad = Finding(Grade.FAIL, "missing", "install it")
    (result,) = run_checks([Check("own", "", lambda _: [bad])], seen_of({}, without="leave it out: --exclude {}"))
    assert result.finding == bad
