"""Which rank failed first, read from what srun says: recorded on Slurm 22.05, and made up where that is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allranks import contract
from allranks.clusters.batch.cluster import blame
from allranks.clusters.slurm import SLURM
from allranks.clusters.slurm_words import first_failure
from allranks.runs.attempt import Failure
from allranks.runs.excerpts import lines_of
from allranks.runs.status import State, Status

SETTINGS = "allranks: node 0: OMP_NUM_THREADS=1: CPUs: 2, ranks: 2\n"
ENDED = """\
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd-node01: error: *** STEP 1.0 ON node01 CANCELLED AT 2026-11-21T17:08:58 ***
srun: error: node01: task 0: Terminated
srun: error: node02: tasks 2-3: Terminated
srun: Force Terminated StepId=1.0
"""
OOM = ": it ran out of memory"
LAST = "allranks: no other attempt: it exited with code 143, and is not retried\n"
FOLLOWS = "allranks: another attempt follows: it was stopped on request, and is to be continued\n"
#: As seen when an admin requeues a job: what its ranks end with comes after the line that tells of it.
REQUEUED = """\
slurmstepd-node01: error: *** JOB 8 ON node01 CANCELLED AT 2026-11-21T17:16:20 DUE TO JOB REQUEUE ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
slurmstepd-node01: error: *** STEP 8.0 ON node01 CANCELLED AT 2026-11-21T17:16:20 DUE TO JOB REQUEUE ***
srun: error: node01: task 0: Terminated
srun: error: node02: task 1: Exited with exit code 1
"""


def _first(text: str) -> Failure | None:
    return first_failure(text.splitlines())


@pytest.mark.parametrize(
    ("line", "failure", "said"),
    [
        ("node02: task 5: Exited with exit code 7", Failure(5, "node02", 7), "rank 5 on node02 exited with code 7"),
        ("n1: tasks 0-1: Exited with exit code 1", Failure(0, "n1", 1), "rank 0 on n1 exited with code 1"),
        ("n1: task 3: Killed", Failure(3, "n1", -9), "rank 3 on n1 was killed by SIGKILL"),
        ("n1: task 3: Terminated", Failure(3, "n1", -15), "rank 3 on n1 was killed by SIGTERM"),
        ("n1: tasks 3,5-6: Aborted (core dumped)", Failure(3, "n1", -6), "rank 3 on n1 was killed by SIGABRT"),
        ("n1: task 10: Segmentation fault", Failure(10, "n1", -11), "rank 10 on n1 was killed by SIGSEGV"),
        ("n1: task 1: Real-time signal 6", Failure(1, "n1", -40), "rank 1 on n1 was killed by signal 40"),
        # From Slurm's source.
        ("n1: tasks 4-7: Out Of Memory", Failure(4, "n1", -9, True), f"rank 4 on n1 was killed by SIGKILL{OOM}"),
        ("node[01-02]: tasks 1,3: Bus error", Failure(1, None, -7), "rank 1 was killed by SIGBUS"),
        ("Unknown: task 1: Hangup", Failure(1, None, -1), "rank 1 was killed by SIGHUP"),
    ],
)  # fmt: skip
def test_how_a_rank_ends(line: str, failure: Failure, said: str) -> None:
    assert _first(f"{SETTINGS}srun: error: {line}\n{ENDED}{LAST}") == failure
    assert failure.in_words(with_host=True) == said


@pytest.mark.parametrize(
    "text",
    [
        "",
        SETTINGS + LAST,
        "srun: error: n1: task 1: something new\n",
        "srun: error: Unable to create step for job 7: Job/step already completing or completed\n",
        "node01: task 1: Exited with exit code 7\n",
        # Nothing has failed: a rank has saved and left, and srun has ended the others for it.
        SETTINGS + "srun: error: node01: task 1: Exited with exit code 75\n" + ENDED + LAST,
    ],
)
def test_nothing_is_told(text: str) -> None:
    assert _first(text) is None


def test_a_rank_that_fails_after_others_have_left() -> None:
    left = "srun: error: node01: task 1: Exited with exit code 75\n"
    assert _first(f"{left}{ENDED}srun: error: node02: task 3: Exited with exit code 2\n") == Failure(3, "node02", 2)


SEVENTH = "srun: error: node02: task 7: Exited with exit code 7\n"
THIRD = "srun: error: node01: task 3: Exited with exit code 3\n"


@pytest.mark.parametrize(
    ("before", "end"),
    [
        (SETTINGS, REQUEUED),
        (SETTINGS, REQUEUED + FOLLOWS),
        (SETTINGS + THIRD, REQUEUED + LAST),
        (SETTINGS + THIRD + ENDED, FOLLOWS),
        (SETTINGS + THIRD + ENDED, LAST),
    ],
)
def test_only_the_newest_attempt_counts(tmp_path: Path, before: str, end: str) -> None:
    log, start = tmp_path / "log", f"{contract.ATTEMPT_STARTS}\n"
    log.write_text(start + before + end + start + SETTINGS + SEVENTH + ENDED + LAST)
    assert first_failure(lines_of(log)) == Failure(7, "node02", 7)
    log.write_text(start + before + end + start + SETTINGS + "bash: line 1: module: command not found\n" + LAST)
    assert first_failure(lines_of(log)) is None


def test_what_slurm_says_after_the_end_changes_nothing() -> None:
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\n"
    assert _first(SETTINGS + SEVENTH + ENDED + LAST + oom) == Failure(7, "node02", 7)


FAILED = Status(State.FAILED, "FAILED", exit_code=143, started=1.0, ended=2.0)


def _plan(run: Path, asked: dict[str, str], nnodes: int = 2) -> None:
    reasons = [{"subject": option, "value": str(run / path), "why": ""} for option, path in asked.items()]
    (run / "plan.json").write_text(json.dumps({"nnodes": nnodes, "reasons": reasons}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give the directory of a run with two nodes of two ranks, and a log of its job 9."""
    for rank in range(4):
        node = tmp_path / f"attempts/000/node-00{rank // 2}"
        node.mkdir(parents=True, exist_ok=True)
        (node / f"rank-{rank}.err").touch()
    _plan(tmp_path, {})
    (tmp_path / "slurm-9.out").write_text(SETTINGS + THIRD + ENDED + LAST)
    return tmp_path


