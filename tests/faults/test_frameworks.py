"""Scripts that were written for Lightning or Accelerate, and for torchrun, run as they are; on Slurm: tests/cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from packages import FRAMEWORKS, needs
from waiting import PATIENCE

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_unmodified_script_runs(allranks, watch, name):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    done = allranks("run", SCRIPTS / f"{name}_script.py", "--nproc-per-node", "2", timeout=PATIENCE)
    assert done.rc == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if f"{name}: rank" in line) == [
        f"[{rank}] {name}: rank {rank} of 2 steps 4" for rank in (0, 1)
    ]
    watch.nothing_left()


@pytest.mark.parametrize(
    ("name", "changes", "note"),
    [
        pytest.param(
            "lightning",
            {"devices=args.devices": 'devices="auto"', 'strategy="ddp",': ""},
            "allranks: note: the 2 ranks formed no process group: each ran the whole script alone; "
            'write Trainer(devices=N, strategy="ddp"), with N the ranks of a node',
            marks=needs("lightning"),
        ),
        pytest.param(
            "accelerate",
            {"cpu=True": ""},
            "[0] allranks: note: Accelerate ran each rank alone, as the only process; "
            "write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true, to train together on CPUs",
            marks=needs("accelerate"),
        ),
    ],
)
def test_ranks_that_a_framework_trains_alone_are_noted(allranks, name, changes, note):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    text = (SCRIPTS / f"{name}_script.py").read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (allranks.folder / "train.py").write_text(text)
    done = allranks("run", "train.py", "--nproc-per-node", "2", timeout=PATIENCE)
    assert done.rc == 0, done.stderr
    assert f"{name}: rank 0 of 1 steps 8\n" in done.stdout
    assert [line for line in done.stderr.splitlines() if "note: " in line] == [note]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_script_is_one_for_torchrun(name, allranks_env, tmp_path):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**allranks_env, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, SCRIPTS / f"{name}_script.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(rf"{name}: rank (\d+) of (\d+) steps (\d+)", done.stdout)
    assert sorted(found) == [("0", "2", "4"), ("1", "2", "4")]
