"""Memory that a rank owns (its private pages) after `import torch`, 2 ranks: ours / torchrun."""

from __future__ import annotations

from harness import ALLRANKS, TORCHRUN, checked, in_turn, report, workplace

SCRIPT = """
import os, torch
kilobytes = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_"))
open(f"owned-{os.environ['RANK']}", "w").write(str(kilobytes / 1024))
"""


def main() -> None:
    with workplace(script=SCRIPT) as folder:

        def measure(command: list[str]) -> float:
            checked([*command, "--nproc-per-node", "2", "script.py"], folder)
            return max(float((folder / f"owned-{rank}").read_text()) for rank in (0, 1))

        ours, theirs = in_turn(3, lambda: measure([*ALLRANKS, "run"]), lambda: measure(TORCHRUN))
    report("memory owned by a rank", ours, theirs, "MB", "<= 0.7")


if __name__ == "__main__":
    main()
