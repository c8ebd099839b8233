"""Scripts for Lightning or Accelerate on the nodes of a cluster, as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from packages import FRAMEWORKS

SCRIPTS = Path(__file__).parent.parent / "scripts"
OPTIONS = {"lightning": ["--", "--devices=1", "--num-nodes=2"], "accelerate": []}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_unmodified_script_runs_on_two_nodes(lab: Any, name: str) -> None:
    """It takes more than 10 s: each rank imports torch and a framework."""
    flags = ["--on", "lab", "--nodes", "2", "--nproc-per-node", "1", "--env", "OMP_NUM_THREADS=1"]
    done = lab("run", SCRIPTS / f"{name}_script.py", *flags, *OPTIONS[name])
    assert done.rc == 0, done.stderr
    found = re.findall(rf"{name}: rank (\d+) of (\d+) steps (\d+)", done.stdout)
    assert sorted(found) == [("0", "2", "4"), ("1", "2", "4")]
