"""Runs that are hurt on purpose; what is left of them is ended after each test."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fault_tools import Watch

from agents_by_hand import ByHand
from allranks.system.processes import marked
from waiting import PATIENCE


@pytest.fixture
def by_hand(tmp_path: Path, allranks_env: dict[str, str]) -> Iterator[ByHand]:
    """Give a run of two nodes whose agents are started by hand."""
    run = ByHand(tmp_path / "runs" / "by-hand", allranks_env)
    yield run
    run.close()


@pytest.fixture
def watch(allranks: Any) -> Iterator[Watch]:
    """Give a look at the run in ``allranks.folder``; ends what is left of it after the test."""
    watch = Watch(allranks)
    allranks.env.pop("PYTHONUNBUFFERED", None)
    yield watch
    for run in allranks.runs():
        for pid in marked("ALLRANKS_RUN_DIR", str(run)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def finish() -> Callable[..., tuple[int, str, str]]:
    """Give a function that waits for a process's end and returns code, stdout and stderr."""

    def wait(process: Any, timeout: float = PATIENCE) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out.decode(), err.decode()

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a directory on a file system of its own of a few megabytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "allranks-test", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to be allowed to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
