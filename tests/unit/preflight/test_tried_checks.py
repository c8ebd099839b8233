"""What checks say of ranks that were tried: slow links are named, and usual differences are no alarm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from recorded_trial import trial_of, who
from seen import found, seen_of

from allranks.preflight.model import Finding, Seen, passed, skipped, warned
from allranks.runs.trial import Bandwidth, Link, Told

HOSTS = ["gpu1", "gpu2", "gpu3"]
MB = 1e6
RING = [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)]


def seen(*told: Told, speed: int | None = None) -> Seen:
    """Return a trial of three nodes whose interfaces have a speed, in Mbit/s."""
    card: dict[str, Any] = {"interface": {"route": "eth0", "all": {"eth0": {"speed": speed}}}}
    ranks = [who(rank, 3, host) for rank, host in enumerate(HOSTS)]
    return seen_of(dict.fromkeys(HOSTS, card), trial=trial_of([*ranks, *told], size=3))


def links(rates: Mapping[tuple[int, int], float], usual: float) -> list[Link]:
    """Return what was measured around: bytes per second, of some and of all others."""
    return [Link(one, other, 1 << 24, (1 << 24) / rates.get((one, other), usual)) for one, other in RING]


@pytest.mark.parametrize("name", ["all-reduce", "bandwidth", "neighbours", "training"])
def test_without_ranks_the_reason_is_told(name: str) -> None:
    given = seen_of({"gpu1": {}}, why_no_trial="the sun was shining")
    assert found(name, given) == [skipped("the sun was shining")]


def test_links_that_differ_as_usual() -> None:
    given = seen(*links({(0, 1): 400 * MB, (2, 1): 2000 * MB}, 1000 * MB), speed=10_000)
    assert found("neighbours", given) == [passed("400 MB/s to 2 GB/s in 6 directions")]


def test_a_node_whose_links_are_slow() -> None:
    given = seen(*links({(1, 2): 30 * MB, (1, 0): 20 * MB}, 1000 * MB))
    fix = "look at the network of gpu2: ethtool, ip -s link, tc qdisc"
    what = "rank 1 on gpu2 to rank {} on {} at {} MB/s, others at 1 GB/s"
    assert found("neighbours", given) == [
        warned(what.format(*measured), fix=fix, exclude="gpu2") for measured in ((2, "gpu3", 30), (0, "gpu1", 20))
    ]


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
    assert [finding.grade.value for finding in found("neighbours", given)] == (["WARN"] * 6 if is_slow else ["PASS"])


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
