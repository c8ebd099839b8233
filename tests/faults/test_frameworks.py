"""Scripts that were written for Lightning or Accelerate, and for torchrun, run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.parametrize(("name", "steps"), [("lightning", 4), ("accelerate", 4)])
def test_an_unmodified_script_runs(allranks, watch, name, steps):
    pytest.importorskip(name)
    done = allranks("run", SCRIPTS / f"{name}_script.py", "--nproc-per-node", "2", timeout=150)
    assert done.rc == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if f"{name}: rank" in line) == [
        f"[{rank}] {name}: rank {rank} of 2 steps {steps}" for rank in (0, 1)
    ]
    watch.nothing_left(5)