def _told(run: Path) -> tuple[str | None, int | None, int | None]:
    status = blame(SLURM, FAILED, run, run / "attempts/000", "9;lab")
    return status.reason, status.exit_code, status.rank


def test_the_status_names_rank_node_and_code(run: Path) -> None:
    assert _told(run) == ("rank 3 on node01 exited with code 3", 3, 3)
    (run / "slurm-9.out").write_text("srun: error: n1: task 3: Killed\n")
    assert _told(run) == ("rank 3 on n1 was killed by SIGKILL", 137, 3)


def test_on_a_single_node_no_node_is_named(run: Path) -> None:
    _plan(run, {}, nnodes=1)
    assert _told(run) == ("rank 3 exited with code 3", 3, 3)


@pytest.mark.parametrize("text", [None, "{"])
def test_without_a_plan_the_log_is_in_the_run_folder(run: Path, text: str | None) -> None:
    (run / "plan.json").unlink()
    if text:
        (run / "plan.json").write_text(text)
    assert _told(run) == ("rank 3 exited with code 3", 3, 3)


def test_a_rank_that_never_began_has_no_log_to_point_to(run: Path) -> None:
    for rank in (2, 3):
        (run / f"attempts/000/node-001/rank-{rank}.err").unlink()
    assert _told(run) == ("rank 3 on node01 exited with code 3", 3, None)


def test_of_nodes_that_were_being_set_up_the_first_one_gives_the_code(run: Path) -> None:
    for log in run.glob("attempts/000/*/rank-*.err"):
        log.unlink()
    assert _told(run) == (None, 3, None)


def test_what_srun_says_of_agents_is_not_of_ranks(run: Path) -> None:
    (run / "attempts/000/node-001/agent.jsonl").touch()
    assert _told(run) == (None, 143, None)


def test_without_a_log_nothing_changes(run: Path) -> None:
    (run / "slurm-9.out").rename(run / "slurm-8.out")
    assert _told(run) == (None, 143, None)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"--output": "logs/slurm-%j.out"}, "logs/slurm-9.out"),
        ({"--output": "logs/%x.%4j[1].out"}, "logs/train.0009[1].out"),
        ({"--output": "logs/out", "--error": "logs/50%%-%j"}, "logs/50%-9"),
        ({"--output": "nowhere/%j"}, "slurm-9.out"),
    ],
)
def test_where_the_log_is(run: Path, asked: dict[str, str], name: str) -> None:
    (run / "logs").mkdir()
    for other in ("logs/out", "logs/slurm-8.out"):
        (run / other).write_text("srun: error: n1: task 1: Killed\n")
    (run / "slurm-9.out").rename(run / name)
    _plan(run, asked)
    assert _told(run)[1:] == (3, 3)


def test_of_several_logs_the_newest_counts(run: Path) -> None:
    (run / "old.out").write_text("srun: error: n1: task 1: Killed\n")
    os.utime(run / "old.out", (1, 1))
    (run / "slurm-9.out").rename(run / "new.out")
    _plan(run, {"--output": "%x.out"})
    assert _told(run)[1:] == (3, 3)
