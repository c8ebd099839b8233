"""What a search for the node or link at fault comes to, in words; and when there is one."""

from __future__ import annotations

from typing import Any

import pytest
from seen import found, seen_of

from allranks.checks.model import Finding, failed, passed, skipped, warned
from allranks.checks.selftest import _others, findings
from allranks.clusters.registry import load_kind
from allranks.record.selftest import Collective, Link, SearchResult
from allranks.runs.status import State
from recorded_trial import trial_of, who

HOSTS = ("gpu01", "gpu02", "gpu03", "gpu04")
SIZE = 2_000_000


LOOK = "top, dmesg, ip -s link, ethtool"


def bad(*nodes: int, seconds: float | None = None, error: str = "") -> dict[str, Any]:
    return {"nodes": [*nodes], "seconds": seconds, "error": error}


def searched(*culprits: dict[str, Any], **more: Any) -> SearchResult:
    given = {"is_bad": True, "culprits": culprits, "usual": 0.002, "size": SIZE, **more}
    return SearchResult(0, **given)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            searched(bad(2, seconds=0.4)),
            warned(
                "with each node that it was tried with at 5 MB/s, where others have 1 GB/s",
                fix=f"on gpu03: {LOOK}",
                host="gpu03",
                exclude="gpu03",
            ),
        ),
        (
            searched(bad(2, error="Connection refused")),
            failed(
                "with each node that it was tried with nothing got through (Connection refused), "
                "where others have 1 GB/s",
                fix=f"on gpu03: {LOOK}",
                host="gpu03",
                exclude="gpu03",
            ),
        ),
        (
            searched(bad(1, 3, seconds=0.4)),
            warned(
                "between gpu02 and gpu04, each of which does well with others: at 5 MB/s, where others have 1 GB/s",
                fix=f"on both: {LOOK}",
                exclude="gpu04",
            ),
        ),
        (
            searched(bad(1, 3), usual=None),
            failed(
                "between gpu02 and gpu04, each of which does well with others: nothing got through",
                fix=f"on both: {LOOK}",
                exclude="gpu04",
            ),
        ),
        (
            searched(bad(2, seconds=0.4), backend="nccl"),
            warned(
                "with each node that it was tried with at 5 MB/s, from the first GPU of each node, "
                "where others have 1 GB/s",
                fix=f"on gpu03: {LOOK}",
                host="gpu03",
                exclude="gpu03",
            ),
        ),
        (
            searched(seconds=0.4, usual=0.2, least=5e7),
            warned(
                "all 4 nodes alike at 5 MB/s, where 50 MB/s may be expected; "
                "no node or link alone could be found at fault",
                fix="what do they share: a switch, a firewall, an interface? Check again with half of them",
            ),
        ),
        (
            searched(usual=None, error="no route"),
            failed(
                "all 4 nodes together nothing got through (no route); no node or link alone could be found at fault",
                fix="what do they share: a switch, a firewall, an interface? Check again with half of them",
            ),
        ),
        (
            searched(seconds=0.4),
            warned(
                "all 4 nodes together at 5 MB/s, where others have 1 GB/s; "
                "no node or link alone could be found at fault",
                fix="what do they share: a switch, a firewall, an interface? Check again with half of them",
            ),
        ),
        (
            SearchResult(0, silent=(2,)),
            failed(
                "no answer: it hangs, or cannot reach the first node",
                fix=f"on gpu03: {LOOK}",
                host="gpu03",
                exclude="gpu03",
            ),
        ),
        (
            searched(is_bad=False, seconds=0.002, least=5e7),
            passed("what was slow or failed did not recur when the nodes were searched: all together at 1 GB/s"),
        ),
        (
            searched(is_bad=False, seconds=0.002),
            skipped("all nodes alike at 1 GB/s: none is slower than the others, and the expected speed is not known"),
        ),
    ],
)
def test_what_was_found_is_named_with_what_was_measured(told: SearchResult, expected: Finding) -> None:
    assert [*findings(told, HOSTS)] == [expected]


