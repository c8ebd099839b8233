"""How a trial is shown, where there is much of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.checks.model import Trial
from allranks.checks.selftest import PartResult
from allranks.cli.test import _conclude, _listed
from allranks.errors import PreflightError
from allranks.runs.record import Record, Run


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


@pytest.mark.parametrize(("wrong", "more"), [(1, ""), (2, ", and 1 other part of the test")])
def test_the_first_part_that_went_wrong_is_named_and_the_others_are_counted(wrong: int, more: str) -> None:
    record = Record(
        id="t",
        name="t",
        cluster="local",
        kind="local",
        world_size=1,
        nnodes=1,
        host="h",
        stop_timeout=1,
        file_mode=0o600,
        created=0.0,
    )
    parts = [PartResult("link", f"link {number}", wrong="on rank 0: 1 must be 2") for number in range(wrong)]
    with pytest.raises(PreflightError) as raised:
        _conclude(Trial(Run(Path("runs/t"), record), 1, ()), [link(7), *parts])
    assert (raised.value.what, raised.value.why) == (f"t: link 0{more} went wrong", "on rank 0: 1 must be 2")
