"""The last rank ends to the command returns, 2 ranks: ours / torchrun; of ranks that have imported torch, too."""

from __future__ import annotations

import time

from harness import ALLRANKS, TORCHRUN, checked, in_turn, report, workplace

# os._exit: the time is that of the rank's end, not of the start of its interpreter's end.
SCRIPT = """
import os, time
with open(f"ended-{os.environ['RANK']}", "w") as stream:
    stream.write(repr(time.time()))
os._exit(0)
"""


def compare(what: str, script: str) -> None:
    with workplace(script=script) as folder:

        def measure(command: list[str]) -> float:
            checked([*command, "--nproc-per-node", "2", "script.py"], folder)
            returned = time.time()
            return returned - max(float((folder / f"ended-{rank}").read_text()) for rank in (0, 1))

        ours, theirs = in_turn(9, lambda: measure([*ALLRANKS, "run"]), lambda: measure(TORCHRUN))
    report(f"last rank ends to command returns{what}", ours, theirs, "s", "<= 0.15")


def main() -> None:
    compare("", SCRIPT)
    # To unload torch takes the process that has forked the ranks its time, and nothing waits for that.
    compare(", with torch", f"import torch\n{SCRIPT}")


if __name__ == "__main__":
    main()
