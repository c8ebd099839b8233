"""Flags, verbs and numbers of which more is to be seen than their message, which is in tests/golden/messages.txt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAME = {
    ("ls", "--json"): ("ps", "--json"),
    ("list", "--json"): ("ps", "--json"),
    ("stop",): ("cancel",),
    ("kill", "nope"): ("cancel", "nope"),
    ("help",): ("--help",),
    ("help", "run"): ("run", "--help"),
    ("help", "ls"): ("ps", "--help"),
    ("version",): ("--version",),
    ("-V",): ("--version",),
}


@pytest.mark.parametrize("typed", SAME, ids=" ".join)
def test_words_of_other_tools_that_mean_the_same(allranks, typed: tuple[str, ...]):
    assert allranks(*typed) == allranks(*SAME[typed])


def test_no_verb_shows_the_help(allranks):
    result = allranks()
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr == allranks("--help").stdout


def test_underscores_in_flags(allranks):
    allranks.script("")
    result = allranks("plan", "train.py", "--nproc_per_node", "2", "--max_restarts=3", "--sources")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["launch.nproc_per_node", "2", "flag", "--nproc-per-node"] in lines
    assert ["launch.max_restarts", "3", "flag", "--max-restarts"] in lines


def test_results_that_cannot_be_written(allranks):
    """A full disk behind stdout is no bug in allranks."""
    allranks.script("")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "allranks", "plan", "train.py"],
            cwd=allranks.folder,
            env=allranks.env,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    fix = b"write to a file elsewhere, or free space where this one is"
    error = b"error: cannot write to stdout\n  why: No space left on device\n  fix: %s\n" % fix
    assert (result.returncode, result.stderr) == (1, error)


@pytest.mark.parametrize(
    ("flags", "fix"),
    [(("--nproc-per-node", "100000"), "--no-check"), (("--interface", "nope0"), "launch.interface (--interface): ")],
)
def test_what_this_machine_cannot_do_is_not_started(allranks, checked, flags: tuple[str, ...], fix: str):
    allranks.script("")
    result = allranks("run", "train.py", *flags)
    assert (result.rc, result.stdout, fix in result.message["fix"]) == (3, "", True)
    assert not [*allranks.run().glob("attempts/*/*/agent.jsonl")]


def test_an_interface_that_this_machine_has(allranks, checked):
    allranks.script("")
    assert allranks("run", "train.py", "--interface", "lo").rc == 0


def test_a_flag_of_a_scheduler_does_not_start_a_job_on_the_login_node(allranks, tmp_path: Path):
    allranks.script("print('started')")
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "sbatch").touch(mode=0o755)
    path = f"{commands}:{allranks.env['PATH']}"
    result = allranks("run", "train.py", "--partition", "gpu", PATH=path)
    assert (result.rc, result.stdout) == (2, "")
    assert result.message["error"] == "--partition is for a scheduler, and no cluster is given"
    assert "sbatch is here" in result.message["why"]
    assert "{lab: {kind: slurm}}" in result.message["fix"]
    (commands / "qsub").touch(mode=0o755)
    (commands / "sbatch").unlink()
    result = allranks("run", "train.py", "--partition", "gpu", PATH=str(commands))
    assert (result.rc, "{lab: {kind: pbs or grid_engine}}" in result.message["fix"]) == (2, True)
    # A job file is for many places: there it is a note.
    (allranks.folder / "job.yaml").write_text("script: train.py\nscheduler: {partition: gpu}\n")
    result = allranks("run", PATH=path)
    assert result.rc == 0
    assert "note: there is no scheduler here: scheduler.partition not used" in result.stderr
