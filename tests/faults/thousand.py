"""A thousand faults: ``python tests/faults/thousand.py`` hurts trainings of two ranks in nine ways and prints a table.

Each training is hurt some 25 times in one way, at moments that are drawn, and must then have the weights of one that
nothing has happened to: equal to the bit, no process left, no file that is no checkpoint. It takes some three hours on
two slow cores; ``--faults 100`` hurts less often. What needs a file system of its own is left out, and said to be,
unless root runs it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from torment import Torment

from allranks.record.checkpoints import entries, unfinished
from conftest import Allranks, for_ranks, processes_of_runs_in
from environments import clean_environment
from exact_runs import command, undisturbed, weights_in
from warm_python import WarmPython

#: 3200 steps, and a save every few milliseconds.
TRAINING = ("--epochs", "400", "--size", "96", "--every", "5", "--quiet")
RESTARTS = ("--max-restarts", "100000", "--restart-delay", "0")
IN_A_TRAINING = 25
FREE_MEGABYTES = 24


class Damaging(Torment):
    """Kills the agent, and damages the newest checkpoint before the training continues."""

    def between(self) -> None:
        found = entries(self.checkpoints)
        if not found:
            return
        path = self.random.choice(sorted(file for file in found[0].path.iterdir() if file.is_file()))
        match self.random.choice(["truncated", "flipped", "removed"]):
            case "truncated":
                os.truncate(path, path.stat().st_size // 2)
            case "flipped":
                data = bytearray(path.read_bytes())
                data[len(data) // 4] ^= 8  # The rest of a data file may be padding.
                path.write_bytes(data)
            case "removed":
                path.unlink()


class Filling(Torment):
    """Fills the disk of the checkpoints, and then kills a rank."""

    def _wait(self, process: Any) -> None:
        super()._wait(process)
        with (self.checkpoints.parent / "filler").open("wb") as stream:
            try:
                while True:
                    stream.write(bytes(1 << 16))
                    stream.flush()
            except OSError:
                pass  # It is full.

    def _hit(self, process: Any) -> bool:
        try:
            return super()._hit(process)
        finally:
            (self.checkpoints.parent / "filler").unlink(missing_ok=True)


class Locking(Torment):
    """Makes the disk of the checkpoints one that can only be read, and then kills a rank."""

    def _wait(self, process: Any) -> None:
        super()._wait(process)
        self._remount("ro")

    def _hit(self, process: Any) -> bool:
        try:
            return super()._hit(process)
        finally:
            self._remount("rw")

    def _remount(self, how: str) -> None:
        """A disk on which a file is open for writing is busy: a moment later it is not."""
        while subprocess.run(
            ["mount", "-o", f"remount,{how}", self.checkpoints.parent], capture_output=True
        ).returncode:
            time.sleep(0.001)


@dataclass(frozen=True)
class Fault:
    """A way to hurt a training, and how many of a thousand faults are of it."""

    name: str
    share: int
    way: type[Torment]
    victims: Sequence[str]
    number: signal.Signals = signal.SIGKILL
    has_disk: bool = False


FAULTS = (
    Fault("a rank is killed", 350, Torment, ["a rank"]),
    Fault("all ranks are killed", 200, Torment, ["all ranks"]),
    Fault("the agent is killed", 75, Torment, ["agent"]),
    Fault("the command is killed", 50, Torment, ["command"]),
    Fault("a rank is asked to stop", 75, Torment, ["a rank"], signal.SIGTERM),
    Fault("the command is asked to stop", 50, Torment, ["command"], signal.SIGTERM),
    Fault("the newest checkpoint is corrupt", 75, Damaging, ["agent"]),
    Fault("the disk is full, and a rank killed", 75, Filling, ["a rank"], has_disk=True),
    Fault("the disk is read-only, and a rank killed", 50, Locking, ["a rank"], has_disk=True),
)


@dataclass
class Row:
    """What became of the trainings that were hurt in one way."""

    faults: int = 0
    trainings: int = 0
    equal: int = 0
    processes: int = 0
    files: int = 0


@contextmanager
def disk(folder: Path, needed: bool) -> Iterator[None]:
    """Put a file system of its own, of a few megabytes, into a directory."""
    folder.mkdir()
    if needed:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FREE_MEGABYTES}m", "allranks-test", folder], check=True)
    try:
        yield
    finally:
        if needed:
            subprocess.run(["umount", "-l", folder], check=True)


def hurt(allranks: Any, fault: Fault, times: int, seed: int, row: Row) -> None:
    """Hurt one training so many times, and compare what it has become."""
    whole = undisturbed(allranks, *TRAINING)
    place = allranks.folder / f"hurt-{seed}"
    with disk(place, fault.has_disk):
        checkpoints = place / "checkpoints"
        torment = fault.way(
            allranks, checkpoints, fault.number, times=times, victims=fault.victims, seconds=0.5, seed=seed
        )
        torment.patience = 3600.0  # Beside other work a training of thousands of steps takes its time.
        out = torment.run(*command(checkpoints, *TRAINING, flags=RESTARTS))
        row.faults += len(torment.hit)
        row.trainings += 1
        row.equal += weights_in(out) == whole
        row.processes += len(processes_of_runs_in(allranks.folder))
        row.files += len(list(unfinished(checkpoints)))


def table(rows: dict[str, Row]) -> str:
    """Write down what became of all trainings."""
    header = ("fault", "faults", "trainings", "equal to the bit", "processes left", "files left")
    lines = [header, *((name, *map(str, vars(row).values())) for name, row in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many in all (default: 1000)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16), help="of what is drawn (default: any)")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Or its disks would stay mounted.
    print(f"seed {asked.seed}", flush=True)
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="allranks-faults-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        (folder / "work").mkdir()
        environ = clean_environment(folder / "home")
        with (
            closing(WarmPython([], environ)) as warm,
            closing(WarmPython(*for_ranks())) as ranks,
            closing(Allranks(folder / "work", environ, warm, ranks)) as allranks,
        ):
            for number, fault in enumerate(FAULTS):
                if fault.has_disk and os.geteuid():
                    print(f"{fault.name}: left out, only root may mount a file system", flush=True)
                    continue
                row, left = rows.setdefault(fault.name, Row()), max(1, round(fault.share * asked.faults / 1000))
                while left:
                    times = min(left, IN_A_TRAINING)
                    hurt(allranks, fault, times, asked.seed + 1000 * number + row.trainings, row)
                    left -= times
                print(f"{fault.name}: {row}", flush=True)
    print(table(rows))
    return int(any(row.equal < row.trainings or row.processes or row.files for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
