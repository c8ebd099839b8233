"""`allranks status` on a run of 1,024 ranks' files / `du` of its directory.

Once for a run whose end is on record, and once for one whose end nobody has looked at: it is found out from what
the agent told, and written down.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from harness import ALLRANKS, checked, in_turn, report, timed, workplace

NODES, RANKS_PER_NODE = 128, 8


def enlarge(run: Path) -> None:
    """Give a run of one node the files of a run of many."""
    attempt = run / "attempts" / "000"
    first = attempt / "node-000"
    for node in range(NODES):
        folder = attempt / f"node-{node:03d}"
        if node:
            shutil.copytree(first, folder, ignore=shutil.ignore_patterns("rank-*"))
        for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
            for stream in ("out", "err"):
                (folder / f"rank-{rank}.{stream}").write_text("step\n" * 100)
    path = run / "record.json"
    record = json.loads(path.read_text())
    record.update(nnodes=NODES, world_size=NODES * RANKS_PER_NODE)
    path.write_text(json.dumps(record))


def main() -> None:
    with workplace(script="print('hello')") as folder:
        checked([*ALLRANKS, "run", "script.py", "--no-warm"], folder)
        run = (folder / "runs" / "latest").resolve()
        enlarge(run)
        record = run / "record.json"
        known = record.read_text()
        unknown = json.dumps({**json.loads(known), "status": {"state": "RUNNING"}})

        def status(text: str) -> float:
            record.write_text(text)
            return timed([*ALLRANKS, "status"], folder)

        settled, unsettled, du = in_turn(
            21, lambda: status(known), lambda: status(unknown), lambda: timed(["du", "-s", str(run)], folder)
        )
    report("allranks status against du, 1,024 ranks", settled, du, "s", "<= 8")
    report("the same, its end not yet on record", unsettled, du, "s", "<= 8")


if __name__ == "__main__":
    main()
