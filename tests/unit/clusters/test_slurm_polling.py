"""How often Slurm's controller is asked: by whoever waits or follows, through one object, at intervals that grow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from slurm_recorded import text_of

from allranks.cli import logs, render, top
from allranks.clusters.batch.cluster import SubmittedJob
from allranks.clusters.slurm import SlurmCluster
from allranks.launch.refresh import observed
from allranks.record.logindex import LogIndexWriter
from allranks.runs.record import Record, Run, load
from allranks.runs.status import Handle, State, Status


class Controller:
    """Stands in for Slurm: its ``scontrol`` gives a recorded answer and notes that it was asked."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self._answer, self._log = folder / "answer", folder / "asked"
        self.bin.mkdir()
        self._log.touch()
        for name, does in {
            "scontrol": f"echo >>{self._log}; cat {self._answer}",
            "sacct": "exit 1",
            "scancel": ":",
        }.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{does}\n")
            (self.bin / name).chmod(0o755)
        self.says("running")

    def says(self, name: str) -> None:
        """Let it give another answer from now on."""
        self._answer.write_text(text_of(name, "scontrol.txt"))

    @property
    def asked(self) -> int:
        """How often it was asked."""
        return len(self._log.read_text().splitlines())


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Give a controller that this process would ask; the job runs."""
    made = Controller(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Give a run that is job 16, whose script has not started."""
    folder = tmp_path / "runs" / "run"
    (folder / "attempts/000/node-000").mkdir(parents=True)
    record = Record(
        id="run",
        name="n",
        cluster="lab",
        kind="slurm",
        world_size=1,
        nnodes=1,
        host="h",
        stop_timeout=1.0,
        file_mode=0o600,
        created=0.0,
    )
    return Run(folder, record).with_handle(Handle(job_id="16"), Status(State.PENDING, "starting"))


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def look(controller: Controller, run: Run, clock: Clock) -> Callable[[], int]:
    """Give a function that asks for the status ten times, and returns how often the controller was asked so far."""
    cluster = SlurmCluster(clock)

    def ask() -> int:
        found = [cluster.status(run) for _ in range(10)]
        assert {status.state for status in found} == {State.RUNNING}
        return controller.asked

    return ask


def test_a_second_question_is_answered_from_what_is_known(look: Callable[[], int], clock: Clock) -> None:
    assert look() == 1
    asked_at = []
    for _ in range(300):
        clock.now += 0.25
        before = look()
        if before > len(asked_at) + 1:
            asked_at.append(clock.now - 100)
    # 0.5 s after the first question, then half as long again each time, 15 s at most.
    assert asked_at == [0.5, 1.25, 2.5, 4.25, 7.0, 11.0, 16.75, 25.5, 38.5, 53.5, 68.5]


def test_it_is_asked_at_once_when_the_job_begins_or_ends(look: Callable[[], int], run: Run, clock: Clock) -> None:
    assert look() == 1
    for number, path in enumerate(("000/job", "000/exit", "001/job"), start=2):
        (run.folder / "attempts" / path).parent.mkdir(exist_ok=True)
        (run.folder / "attempts" / path).write_text("16\n")
        assert look() == number
    clock.now += 0.5  # The intervals start again.
    assert look() == 5


def test_runs_are_asked_about_each_by_itself(controller: Controller, run: Run, clock: Clock) -> None:
    cluster = SlurmCluster(clock)
    others = [run, Run(run.folder, run.with_handle(Handle(job_id="17"), run.record.status).record)]
    for one in others * 3:
        cluster.status(one)
    assert controller.asked == 2


def test_who_waits_for_a_job_asks_by_the_same_rule(controller: Controller, run: Run, clock: Clock) -> None:
    cluster = SlurmCluster(clock)
    job = SubmittedJob(cluster, run.folder, "16")
    for _ in range(10):
        assert not job.wait(0)
        assert cluster.status(run).state is State.RUNNING
    assert controller.asked == 1
    assert job.news() == ["job 16 submitted", "running"]
    clock.now += 0.5
    assert not job.wait(0)
    assert (controller.asked, job.news()) == (2, [])


def test_a_reason_is_told_when_it_holds_for_two_questions(controller: Controller, run: Run, clock: Clock) -> None:
    controller.says("pending-resources")
    job = SubmittedJob(SlurmCluster(clock), run.folder, "16")
    for _ in range(3):
        job.wait(0)
    assert job.news() == ["job 16 submitted"]
    clock.now += 0.5
    job.wait(0)
    (line,) = job.news()
    assert line.startswith("waiting: ")


