"""Which rank failed first, and what tells why, by what the tasks of a PBS job have left in the run's directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from allranks import contract
from allranks.clusters.batch.cluster import blame
from allranks.clusters.pbs import PBS, PbsCluster
from allranks.logs.cause import LogExcerpt
from allranks.runs.attempt import Failure, first_failure
from allranks.runs.record import Record, Run
from allranks.runs.status import Handle, State, Status

FAILED = Status(State.FAILED, "F (finished)", exit_code=1, started=1.0, ended=2.0)


def plan(run: Path, nnodes: int = 2, **logs: str) -> None:
    reasons = [{"subject": f"scheduler.{key}", "value": path, "why": ""} for key, path in logs.items()]
    (run / "plan.json").write_text(json.dumps({"nnodes": nnodes, "reasons": reasons}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give the directory of a run with two nodes of two ranks."""
    for rank in range(4):
        node = tmp_path / f"attempts/000/node-00{rank // 2}"
        node.mkdir(parents=True, exist_ok=True)
        (node / f"rank-{rank}.err").touch()
    (tmp_path / "attempts/000/job").write_text("9.server\n")
    plan(tmp_path)
    return tmp_path


def end(run: Path, task: str, text: str, at: float) -> Path:
    """Let a task, such as 0/rank-1, have ended at a time."""
    node, _, name = task.partition("/")
    path = run / f"attempts/000/node-00{node}" / f"{name}.exit"
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def first(run: Path) -> tuple[str, int | None, int] | None:
    found = first_failure(run / "attempts/000")
    return (found.folder.name, found.rank, found.code) if found else None


def test_who_failed_first_is_to_blame(run: Path) -> None:
    end(run, "0/rank-0", "143 n0\n", 20.5)
    path = end(run, "1/rank-3", "7 n1\n", 20.25)
    end(run, "1/rank-2", "143 n1\n", 20.5)
    end(run, "0/rank-1", "0 n0\n", 10)
    assert first_failure(run / "attempts/000") == Failure(3, "n1", 7, time=20.25, folder=path.parent)


def test_at_the_same_time_the_lowest_rank_is(run: Path) -> None:
    for rank in (3, 1, 2):
        end(run, f"{rank // 2}/rank-{rank}", "2 n\n", 5)
    assert first(run) == ("node-000", 1, 2)


@pytest.mark.parametrize("text", ["", "7", "seven n1", "7 n1 more"])
def test_a_file_that_is_not_whole_tells_nothing(run: Path, text: str) -> None:
    end(run, "0/rank-0", text, 1)
    assert first(run) is None


def test_nobody_failed(run: Path) -> None:
    end(run, "0/rank-0", "0 n0\n", 1)
    assert first(run) is None
    assert blame(PBS, FAILED, run, run / "attempts/000", "") is FAILED


def test_ranks_that_left_to_be_continued_and_those_ended_for_it_did_not_fail(run: Path) -> None:
    end(run, "0/rank-0", "143 n0\n", 4)
    end(run, "0/rank-1", "75 n0\n", 5)
    end(run, "1/rank-2", "137 n1\n", 6)
    assert first(run) is None
    end(run, "1/rank-3", "2 n1\n", 7)
    assert first(run) == ("node-001", 3, 2)


def test_where_none_has_left_sigterm_counts(run: Path) -> None:
    end(run, "1/rank-2", "143 n1\n", 6)
    assert first(run) == ("node-001", 2, -15)


def told(run: Path) -> tuple[str | None, int | None, int | None]:
    status = blame(PBS, FAILED, run, run / "attempts/000", "")
    assert status._replace(reason=None, exit_code=1, rank=None) == FAILED
    return status.reason, status.exit_code, status.rank


@pytest.mark.parametrize(
    ("code", "nnodes", "reason"),
    [
        (7, 2, "rank 3 on n1 exited with code 7"),
        (137, 2, "rank 3 on n1 was killed by SIGKILL"),
        (7, 1, "rank 3 exited with code 7"),
        (128, 1, "rank 3 exited with code 128"),
    ],
)
def test_the_status_names_rank_node_and_code(run: Path, code: int, nnodes: int, reason: str) -> None:
    plan(run, nnodes)
    end(run, "1/rank-3", f"{code} n1\n", 1)
    assert told(run) == (reason, code, 3)


def test_a_rank_without_a_log_is_not_pointed_to(run: Path) -> None:
    end(run, "1/rank-3", "7 n1\n", 1)
    (run / "attempts/000/node-001/rank-3.err").unlink()
    assert told(run) == ("rank 3 on n1 exited with code 7", 7, None)


