"""Slurm's own log of a run: which file it is, and which of its lines tell a cause."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.clusters.batch.cluster import blame, combined, logs_of
from allranks.clusters.batch.scheduler import JobInfo
from allranks.clusters.slurm import SLURM, SlurmCluster
from allranks.logs.cause import LogExcerpt
from allranks.runs.record import Record, Run
from allranks.runs.status import Handle, State, Status

NOISE = """\
allranks: node 0: OMP_NUM_THREADS=1: CPUs: 2, ranks: 2
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-node01: error: *** STEP 1.0 ON node01 CANCELLED AT 2026-11-21T17:08:58 ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: node02: tasks 0-1: Exited with exit code 1
srun: Force Terminated StepId=1.0
"""


def said(folder: Path) -> LogExcerpt:
    record = Record(
        id="x",
        name="x",
        cluster="lab",
        kind="slurm",
        world_size=2,
        nnodes=2,
        host="h",
        handle=Handle("9"),
        status=Status(State.FAILED, "FAILED"),
        stop_timeout=30.0,
        file_mode=0o600,
        created=0.0,
    )
    return SlurmCluster().log_excerpt(Run(folder, record))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{NOISE}bash: line 4: /x/activate: No such file\nbash: line 4: /x/activate: No such file\n", 1),
        ("srun: error: Unable to create step for job 7: Invalid generic resource\n", 1),
        ("Traceback (most recent call last):\n  File 'x', line 1\n    import y\nImportError: y\n", 2),
    ],
)
def test_lines_that_tell_a_cause(tmp_path: Path, text: str, told: int) -> None:
    log = tmp_path / "slurm-9.out"
    log.write_text(text)
    wanted = [line for line in dict.fromkeys(text.splitlines()) if line not in NOISE and line[0] != " "][-told:]
    assert said(tmp_path).causes == [line.removeprefix("allranks: ") for line in wanted]
    assert len(wanted) == told


def test_a_set_up_that_fails_tells_its_line_and_what_it_said_before(tmp_path: Path) -> None:
    (tmp_path / "node.sh").write_text("set -e\n# environment.node_setup\necho hello\ncp x . || exit 4\n")
    log, attempt = tmp_path / "slurm-9.out", tmp_path / "attempts/000"
    failed = f"allranks: exit 4 failed with exit code 4 ({tmp_path}/node.sh, line 4, on n{{}})\n"
    log.write_text(f"hello\ncp: cannot stat 'x'\n{failed.format(2)}{NOISE}{failed.format(1)}")
    assert said(tmp_path) == LogExcerpt(log, ["cp: cannot stat 'x'"])
    status = blame(SLURM, Status(State.FAILED, exit_code=1), tmp_path, attempt, "9")
    assert (status.exit_code, status.reason) == (4, "on n2: line 2 of environment.node_setup failed: exit 4")


def test_a_run_does_not_end_before_it_started() -> None:
    info = JobInfo("9", State.SUCCEEDED, "COMPLETED", started=100.0, ended=101.0)
    reported = Status(State.SUCCEEDED, "ended", started=101.2, ended=101.4)
    assert (combined(info, reported).started, combined(info, reported).ended) == (101.2, 101.4)
    assert combined(replace(info, ended=103.0), reported).ended == 103.0
    assert combined(replace(info, state=State.RUNNING), reported).ended is None


def test_where_nothing_tells_a_cause_the_last_line_is_told(tmp_path: Path) -> None:
    assert said(tmp_path) == LogExcerpt()
    (tmp_path / "slurm-9.out").write_text(NOISE + "\n")
    assert said(tmp_path) == LogExcerpt(tmp_path / "slurm-9.out", ["srun: Force Terminated StepId=1.0"])


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "slurm-9.out"),
        ({"--output": "%x-%4j[1].out"}, "train-0009[1].out"),
        ({"--output": "out", "--error": "50%%-%j"}, "50%-9"),
        ({"--output": "out-%j", "--error": "empty"}, "out-9"),
        ({"--output": "a-%A_%a.out", "--array": "0-3"}, "a-9_2.out"),
        ({"--output": "o-%j", "--array": "0-3"}, "o-11"),
        ({"--array": "0-3"}, "slurm-11.out"),
    ],
)
def test_where_the_log_is(tmp_path: Path, asked: dict[str, str], name: str) -> None:
    reasons = [
        {"subject": option, "value": value if option == "--array" else str(tmp_path / value)}
        for option, value in asked.items()
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"reasons": reasons}))
    assert logs_of(SLURM, tmp_path, "9;lab") == []
    (tmp_path / "empty").touch()
    for file in ("slurm-8.out", name, "50x-9"):
        (tmp_path / file).write_text("text\n")
    os.utime(tmp_path / "slurm-8.out", (1, 1))
    assert logs_of(SLURM, tmp_path, "9;lab")[0] == tmp_path / name