def test_it_is_asked_at_once_after_a_signal(controller: Controller, run: Run, clock: Clock) -> None:
    job = SubmittedJob(SlurmCluster(clock), run.folder, "16")
    assert not job.wait(0)
    controller.says("cancelled")
    assert not job.wait(0)
    job.signal(15)
    assert job.wait(0)
    assert controller.asked == 2


def test_a_single_status_asks_at_once(controller: Controller, run: Run) -> None:
    for number in (1, 2):
        assert SlurmCluster().status(run).state is State.RUNNING
        assert controller.asked == number


def test_following_logs_asks_as_seldom(controller: Controller, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_STATUS_SECONDS", 0.0)
    ended = logs._Ended(run)
    assert not any(ended() for _ in range(10))
    assert controller.asked == 1
    (run.folder / "attempts/000/exit").write_text("0\n")
    controller.says("completed")
    assert ended()
    assert load(run.folder).record.status.state is State.SUCCEEDED


def _write(run: Run, attempt: int, text: str) -> None:
    """Let rank 0 write something in an attempt, and the node's index note it."""
    node = run.folder / f"attempts/00{attempt}/node-000"
    node.mkdir(parents=True, exist_ok=True)
    (node / "rank-0.out").write_text(text)
    index = LogIndexWriter(node)
    index.watch([0])
    index.tick()
    index.close()


def test_logs_of_the_attempts_that_come_are_followed(
    controller: Controller, run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        controller.says("completed")
        (run.folder / "attempts/001/exit").write_text("0\n")

    _write(run, 0, "one\ntwo\n")
    steps = iter((lambda: _write(run, 1, "three\nfour\n"), end))
    monkeypatch.setattr(logs, "_STATUS_SECONDS", 0.0)
    monkeypatch.setattr(
        logs, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: next(steps, lambda: None)())
    )
    assert logs.command.main([str(run.folder), "--follow", "--tail", "1"], standalone_mode=False) == 0
    assert capfd.readouterr().out == "[0] two\n[0] three\n[0] four\n"


def test_an_attempt_that_is_over_is_followed_to_its_end(
    controller: Controller, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        _write(run, number, f"attempt {number}\n")
    assert logs.command.main([str(run.folder), "--follow", "--attempt", "1"], standalone_mode=False) == 0
    assert capfd.readouterr().out == "[0] attempt 0\n"


def test_top_asks_as_seldom(controller: Controller, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def frames(texts: Iterable[str]) -> None:
        for text in texts:
            shown.append(text)
            if len(shown) == 10:
                assert controller.asked == 1
                controller.says("completed")
                (run.folder / "attempts/000/exit").write_text("0\n")

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    monkeypatch.setattr(render, "is_lively", lambda _: True)
    monkeypatch.setattr(render, "frames", frames)
    assert top.command.main([str(run.folder)], standalone_mode=False) == 0
    assert (len(shown), controller.asked) == (10, 2)


def test_a_run_began_with_its_first_attempt(controller: Controller, run: Run) -> None:
    of_the_job = observed(run, SlurmCluster()).record.status.started
    job = run.folder / "attempts/000/job"
    job.write_text("15\n")
    os.utime(job, (1000, 1000))
    assert observed(run, SlurmCluster()).record.status.started == of_the_job != 1000
    (run.folder / "attempts/001").mkdir()
    assert observed(run, SlurmCluster()).record.status.started == 1000
    told = '{"time": 900, "host": "h", "kind": "agent-started", "pid": 1, "began": 900}\n'
    (run.folder / "attempts/000/node-000/agent.jsonl").write_text(told)
    assert observed(run, SlurmCluster()).record.status.started == 900


def test_a_forgotten_job_that_left_a_log_was_not_deleted_in_the_queue(controller: Controller, run: Run) -> None:
    (controller.bin / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2\nexit 1\n")
    (run.folder.parent / "mine.log").write_text("of another run\n")
    reasons = [{"subject": "--output", "value": str(run.folder.parent / "mine.log"), "why": "scheduler.output"}]
    (run.folder / "plan.json").write_text(json.dumps({"reasons": reasons}))
    assert SlurmCluster().status(run).reason == "it was deleted before it started"
    (run.folder / "slurm-16.out").write_text("script.sbatch: line 12: python: there is no python3 here\n")
    status = SlurmCluster().status(run)
    assert (status.state, status.exit_code) == (State.UNKNOWN, None)
    assert status.reason == "Slurm has no record of job 16: its final state is unknown"


def test_a_run_inside_an_allocation_whose_script_ended_early_was_not_deleted(run: Run) -> None:
    inside = Run(run.folder, run.with_handle(Handle(host="h", pid=1 << 22), run.record.status).record)
    status = SlurmCluster().status(inside)
    assert (status.state, status.exit_code) == (State.UNKNOWN, None)
    assert status.reason == "the process that started it is gone: its final state is unknown"