def test_while_no_rank_has_begun_the_node_gives_its_code(run: Path) -> None:
    end(run, "1/rank-3", "7 n1\n", 1)
    for log in run.glob("attempts/000/*/rank-*.err"):
        log.unlink()
    assert told(run) == (None, 7, None)


def test_a_node_that_was_not_set_up_gives_its_code(run: Path) -> None:
    end(run, "1/agent", "42 n1\n", 1)
    assert told(run) == (None, 42, None)


def test_agents_know_more(run: Path) -> None:
    end(run, "1/agent", "42 n1\n", 1)
    (run / "attempts/000/node-000/agent.jsonl").touch()
    assert blame(PBS, FAILED, run, run / "attempts/000", "") is FAILED


def saying(run: Path) -> LogExcerpt:
    record = Record(
        id="x",
        name="x",
        cluster="hall",
        kind="pbs",
        world_size=4,
        nnodes=2,
        host="h",
        handle=Handle(job_id="8.server"),
        status=FAILED,
        stop_timeout=30.0,
        file_mode=0o600,
        created=0.0,
    )
    return PbsCluster().log_excerpt(Run(run, record))


SCRIPT = "OMP: x\nbash: line 1: module: command not found\nallranks: no other attempt: it has ended\n"


def test_what_the_script_of_the_newest_job_said_comes_first(run: Path) -> None:
    log = run / "pbs-9.out"
    log.write_text(SCRIPT)
    (run / "pbs-8.out").write_text("old\n")
    (run / "pbs.out").write_text("=>> PBS: job killed: walltime 10 exceeded limit 4\n")
    assert saying(run) == LogExcerpt(log, ["OMP: x", "bash: line 1: module: command not found"])


def test_of_a_log_that_attempts_share_only_what_the_newest_said_counts(run: Path) -> None:
    log = run / "pbs-9.out"
    log.write_text("allranks: n1: a task was not started, or is lost\n")
    with log.open("a") as stream:
        stream.write(f"cut off{contract.ATTEMPT_STARTS}\n")
    assert saying(run) == LogExcerpt(log)
    with log.open("a") as stream:
        stream.write("allranks: n2: a task was not started, or is lost\n")
    assert saying(run) == LogExcerpt(log, ["n2: a task was not started, or is lost"])


def test_what_says_nothing_of_the_cause_is_left_out(run: Path) -> None:
    log = run / "pbs-9.out"
    lines = ["pbsdsh: task 0x00000002 exit status 3", "pbs_tmrsh: x", "allranks: node 0: A=1: why", "  File x"]
    log.write_text("\n".join([*lines[:2], "allranks: the cause", *lines[2:]]))
    assert saying(run) == LogExcerpt(log, ["the cause"])


def test_then_what_pbs_said_and_then_the_node_that_failed_first(run: Path) -> None:
    log = run / "attempts/000/node-001/agent.log"
    log.write_text("allranks: no such disk\n")
    end(run, "1/agent", "1 n1\n", 1)
    assert saying(run) == LogExcerpt(log, ["no such disk"])
    (run / "pbs.out").write_text("=>> PBS: job killed: walltime 10 exceeded limit 4\n")
    assert saying(run) == LogExcerpt(run / "pbs.out", ["=>> PBS: job killed: walltime 10 exceeded limit 4"])
    (run / "pbs-9.out").write_text("of the script\n")
    assert saying(run) == LogExcerpt(run / "pbs-9.out", ["of the script"])


def test_logs_that_the_job_asks_for_those_with_errors_first(run: Path) -> None:
    out, err = run / "out [1].log", run / "err.log"
    plan(run, output=str(out), error=str(err))
    out.write_text("out\n")
    err.touch()
    assert saying(run) == LogExcerpt(out, ["out"])
    err.write_text("err\n")
    assert saying(run) == LogExcerpt(err, ["err"])


def test_of_an_array_the_task_that_spoke_last(run: Path) -> None:
    (run / "attempts/000/job").write_text("9[].server\n")
    for task, at in (("0", 10), ("11", 30), ("2", 20)):
        log = run / f"pbs-9[{task}].out"
        log.write_text(f"task {task}\n")
        os.utime(log, (at, at))
    assert saying(run) == LogExcerpt(run / "pbs-9[11].out", ["task 11"])


def test_nothing_is_said(run: Path) -> None:
    (run / "plan.json").unlink()
    assert saying(run) == LogExcerpt()
