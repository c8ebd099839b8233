"""What checks say of ranks that were tried: slow links are named, and usual differences are no alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from seen import found, seen_of

from allranks.checks.model import Finding, Seen, passed, skipped, warned
from allranks.record.selftest import Bandwidth, Link, SelfTestReport
from recorded_trial import trial_of, who

HOSTS = ["gpu1", "gpu2", "gpu3"]
MB = 1e6
RATES = " at 10 MB/s, others at 1 GB/s"


def seen(*told: SelfTestReport, speed: int | None = None, hosts: Sequence[str] = HOSTS, **facts: Any) -> Seen:
    """Return a trial of nodes with a rank each, whose interfaces have a speed, in Mbit/s."""
    card: dict[str, Any] = {"interface": {"route": "eth0", "all": {"eth0": {"speed": speed}}}, **facts}
    ranks = [who(rank, len(hosts), host) for rank, host in enumerate(hosts)]
    return seen_of(dict.fromkeys(hosts, card), trial=trial_of([*ranks, *told], size=len(hosts)))


def links(rates: Mapping[tuple[int, int], float], usual: float, count: int = 3) -> list[Link]:
    """Return what was measured around: bytes per second, of some and of all others."""
    forward = [(rank, (rank + 1) % count) for rank in range(count)]
    ring = [*forward, *((other, one) for one, other in forward)]
    return [Link(one, other, 1 << 24, (1 << 24) / rates.get((one, other), usual)) for one, other in ring]


def of_node(node: int, rate: float, count: int) -> dict[tuple[int, int], float]:
    """Return the rate of all links of a node, both ways."""
    beside = ((node - 1) % count, (node + 1) % count)
    return {way: rate for other in beside for way in ((node, other), (other, node))}


@pytest.mark.parametrize("name", ["all-reduce", "bandwidth", "neighbours", "training"])
def test_without_ranks_the_reason_is_told(name: str) -> None:
    given = seen_of({"gpu1": {}}, why_no_trial="the sun was shining")
    assert found(name, given) == [skipped("the sun was shining")]


def test_links_that_differ_as_usual() -> None:
    given = seen(*links({(0, 1): 400 * MB, (2, 1): 2000 * MB}, 1000 * MB), speed=10_000)
    assert found("neighbours", given) == [passed("400 MB/s to 2 GB/s in 6 directions")]


def test_a_node_whose_links_are_slow() -> None:
    given = seen(*links({(1, 2): 30 * MB, (1, 0): 20 * MB}, 1000 * MB))
    fix = "check the network of gpu2: ethtool, ip -s link, tc qdisc"
    what = "rank 1 on gpu2 to rank 0 on gpu1 and in 1 other way at 20 MB/s to 30 MB/s, others at 1 GB/s"
    assert found("neighbours", given) == [warned(what, fix=fix, exclude="gpu2")]


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ((1,), [("rank 0 on gpu1 to rank 1 on gpu2 and in 3 other ways at 10 MB/s, others at 1 GB/s", "gpu2")]),
        (
            (1, 3),
            [
                (f"rank {one} on gpu{one + 1} to rank {one + 1} on gpu{one + 2} and in 1 other way{RATES}", "")
                for one in range(4)
            ],
        ),
    ],
)
def test_most_links_are_slow(slow: tuple[int, ...], expected: list[tuple[str, str]]) -> None:
    """One node of three, and two of five, have more than half of the links."""
    hosts = [f"gpu{number}" for number in range(1, 2 * len(slow) + 2)]
    rates = {way: rate for node in slow for way, rate in of_node(node, 10 * MB, len(hosts)).items()}
    findings = found("neighbours", seen(*links(rates, 1000 * MB, len(hosts)), hosts=hosts))
    assert [(finding.what, finding.exclude) for finding in findings] == expected


def test_two_slow_links_that_have_nothing_in_common_are_named_apart() -> None:
    hosts = [f"gpu{number}" for number in range(1, 9)]
    rates = dict.fromkeys(((0, 1), (1, 0), (4, 5), (5, 4)), 10 * MB)
    findings = found("neighbours", seen(*links(rates, 1000 * MB, 8), hosts=hosts))
    assert [finding.fix for finding in findings] == [
        f"check the network of {hosts}: ethtool, ip -s link, tc qdisc" for hosts in ("gpu1 and gpu2", "gpu5 and gpu6")
    ]


def test_gpus_of_one_node_may_be_linked_in_different_ways() -> None:
    rates = {(0, 1): 50_000 * MB, (1, 0): 50_000 * MB}
    ranks = [who(rank, 4, "box") for rank in range(4)]
    given = seen_of({"box": {}}, trial=trial_of([*ranks, *links(rates, 5000 * MB, 4)], size=4))
    assert found("neighbours", given) == [passed("5 GB/s to 50 GB/s in 8 directions")]


@pytest.mark.parametrize(("backend", "grade"), [("gloo", "PASS"), ("nccl", "WARN")])
def test_over_nccl_infiniband_is_what_is_expected(backend: str, grade: str) -> None:
    """At 1 GB/s NCCL has fallen back to TCP, beside ports of 400 Gbit/s."""
    ports = [{"state": "ACTIVE", "layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}]
    given = seen(*links({}, 1000 * MB), speed=1000, infiniband=ports)
    given = replace(given, plan=replace(given.plan, backend=backend))
    assert {finding.grade.value for finding in found("neighbours", given)} == {grade}


@pytest.mark.parametrize("name", ["bandwidth", "neighbours"])
def test_one_rank_exchanges_nothing(name: str) -> None:
    assert found(name, seen(hosts=["gpu1"])) == [skipped("a single rank has no peer")]


@pytest.mark.parametrize(
    ("speed", "rate", "is_slow"),
    [
        (None, 100, False),
        (100, 100, False),
        (1000, 100, False),
        (10_000, 100, True),
        (400_000, 100, True),
        (400_000, 130, False),
    ],
)
def test_all_links_are_slower_than_the_interfaces(speed: int | None, rate: int, is_slow: bool) -> None:
    given = seen(*links({}, rate * MB), speed=speed)
    assert [finding.grade.value for finding in found("neighbours", given)] == (["WARN"] * 3 if is_slow else ["PASS"])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.05, passed("1.79 GB/s bus bandwidth at best, up to all_reduce of 64 MiB")),
        (
            1.0,
            warned(
                "89.5 MB/s bus bandwidth at best, up to all_reduce of 64 MiB, "
                "and the slowest interface can do 1.25 GB/s",
                fix="see whether the check culprit names a node or a link; NCCL_DEBUG=INFO says which way data goes",
            ),
        ),
    ],
)
def test_bandwidth(seconds: float, expected: Finding) -> None:
    given = seen(*(Bandwidth(rank, 1 << 26, seconds) for rank in range(3)), speed=10_000)
    assert found("bandwidth", given) == [expected]
