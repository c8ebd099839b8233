"""What the benchmarks share: run ours and the peer in turn, take medians, print a ratio beside its bar."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = sys.executable
ALLRANKS = [str(Path(PYTHON).parent / "allranks")]
TORCHRUN = [str(Path(PYTHON).parent / "torchrun")]

#: Set on some machines, and a burden on one side or the other.
NOT_USUAL = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")


@contextmanager
def workplace(**files: str) -> Iterator[Path]:
    """Give a directory with Python scripts in it; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        folder = Path(name)
        for stem, text in files.items():
            (folder / f"{stem}.py").write_text(text)
        yield folder


def call(
    command: list[str], folder: Path, *, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, its output kept out of the way."""
    environ = {name: value for name, value in os.environ.items() if name not in NOT_USUAL} | variables
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=timeout, check=False)


def checked(
    command: list[str], folder: Path, *, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command that must succeed."""
    done = call(command, folder, timeout=timeout, **variables)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.decode(errors='replace')}")
    return done


def in_turn(times: int, *subjects: Callable[[], float]) -> list[float]:
    """Measure each subject ``times`` times, in turn, after one round that does not count; return medians."""
    for subject in subjects:
        subject()
    rounds = [[subject() for subject in subjects] for _ in range(times)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def timed(command: list[str], folder: Path) -> float:
    """Return the seconds that a command takes, which must succeed."""
    began = time.perf_counter()
    checked(command, folder)
    return time.perf_counter() - began


def report(what: str, ours: float, theirs: float, unit: str, bar: str, *, inverse: bool = False) -> None:
    """Print the two medians, their ratio and the bar that it is held against."""
    ratio = theirs / ours if inverse else ours / theirs
    label = "peer / ours" if inverse else "ours / peer"
    print(f"{what}: ours {ours:.4g} {unit}, peer {theirs:.4g} {unit}, {label} = {ratio:.3f} (bar: {bar})", flush=True)
