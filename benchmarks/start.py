"""Start of the command to the end of the first all-reduce, 2 ranks over gloo: ours / torchrun."""

from __future__ import annotations

import time

from harness import ALLRANKS, TORCHRUN, checked, in_turn, report, workplace

SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
open(f"first-{os.environ['RANK']}", "w").write(repr(time.time()))
dist.destroy_process_group()
"""


def main() -> None:
    with workplace(script=SCRIPT) as folder:

        def measure(command: list[str]) -> float:
            began = time.time()
            checked([*command, "--nproc-per-node", "2", "script.py"], folder)
            return max(float((folder / f"first-{rank}").read_text()) for rank in (0, 1)) - began

        ours, theirs = in_turn(9, lambda: measure([*ALLRANKS, "run"]), lambda: measure(TORCHRUN))
    report("start to first all-reduce", ours, theirs, "s", "<= 0.55")


if __name__ == "__main__":
    main()
