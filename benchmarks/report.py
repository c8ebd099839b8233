"""`allranks report` on a run of 1,024 ranks that logged each of 100,000 steps: time, memory and size of the file.

Each rank has recorded where the time of its steps went, in as many windows as a file holds, and each node what it used.

The bars are absolute: 10 s, 1 GB, 2 MB. Beside the time stands that of reading the same metrics with the json module.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

from harness import ALLRANKS, PYTHON, checked, in_turn, report, timed, workplace
from status import enlarge

from allranks.record.steptime import HEAD, MOST, Window
from allranks.record.usage import History

STEPS = 100_000
READ = "import json, sys\nfor line in open(sys.argv[1]):\n    json.loads(line)\n"


def log(path: Path, start: float) -> None:
    """Write what a training leaves that logs four values in each step."""
    with path.open("w") as file:
        for step in range(1, STEPS + 1):
            values = {"loss": 1 / step, "grad_norm": step % 97 / 97, "lr": 1e-3, "samples_per_second": 9000 + step % 13}
            file.write(json.dumps({"step": step, "time": start + step / 10, **values}) + "\n")


def record_times(attempt: Path, start: float) -> None:
    """Write what the ranks record of their steps."""
    spent = (0.01, 15.0, 3.0, 1.0, 0.0, 0.5)
    windows = [Window(start + 19.51 * at, 195 * at, 195, 0, spent).to_bytes() for at in range(MOST)]
    for folder in attempt.glob("node-*"):
        for log in folder.glob("rank-*.out"):
            log.with_suffix(".times").write_bytes(HEAD + b"".join(windows))


def record_usage(attempt: Path, start: float) -> None:
    """Write what the agents record of their nodes."""
    gpus = [{"busy": 90, "memory": 60e9}] * 8
    for folder in attempt.glob("node-*"):
        history = History(folder / "usage.bin", 0o600)
        for at in range(MOST - 1):
            rates = dict.fromkeys(("net_in", "net_out", "disk_read", "disk_write"), 1e8 + at)
            history.add({"time": start + 19.5 * at, "cpus": at % 7, "memory": 1e9 + at, "gpus": gpus, **rates})


def main() -> None:
    with workplace(script="print('hello')", read=READ) as folder:
        checked([*ALLRANKS, "run", "script.py", "--no-warm"], folder)
        run = (folder / "runs" / "latest").resolve()
        enlarge(run)
        log(run / "metrics.jsonl", json.loads((run / "record.json").read_text())["created"])
        record_times(run / "attempts" / "000", json.loads((run / "record.json").read_text())["created"])
        record_usage(run / "attempts" / "000", json.loads((run / "record.json").read_text())["created"])
        ours, reading = in_turn(
            3,
            lambda: timed([*ALLRANKS, "report"], folder),
            lambda: timed([PYTHON, "read.py", str(run / "metrics.jsonl")], folder),
        )
        size = (folder / "report.html").stat().st_size
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    report("allranks report against reading its metrics", ours, reading, "s", "ours <= 10 s")
    print(f"memory of the largest process {memory:.2f} GB (bar: 1 GB); report.html {size / 1e6:.2f} MB (bar: 2 MB)")


if __name__ == "__main__":
    main()
