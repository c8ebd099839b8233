"""How a trial is shown, where there is much of it."""

from __future__ import annotations

from allranks.checks.selftest import PartResult
from allranks.cli.test import _listed


def link(number: int) -> PartResult:
    return PartResult("link", f"link {number}", figures={"bytes": 1, "bandwidth": 1e6 * number})


def test_of_many_links_the_slowest_are_shown() -> None:
    parts = [
        PartResult("ranks", "ranks"),
        PartResult("collective", "barrier"),
        *map(link, range(20, 0, -1)),
        PartResult("gpus", "GPUs"),
    ]
    shown = [*_listed(parts)]
    assert [part.name for part in shown] == [
        *("barrier", *(f"link {number}" for number in range(1, 17)), "4 others", "GPUs")
    ]
    assert shown[-2].figures == {"what": "17 MB/s to 20 MB/s"}


def test_few_links_stay_in_their_order() -> None:
    assert [part.name for part in _listed([link(2), link(1)])] == ["link 2", "link 1"]
