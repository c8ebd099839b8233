"""`allranks why` on 1 GB of logs of 1,024 ranks / `grep -E` with the same patterns; and its memory.

What grep cannot have (look-around) is left out for it, and it counts lines alone. Each log ends with what a rank writes
whose peer is gone, but one, which has the cause.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

from harness import ALLRANKS, in_turn, report, timed, workplace

from allranks.diagnosis.rules import RULES

RANKS, BYTES = 1024, 1 << 20
VICTIM = "RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.1]:38032\n"
CAUSE = 'Traceback (most recent call last):\n  File "/home/user/train.py", line 88\nKeyError: "weights"\n'
BAR, MEMORY = 2.0, 300


def write(folder: Path) -> None:
    """Write the logs of a training: 1 MB each."""
    for rank in range(RANKS):
        steps = "".join(
            f"epoch {n % 7} step {n} rank {rank} loss {n % 97 / 31:.4f} lr 1e-4 412.7 ms\n" for n in range(21_000)
        )
        (folder / f"rank-{rank}.log").write_text(steps[:BYTES] + "\n" + (CAUSE if rank == 700 else VICTIM))


def as_grep(pattern: str) -> str | None:
    """Return a pattern in the words of grep -E; None if it has no words for it."""
    plain = re.sub(r"\(\?P<\w+>", "(", pattern).replace("(?:", "(").replace(r"\d", "[0-9]").replace("(?i)", "")
    return None if "(?" in plain else plain


def main() -> None:
    with workplace() as folder:
        logs = folder / "logs"
        logs.mkdir()
        write(logs)
        patterns = [found for rule in RULES for pattern in rule.patterns if (found := as_grep(pattern))]
        (folder / "patterns").write_text("\n".join(patterns) + "\n")
        grep = ["grep", "-rcE", "-f", str(folder / "patterns"), "logs"]
        ours, theirs = in_turn(3, lambda: timed([*ALLRANKS, "why", "logs"], folder), lambda: timed(grep, folder))
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    report(f"allranks why against grep -E ({len(patterns)} patterns), 1 GB of logs", ours, theirs, "s", f"<= {BAR}")
    print(f"the largest process: {before:.0f} MB (bar: < {MEMORY} MB)", flush=True)


if __name__ == "__main__":
    main()
