"""`allranks watch` on a run of 1,024 ranks on 128 nodes that logs all the time: the part of a core that it uses.

The record is made up: each second all nodes have a new sample, all ranks print a line, and metrics grow. It is compared
with `allranks top`, which reads the same every two seconds, once; the bar is absolute: 5 % of a core.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from harness import ALLRANKS, NOT_USUAL, checked, timed, workplace

NODES, RANKS_PER_NODE = 128, 8
LINES, COLUMNS = 24, 80
WARM_UP, MEASURED = 20.0, 30.0


class Cluster:
    """The files that 1,024 ranks and their agents write."""

    def __init__(self, run: Path) -> None:
        self._run, self._attempt = run, run / "attempts" / "000"
        self._sizes = dict[tuple[int, int], int]()
        self._step = 0
        first = self._attempt / "node-000"
        events = [json.loads(line) for line in (first / "agent.jsonl").read_text().splitlines()]
        for event in events:
            event.update(world_size=NODES * RANKS_PER_NODE, nodes=NODES)
        running = [event for event in events if event["kind"] not in ("ended", "rank-exited")]
        for node in range(NODES):
            folder = self._attempt / f"node-{node:03d}"
            if node:
                shutil.copytree(first, folder, ignore=shutil.ignore_patterns("rank-*", "lines.idx"))
            (folder / "agent.jsonl").write_text("".join(json.dumps(event) + "\n" for event in running))
        path = run / "record.json"
        record = json.loads(path.read_text())
        record.update(nnodes=NODES, world_size=NODES * RANKS_PER_NODE)
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        record["handle"].update(host=socket.gethostname(), pid=os.getpid(), started=float(stat[19]))
        record["status"] = {**record["status"], "state": "RUNNING", "native": "ranks running", "ended": None}
        path.write_text(json.dumps(record))

    def second(self) -> None:
        """Write what a second brings."""
        now = time.time()
        for node in range(NODES):
            folder = self._attempt / f"node-{node:03d}"
            clocks = {"temperature": 64, "clock": 1755, "max_clock": 1980, "slowed_by": ["power cap"]}
            used = {"memory": 60e9, "total": 80e9, **clocks}
            gpus = [{"number": at, "busy": random.randint(80, 99), **used} for at in range(RANKS_PER_NODE)]
            sample = {"host": f"gpu{node}", "time": now, "cpus": 12.5, "memory": 90e9, "advanced": now, "gpus": gpus}
            (folder / ".usage").write_text(json.dumps({**sample, "cpus_total": 64, "memory_total": 512e9}))
            (folder / ".usage").replace(folder / "usage.json")
            index = ""
            for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
                line = f"step {self._step}: loss {1 / (1 + self._step):.4f}\n"
                with (folder / f"rank-{rank}.out").open("a") as log:
                    log.write(line)
                self._sizes[node, rank] = self._sizes.get((node, rank), 0) + len(line)
                index += f"{int(now * 1000)} {rank} o {self._sizes[node, rank]}\n"
            with (folder / "lines.idx").open("a") as file:
                file.write(index)
        with (self._run / "metrics.jsonl").open("a") as file:
            values = {"loss": 1 / (1 + self._step), "samples_per_second": 9000 + self._step % 13}
            file.write(json.dumps({"step": self._step, "time": now, **values}) + "\n")
        self._step += 1


def used(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shown_for(cluster: Cluster, descriptor: int, seconds: float) -> tuple[int, float]:
    """Write and read on for so long; return how many frames came, and in how many seconds."""
    frames, began = 0, time.monotonic()
    second = began
    while (now := time.monotonic()) < began + seconds:
        if now >= second:
            cluster.second()
            second += 1
        if select.select([descriptor], [], [], max(0.0, second - time.monotonic()))[0]:
            frames += os.read(descriptor, 1 << 20).count(b"\x1b[H")
    return frames, time.monotonic() - began


def main() -> None:
    with workplace(script="print('hello')") as folder:
        checked([*ALLRANKS, "run", "script.py", "--no-warm", "--no-check"], folder)
        cluster = Cluster((folder / "runs" / "latest").resolve())
        cluster.second()
        top = timed([*ALLRANKS, "top", "--once"], folder)
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in NOT_USUAL} | {"TERM": "xterm-256color"}
        process = subprocess.Popen(
            [*ALLRANKS, "watch"], cwd=folder, env=env, stdin=theirs, stdout=theirs, start_new_session=True
        )
        try:
            shown_for(cluster, ours, WARM_UP)
            before = used(process.pid)
            frames, seconds = shown_for(cluster, ours, MEASURED)
            share = (used(process.pid) - before) / seconds
        finally:
            process.send_signal(signal.SIGTERM)
            while select.select([ours], [], [], 0.5)[0]:
                os.read(ours, 1 << 20)
            code = process.wait(60)
    if code != 128 + signal.SIGTERM:
        sys.exit(f"allranks watch ended with {code}")
    print(f"allranks watch, 1,024 ranks: {share:.1%} of a core (bar: 5 %), {frames / seconds:.2f} frames a second")
    print(f"allranks top --once on the same takes {top:.2f} s")


if __name__ == "__main__":
    main()
