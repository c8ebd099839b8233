"""A rank is killed to the first all-reduce of the next generation, 2 ranks over gloo: ours / torchrun.

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it most of its second generations fail or hang
over gloo, on keys of the first. Then: how many of 100 restarts of ours succeed, and how long the slowest ones take;
``python benchmarks/restart.py 10000`` for as many, without torchrun.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from harness import ALLRANKS, TORCHRUN, checked, in_turn, report, workplace

SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 2
open(f"reduced-{generation}-{rank}", "w").write(repr(time.time()))
if generation < int(sys.argv[1]):
    dist.barrier()
    if rank == 1:
        open(f"killed-{generation}", "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
dist.destroy_process_group()
"""
RESTARTS = 100


def when(folder: Path, name: str) -> float:
    return float((folder / name).read_text())


def side_by_side() -> None:
    with workplace(script=SCRIPT) as folder:

        def measure(command: list[str], *before_arguments: str) -> float:
            command = [*command, "--nproc-per-node", "2", "--max-restarts", "1", "script.py", *before_arguments, "1"]
            checked(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            return max(when(folder, "reduced-1-0"), when(folder, "reduced-1-1")) - when(folder, "killed-0")

        ours, theirs = in_turn(9, lambda: measure([*ALLRANKS, "run"], "--"), lambda: measure(TORCHRUN))
        report("killed to first all-reduce again", ours, theirs, "s", "<= 0.2")


def many(restarts: int) -> None:
    with workplace(script=SCRIPT) as folder:
        asked = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "--restart-delay", "0"]
        checked([*ALLRANKS, "run", *asked, "script.py", "--", str(restarts)], folder, timeout=restarts)
        numbers = [number for number in range(1, restarts + 1) if (folder / f"reduced-{number}-1").exists()]
        print(f"restarts that succeeded: {len(numbers)} of {restarts} (bar: {restarts} of {restarts})")
        ends = [max(when(folder, f"reduced-{number}-{rank}") for rank in (0, 1)) for number in numbers]
        took = sorted(end - when(folder, f"killed-{number - 1}") for number, end in zip(numbers, ends, strict=True))
    longest = took[min(len(took) - 1, round(0.999 * len(took)))]
    print(
        f"killed to first all-reduce again, {len(took)} restarts: median {1000 * statistics.median(took):.0f} ms, "
        f"99.9 % within {1000 * longest:.0f} ms (bar: 200), the slowest {1000 * took[-1]:.0f} ms"
    )


def main() -> None:
    if len(sys.argv) > 1:
        many(int(sys.argv[1]))
    else:
        side_by_side()
        many(RESTARTS)


if __name__ == "__main__":
    main()
