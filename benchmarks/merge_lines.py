"""A million log lines of 100 bytes: end to end beside ``torchrun --tee 3``, and the merge alone.

Run it with ``python benchmarks/merge_lines.py``; ``--only merge`` needs no torch. Both launchers write to a
pipe that is drained as fast as it fills, alternate, and are compared by the ratio of their medians.

The bar is for the whole command with lines from print(). Beside it stands the time from the first line that a rank
writes to the last line that comes out: without the start and the end of the processes, which are mostly the import
and the unloading of torch. And both again with lines in blocks of 100, which cost the ranks next to nothing to write.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import report

from allranks.logs.merge import MergedLogs
from allranks.record.logindex import LogIndexWriter

LINES = 1_000_000
SCRIPT = (
    f"""\
LINES = {LINES}
"""
    """\
import os, sys, time

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"began-{rank}", "w").write(repr(time.time()))
def lines():
    for number in range(LINES // size):
        yield f"rank {rank:5d} line {number:9d} " + "x" * 73
if sys.argv[1] == "print":
    for line in lines():
        print(line)
else:
    line = "\\n".join(line for line, _ in zip(lines(), range(100)))
    for block in range(LINES // size // 100):
        sys.stdout.write(line + "\\n")
"""
)
BAR = 3.5
#: Set on some machines, and then each line is a system call of its own and nothing else is measured.
UNSET = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
STREAMS = ("out", "err")
#: What a pipe holds. To ask for more costs the reader, who shares the CPUs, a new piece of memory for each read.
PIPE = 1 << 16


def drain(descriptor: int) -> None:
    while os.read(descriptor, PIPE):
        pass


def timed(command: list[str], folder: Path, ranks: int) -> tuple[float, float]:
    """Run a command with its output in a pipe; return the seconds from first line to last line, and in all."""
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    start = time.time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder, env=environment)
    assert process.stdout is not None
    with process.stdout as pipe:
        lines, last = count_lines(pipe.fileno())
    # torchrun breaks lines that a rank is in the middle of: it may show a few more or fewer.
    wrong = abs(lines - LINES // ranks * ranks)
    if process.wait() or wrong > (0 if "allranks" in command else LINES // 100):
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode} after {lines} lines")
    first = min(float((folder / f"began-{rank}").read_text()) for rank in range(ranks))
    return last - first, time.time() - start


def count_lines(descriptor: int) -> tuple[int, float]:
    """Read to the end; return how many lines there were, and when the last one came."""
    lines, last = 0, 0.0
    while block := os.read(descriptor, PIPE):
        lines, last = lines + block.count(b"\n"), time.time()
    return lines, last


def commands(script: Path, ranks: int, logs: Path, how: str) -> dict[str, list[str]]:
    allranks = [sys.executable, "-m", "allranks", "run", str(script), "--nproc-per-node", str(ranks), "--", how]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--tee", "3"]
    torchrun += ["--log-dir", str(logs), "--nproc-per-node", str(ranks), str(script), how]
    return {"allranks": allranks, "torchrun": torchrun}


def end_to_end(ranks: int, rounds: int, how: str) -> None:
    seconds: dict[str, list[tuple[float, float]]] = {"allranks": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        for number in range(rounds):
            for launcher, command in commands(script, ranks, folder / f"logs-{number}", how).items():
                seconds[launcher].append(timed(command, folder, ranks))
    merging, whole = (
        [statistics.median(each[which] for each in seconds[launcher]) for launcher in seconds] for which in (0, 1)
    )
    label = f"{ranks} ranks, lines from {'print()' if how == 'print' else 'blocks'}"
    bar = f">= {BAR:g}" if how == "print" else "none"
    report(f"merging, whole command, {label}", *whole, "s", bar, inverse=True)
    report(f"merging, first line to last line, {label}", *merging, "s", "none", inverse=True)


def own(rank: int, ranks: int) -> Iterator[bytes]:
    for number in range(LINES // ranks):
        yield b"rank %5d line %9d " % (rank, number) + b"x" * 73 + b"\n"


def same(rank: int, ranks: int) -> Iterator[bytes]:
    for number in range(LINES // ranks):
        yield b"           line %9d " % number + b"x" * 73 + b"\n"


def skewed(rank: int, ranks: int) -> Iterator[bytes]:
    for number in range(rank * 20):
        yield b"rank %5d line %9d " % (rank, number) + b"x" * 73 + b"\n"
    yield from same(rank, ranks)


def knotted(rank: int, ranks: int) -> Iterator[bytes]:
    for number in range(LINES // ranks):
        owner = rank if number % 2 else 99
        yield b"rank %5d line %9d " % (owner, number) + b"x" * 73 + b"\n"


Maker = Callable[[int, int], Iterator[bytes]]


def prepare(folder: Path, maker: Maker, ranks: int, ticks: int = 20) -> None:
    """Write the files of a run that took a second: so many ticks of the index."""
    now = [1_700_000_000.0]
    writer = LogIndexWriter(folder, clock=lambda: now[0])
    writer.watch(range(ranks))
    data = [b"".join(maker(rank, ranks)) for rank in range(ranks)]
    for tick in range(ticks):
        for rank, text in enumerate(data):
            part = text[len(text) * tick // ticks : len(text) * (tick + 1) // ticks]
            with (folder / f"rank-{rank}.out").open("ab") as stream:
                stream.write(part)
        now[0] += 0.05
        writer.tick()
    writer.close()


def merge_alone(label: str, maker: Maker, ranks: int, rounds: int, fold: bool = True) -> None:
    with tempfile.TemporaryDirectory() as name:
        node = Path(name) / "node-000"
        node.mkdir()
        prepare(node, maker, ranks)
        seconds = statistics.median(merged_once(Path(name), fold) for _ in range(rounds))
    print(f"merge alone, {ranks:2d} ranks, {label}: {seconds:.2f} s")


def merged_once(attempt: Path, fold: bool) -> float:
    read_end, write_end = os.pipe()
    reader = threading.Thread(target=drain, args=(read_end,))
    reader.start()
    start = time.perf_counter()
    with os.fdopen(write_end, "wb") as sink:
        MergedLogs(attempt, sink.write, sink.write, fold=fold).finish()
    reader.join()
    os.close(read_end)
    return time.perf_counter() - start


def index_cost(files: int = 16, ticks: int = 2000) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = LogIndexWriter(folder)
        writer.watch(range(files // 2))
        streams = [(folder / f"rank-{n // 2}.{STREAMS[n % 2]}").open("wb", 0) for n in range(files)]
        spent = 0.0
        for _ in range(ticks):
            for stream in streams:
                stream.write(b"x\n")
            start = time.process_time()
            writer.tick()
            spent += time.process_time() - start
        for stream in streams:
            stream.close()
        writer.close()
    print(f"index, {files} files that all grow, 20 ticks a second: {spent / ticks * 20:.2%} of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["merge", "end-to-end"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.only != "end-to-end":
        index_cost()
        for ranks in (2, 16):
            merge_alone("no line shared", own, ranks, options.rounds)
            merge_alone("no line shared, --no-fold", own, ranks, options.rounds, fold=False)
            merge_alone("all lines shared", same, ranks, options.rounds)
            merge_alone("all shared, skewed", skewed, ranks, options.rounds)
            merge_alone("every other line shared", knotted, ranks, options.rounds)
    if options.only != "merge":
        for ranks in (2, 16):
            for how in ("print", "blocks"):
                end_to_end(ranks, options.rounds, how)


if __name__ == "__main__":
    main()
