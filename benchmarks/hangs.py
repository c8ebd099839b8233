"""What watching for hangs costs a training: of a rank's time for each step, and of the agent's for each second.

A rank counts a step in memory: its CPU time is compared with a step of 1 ms, which is short. The agent looks at its 8
ranks once a second: that CPU time is compared with a second. Nothing else is done until no rank advances for minutes.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

from harness import workplace

from allranks import contract
from allranks.agent import hangs
from allranks.record.logindex import LogIndexWriter
from allranks.record.spec import NodeSpec
from allranks.runtime import progress

RANKS, STEPS, LOOKS, ROUNDS = 8, 100_000, 200, 7
STEP_SECONDS = 1e-3
BAR = 0.1  # percent


def seconds_of_a_step(folder: Path) -> float:
    """Return the CPU time that counting a step takes."""
    os.environ[contract.STEP_FILE] = str(folder / contract.rank_step(0))
    progress.connect_counter()
    count = progress.advance
    began = time.process_time()
    for _ in range(STEPS):
        count()
    return (time.process_time() - began) / STEPS


def seconds_of_a_look(folder: Path) -> float:
    """Return the CPU time that the agent takes to see whether its ranks have advanced."""
    index = LogIndexWriter(folder)
    spec = NodeSpec.from_json(
        '{"run_id": "r", "run_dir": "r", "attempt": 0, "node": 0, "nnodes": 1, "nproc_per_node": 8, "kind": "script",'
        '"target": "t", "args": [], "python_options": [], "warm": true, "max_restarts": 0, "restart_delay": 1,'
        '"stop_timeout": 30, "master_addr": "a", "master_port": null, "file_mode": 384}'
    )
    for rank in range(RANKS):
        (folder / contract.rank_step(rank)).write_bytes(bytes(8))
    watch = hangs.HangWatch(spec, folder, index)
    pids = {rank: os.getpid() + rank for rank in range(RANKS)}
    watch.start(pids)
    began = time.process_time()
    for _ in range(LOOKS):
        watch._next = 0.0  # It is time again.
        watch.tick(pids.values())
    return (time.process_time() - began) / LOOKS


def main() -> None:
    with workplace() as folder:
        step = statistics.median(seconds_of_a_step(folder) for _ in range(ROUNDS))
        look = statistics.median(seconds_of_a_look(folder) for _ in range(ROUNDS))
    of_step, of_second = 100 * step / STEP_SECONDS, 100 * look
    print(f"counting a step: {step * 1e9:.0f} ns, {of_step:.4f} % of a step of 1 ms (bar: < {BAR} %)", flush=True)
    print(f"looking at {RANKS} ranks: {look * 1e6:.0f} us, {of_second:.4f} % of a CPU (bar: < {BAR} %)", flush=True)


if __name__ == "__main__":
    main()
