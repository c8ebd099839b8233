"""The last thing that a log says."""

from __future__ import annotations

import pytest

from allranks.errors import RankError
from allranks.runs.last_line import last_of

#: How Python shows an error of ours, in a rank and outside.
OURS = (
    f"Traceback (most recent call last):\nallranks.errors.RankError: {RankError('no room', why='full', fix='free it')}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("\n  \n", None),
        ("Traceback\nValueError: boom\n", "ValueError: boom"),
        (OURS, "no room"),
        (OURS.replace("\n", "\n[rank0]: "), "no room"),
        (OURS + "\n[W1122 21:52:22 socket.cpp:1] a warning\n\n", "no room"),
        ("allranks: error: no room\n  why: full\n", "no room"),
        ("allranks: stopping at step 3\n", "stopping at step 3"),
        (OURS + "\nlast words\n", "last words"),
        ("why: not ours\nfix: nor this", "fix: nor this"),
        ("  fix: alone", "fix: alone"),
    ],
)
def test_the_last_line(text: str, expected: str | None):
    assert last_of(text.splitlines()) == expected