def test_further_nodes_are_counted() -> None:
    _, more = findings(searched(bad(0, seconds=0.4), more=2), HOSTS)
    assert more.what == "2 further nodes did well with no other one, and few others were left to try"


def test_of_many_links_eight_are_named() -> None:
    links = [bad(one, other) for one in range(3) for other in range(3, 6)]
    *named, more = findings(searched(*links), [f"gpu{node:02}" for node in range(6)])
    assert [finding.what[:23] for finding in named][-1] == "between gpu02 and gpu04"
    assert more.what == "1 further pair of nodes: as badly with each other"


def test_the_node_that_bad_links_have_in_common_is_left_out() -> None:
    assert [one.exclude for one in findings(searched(bad(0, 1), bad(0, 3)), HOSTS)] == ["gpu01", "gpu01"]


def test_of_two_nodes_neither_is_known_to_do_well_with_others() -> None:
    (finding,) = findings(searched(bad(0, 1), usual=None), HOSTS[:2])
    assert (finding.what, finding.exclude) == ("between gpu01 and gpu02: nothing got through", "")


def test_two_nodes_are_as_slow_as_is_known_of_them() -> None:
    (finding,) = findings(searched(bad(0, 1, seconds=0.4), usual=0.4, least=5e7), HOSTS[:2])
    assert finding.what == "between gpu01 and gpu02: at 5 MB/s, where 50 MB/s may be expected"


GOOD = [Collective(rank, "barrier", seconds=0.1) for rank in range(4)]
LINKS = [Link(rank, (rank + 1) % 4, SIZE, 0.002) for rank in range(4)]
SLOW = [*LINKS[:3], Link(3, 0, SIZE, 0.4)]


@pytest.mark.parametrize(
    ("kind", "given", "others"),
    [
        ("slurm", ["node01", "node02"], ""),
        ("slurm", ["node01", "node07"], "node07"),
        ("ssh", ["a", "b"], ""),  # What the job calls hosts need not be their names.
    ],
)
def test_a_scheduler_may_have_given_other_nodes(kind: str, given: list[str], others: str) -> None:
    names = {f"node0{number}": {"host": {"name": f"node0{number}"}} for number in (1, 2)}
    trial = trial_of([who(rank, 2, host) for rank, host in enumerate(given)], size=2)
    assert _others(seen_of(names), trial, load_kind(kind)) == others


@pytest.mark.parametrize(
    ("told", "state", "is_searched"),
    [
        ([*GOOD, *LINKS], State.SUCCEEDED, False),
        ([*GOOD, *SLOW], State.SUCCEEDED, True),
        ([Collective(0, "barrier", "1 is 2"), *GOOD[1:]], State.SUCCEEDED, True),
        (GOOD, State.FAILED, True),
    ],
)
def test_it_is_searched_where_something_between_nodes_is_wrong(told: Any, state: State, is_searched: bool) -> None:
    trial = trial_of([*(who(rank, 4, host) for rank, host in enumerate(HOSTS)), *told], size=4, state=state)
    answer = [passed("it was searched")]
    card = {"route": "eth0", "all": {"eth0": {"speed": 1000}}}
    asked: list[float] = []
    given = seen_of(
        {host: {"interface": card} for host in HOSTS},
        trial=trial,
        search=lambda least: asked.append(least) or answer,
    )
    reason = skipped("there is nothing to search for: nothing between the nodes failed or was slow")
    assert found("culprit", given) == (answer if is_searched else [reason])
    assert asked == [12_500_000] * is_searched


def test_one_node_is_not_searched() -> None:
    trial = trial_of([who(0, 1, "gpu01")], size=1, state=State.FAILED)
    assert found("culprit", seen_of({"gpu01": {}}, trial=trial, search=list)) == [skipped("there is one node")]
