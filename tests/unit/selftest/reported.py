"""What ranks of this machine report, when they run a part of the self-test."""

from __future__ import annotations

from pathlib import Path

from allranks.record.selftest import SelfTestReport, read
from warm_python import WarmPython


def reports_of(
    script: str, args: list[object], folder: Path, warm_ranks: WarmPython, count: int, ranks_of_a_node: int
) -> list[SelfTestReport]:
    """Have ranks run a script, which must succeed; return what they have reported."""
    path = folder / "part.py"
    path.write_text(script)
    done = warm_ranks.run_ranks(path, args, folder, count, ranks_of_a_node)
    for rank, (code, out, err) in enumerate(done):
        assert code == 0, err.decode()
        log = folder / f"node-{rank // ranks_of_a_node}" / f"rank-{rank}.out"
        log.parent.mkdir(exist_ok=True)
        log.write_bytes(out)
    return read(folder)
