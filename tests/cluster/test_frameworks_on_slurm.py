"""Scripts for Lightning or Accelerate on the nodes of a cluster, as they are and with the plug-in for Lightning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sites import Site, on
from test_recipes_on_nodes import records, saved

from allranks import contract
from waiting import PATIENCE

RECIPE = Path(__file__).parents[2] / "recipes" / "multimodal-lightning"
SCRIPTS = Path(__file__).parent.parent / "scripts"
OPTIONS = {"lightning": ["--", "--devices=1", "--num-nodes=2"], "accelerate": []}


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_an_unmodified_script_runs_on_two_nodes(lab: Any, name: str) -> None:
    """It takes more than 10 s: each rank imports torch and a framework."""
    pytest.importorskip(name)
    flags = ["--on", "lab", "--nodes", "2", "--nproc-per-node", "1", "--env", "OMP_NUM_THREADS=1"]
    done = lab("run", SCRIPTS / f"{name}_script.py", *flags, *OPTIONS[name])
    assert done.rc == 0, done.stderr
    found = re.findall(rf"{name}: rank (\d+) of (\d+) steps (\d+)", done.stdout)
    assert sorted(found) == [("0", "2", "4"), ("1", "2", "4")]


@on("slurm")
def test_lightning_is_requeued_in_the_middle_of_an_epoch(site: Site) -> None:
    """It takes more than 10 s: Lightning is imported twice on each node, and a requeued job waits 11 s.

    Slurm starts the ranks itself: without the plug-in Lightning would requeue the job too.
    """
    pytest.importorskip("lightning")
    lab = site.lab
    lab.env["OMP_NUM_THREADS"] = "1"
    flags = ("--on", "lab", "--nodes", "2", "--nproc-per-node", "1", "--launcher", "direct", "--", "--epochs", "1000")
    process = lab.popen("run", RECIPE / "job.yaml", *flags)
    site.wait_until("twenty steps", lambda: len(records(lab, "contrast")) >= 2)
    run = lab.run()
    site.let_save()
    site.requeue((run / contract.attempt_dir(0) / contract.JOB).read_text().strip())
    left = site.wait_until("the second attempt", lambda: saved(run, 1))
    assert left == saved(run, 0) > 0
    site.wait_until("twenty more steps", lambda: len(records(lab, "contrast")) >= left // 10 + 2)
    assert lab("cancel", timeout=PATIENCE).rc == 0
    process.communicate(timeout=PATIENCE)
    steps = [record["step"] for record in records(lab, "contrast")]
    assert steps == [*range(9, 10 * len(steps), 10)]  # Lightning counts from 0.
    site.assert_nothing_left()
