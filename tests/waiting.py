"""How tests wait for what processes do: for the event itself, with a limit that only ends a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Seconds after which a wait has hung. It asserts nothing about speed: on a slow machine with four busy loops beside
#: the tests, a process needs half a minute to import torch. Less than pytest's own limit, so that the error says what
#: did not come, and than the sleeps and limits (300 s, 600 s) that stand in tests for "for ever".
PATIENCE = 280.0

#: At the top of a rank's script that tests a limit of a few seconds: ranks that have imported torch at different
#: times wait for each other, so that the limit counts what the test is about and not how busy the machine is.
ALL_HERE = """
import os, pathlib, time
import torch
from allranks import init
def all_here(*ranks):
    folder = pathlib.Path(__file__).parent
    (folder / f"here-{os.environ['RANK']}").touch()
    while not all((folder / f"here-{rank}").exists() for rank in ranks):
        time.sleep(0.01)
"""


def wait_for(what: str, look: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Return what ``look`` gives as soon as it gives something; fail if it never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds} s for {what}")


def is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # The second: it ended between the opening and the reading.
        return False
