"""What is said of a node that does not tell what it sees."""

from __future__ import annotations

import pytest

from allranks.clusters.base import Looked
from allranks.clusters.commands import Answer
from allranks.preflight.looking import _node
from allranks.preflight.model import Finding, failed, warned

LATE = Answer(255, "", "no answer within 60 s", unreached=True, is_late=True)
WHAT = "it does not answer: no answer within 60 s"


@pytest.mark.parametrize(
    ("lasting", "expected"),
    [
        ("", failed(WHAT, fix="is gpu2 hanging? ssh gpu2 uptime", host="gpu2", exclude="gpu2")),
        (
            "container",
            warned(WHAT, fix="does environment.container take longer? If not: ssh gpu2 uptime", host="gpu2"),
        ),
    ],
)
def test_a_node_that_has_not_answered_hangs_unless_what_it_begins_with_may_take_long(
    lasting: str, expected: Finding
) -> None:
    assert _node(1, Looked("gpu2", LATE), lasting).failure == expected
