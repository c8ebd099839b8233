"""Recipes whose models are split over two nodes are taken off them and continue with the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sites import Site, SlurmSite, on

from allranks import contract
from waiting import PATIENCE

RECIPES = Path(__file__).parents[2] / "recipes"
#: So many steps that it does not end before it is cancelled, each with a record that has this key.
ENDLESS = {
    "language-model": ("loss", "--strategy", "fsdp", "--layers", "1", "--width", "16", "--log-every", "1"),
    "reid": ("mAP", "--partial-fc", "--individuals", "12", "--individuals-per-batch", "8", "--eval-every", "1"),
}


@pytest.mark.parametrize("recipe", ENDLESS)
@on("slurm", "ssh")
def test_a_split_model_continues_with_the_next_step(site: Site, tmp_path: Path, recipe: str) -> None:
    """It takes more than 10 s: torch is imported twice on each node, and a requeued job waits 11 s."""
    key, *args = ENDLESS[recipe]
    if recipe == "language-model":
        text = tmp_path / "text.txt"
        text.write_text("the old fox sees the red hen and " * 300)
        args += ["--data", str(text)]
    lab = site.lab
    lab.env["OMP_NUM_THREADS"] = "1"
    words = ("--on", "lab", "--nodes", "2", "--nproc-per-node", "1", "--", "--steps", "1000000", *args)
    process = lab.popen("run", RECIPES / recipe / "job.yaml", *words)
    site.wait_until("ten steps", lambda: len(records(lab, key)) >= 10)
    run = lab.run()
    site.let_save()
    if isinstance(site, SlurmSite):
        site.requeue((run / contract.attempt_dir(0) / contract.JOB).read_text().strip())
    else:
        assert lab("cancel", timeout=PATIENCE).rc == 0
        process.communicate(timeout=PATIENCE)
        process = lab.popen("resume", run.name)
    left = site.wait_until("the second attempt", lambda: saved(run, 1))
    assert left == saved(run, 0) > 0
    site.wait_until("ten more steps", lambda: len(records(lab, key)) >= left + 10)
    assert lab("cancel", timeout=PATIENCE).rc == 0
    process.communicate(timeout=PATIENCE)
    steps = [record["step"] for record in records(lab, key)]
    assert steps == [*range(1, len(steps) + 1)]
    site.assert_nothing_left()


def records(lab: Any, key: str) -> list[dict[str, Any]]:
    """Return the records of the steps so far, which have this key."""
    found = [path.read_text() for run in lab.runs() for path in run.glob("metrics.jsonl")]
    lines = [line for text in found for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in map(json.loads, lines) if key in record]


def saved(run: Path, attempt: int) -> int:
    """Return the step that an attempt started with, or that it saved as it left; 0 before."""
    try:
        lines = (run / contract.CHECKPOINTS_FILE).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    notes = [json.loads(line) for line in lines if line.endswith("\n")]
    return next((note["step"] for note in notes if note["attempt"] == attempt and (attempt or note["leaving"])), 0)
