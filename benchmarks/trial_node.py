"""A node of the real trials of ``stragglers.py``: for each line of its input, one rank trains, sampled as by an agent.

It imports torch once, and forks a rank for each trial. What is slow there is injected here: processes that take the CPU
of the rank, data that comes late, or a link that ``tc`` makes slow.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # Torch's optimizers import it, which takes longer than a trial.

import allranks
from allranks import contract
from allranks.agent import heartbeat
from allranks.runtime import context, data, metrics, model, steptime  # noqa: F401 - once, for all ranks

#: Seconds of a window and of a sample: 2 in a training. And how often an agent looks.
WINDOW, SAMPLE, LOOK = 0.1, 0.4, 0.01
#: What a node sends, in Mbit/s: far less than any machine can, so that a busy one is hardly slower.
EVEN = 120
#: Processes that take the CPU of a rank.
THIEVES = 3


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that come after some time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(1, 1)


class Model(torch.nn.Linear):
    """A model whose forward pass takes seconds of CPU, or passes some by waiting as for a GPU."""

    def __init__(self, size: int, seconds: float, noise: float, computes: bool) -> None:
        super().__init__(1, size)
        self._seconds, self._noise, self._computes = seconds, noise, computes

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        seconds = self._seconds * random.lognormvariate(0, self._noise)
        if self._computes:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(seconds)
        return super().forward(batch)


def train(trial: dict[str, Any], rank: int) -> None:
    """Be a rank: of two that compute, each on a CPU of its own, or of three that wait."""
    kind, is_odd = trial["kind"], rank == trial["odd"]
    random.seed(trial["number"] * 3 + rank)
    torch.set_num_threads(1)
    if trial["computes"]:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    thieves = THIEVES if kind == "cpu" and is_odd else 0
    stolen = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(thieves)]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(trial["ranks"]),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": trial["master"],
        "MASTER_PORT": str(trial["port"]),
        "GLOO_SOCKET_IFNAME": "eth0",
        contract.STEP_FILE: f"{trial['folder']}/node-{rank:03d}/{contract.rank_step(rank)}",
    }
    steptime._WINDOW_SECONDS = WINDOW
    try:
        with allranks.init(backend="gloo", log_every=0) as ctx:
            wrapped = ctx.prepare(Model(trial["size"], trial["seconds"], trial["noise"], trial["computes"]))
            optimizer = ctx.optimizer(torch.optim.SGD, wrapped, lr=1e-6)
            samples = Samples(trial["data"] + (trial["delay"] if kind == "data" and is_odd else 0.0))
            for batch in ctx.loader(samples, batch_size=1, workers=0, quiet=True):
                ctx.backward(wrapped(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if ctx.progress.step == trial["steps"]:
                    break
    finally:
        for thief in stolen:
            thief.kill()
            thief.wait()


def attend(trial: dict[str, Any], rank: int) -> int:
    """Run the rank to its end with samples of the node, and return its exit code."""
    rate = trial["rate"] if trial["kind"] == "link" and rank == trial["odd"] else EVEN
    shape = f"tc qdisc replace dev eth0 root tbf rate {rate}mbit burst 16kb latency 200ms"
    subprocess.run(shape.split(), check=True)
    folder = Path(trial["folder"], f"node-{rank:03d}")
    folder.mkdir(parents=True)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            train(trial, rank)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    usage = heartbeat.Usage(folder / contract.USAGE, 0o600)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        usage.tick(lambda: [pid], lambda: None)
        time.sleep(LOOK)
    if usage._thread:
        usage._thread.join()
    return os.waitstatus_to_exitcode(ended[1])


def main() -> None:
    heartbeat._USAGE_SECONDS = SAMPLE
    rank = int(sys.argv[1])
    torch.ones(1).sum()
    for line in sys.stdin:
        trial = json.loads(line)
        print(attend(trial, rank) if rank < trial["ranks"] else 0, flush=True)


if __name__ == "__main__":
    main()
