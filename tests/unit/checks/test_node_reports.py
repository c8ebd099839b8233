"""What is said of a node that does not report what it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from seen import found, seen_of

from allranks.checks.model import Finding, Grade, failed, passed, warned
from allranks.checks.probe import why_no_report
from allranks.clusters.base import ProbeResult
from allranks.system.commands import Answer

LATE = Answer(255, "", "no answer within 60 s", unreached=True, is_late=True)
WHAT = "it does not answer: no answer within 60 s"


@pytest.mark.parametrize(
    ("lasting", "expected"),
    [
        ("", failed(WHAT, fix="is gpu2 hanging? ssh gpu2 uptime", exclude="gpu2")),
        (
            "container",
            warned(WHAT, fix="does environment.container take longer? If not: ssh gpu2 uptime"),
        ),
    ],
)
def test_a_node_that_has_not_answered_hangs_unless_what_it_begins_with_may_take_long(
    lasting: str, expected: Finding
) -> None:
    assert why_no_report(ProbeResult("gpu2", LATE), lasting) == expected


@pytest.mark.parametrize(
    ("absent", "min_nodes", "grade"),
    [({1}, 2, Grade.WARN), ({1}, 0, Grade.FAIL), ({1, 2}, 2, Grade.FAIL), ({0}, 2, Grade.FAIL)],
)
def test_a_job_starts_without_nodes_that_it_does_not_need_but_never_without_the_first(
    absent: set[int], min_nodes: int, grade: Grade
) -> None:
    seen = seen_of({host: {"host": {"python": "3.11.7"}} for host in ("gpu1", "gpu2", "gpu3")})
    failure = failed("it cannot be reached", fix="ssh gpu2", host="gpu2", exclude="gpu2")
    nodes = tuple(replace(node, failure=failure if node.number in absent else None) for node in seen.nodes)
    plan = replace(seen.plan, nnodes=3, min_nodes=min_nodes)
    why = "the job starts without it" if grade is Grade.WARN else ""
    assert found("nodes", replace(seen, nodes=nodes, plan=plan)) == [
        replace(failure, grade=grade, why=why) if node.number in absent else passed("Python 3.11.7", host=node.host)
        for node in nodes
    ]
