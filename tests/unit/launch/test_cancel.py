"""A cancellation that comes while a run is being started: the run ends, whichever of the two commands sees it first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from allranks import contract
from allranks.clusters.base import Started
from allranks.clusters.local import LocalCluster
from allranks.errors import LaunchError, StartCancelledError
from allranks.job.spec import Job
from allranks.launch import submit
from allranks.launch.cancel import cancel
from allranks.launch.submit import Launch
from allranks.plan.plan import Plan
from allranks.runs.record import Run, find, load
from allranks.runs.status import State
from waiting import PATIENCE, wait_for


class Slow(LocalCluster):
    """Does something when it is asked to start, before it does, and when it has."""

    def __init__(self, before: Callable[..., object] = lambda _: None, after: Callable[[], object] = lambda: None):
        super().__init__()
        self._before, self._after = before, after

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        self._before(interrupted)
        started = super().start(plan, environ, detach=detach, interrupted=interrupted)
        self._after()
        return started


@pytest.fixture
def job(tmp_path: Path, allranks_env: dict[str, str]) -> Launch:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(300)\n")
    spec = Job.model_validate({"script": "train.py"})
    return Launch(spec, "script: train.py\n", tmp_path, tmp_path / "runs", allranks_env)


def _mark(run: Run) -> Path:
    return run.attempt_folder / contract.CANCELLED


def test_a_run_can_be_cancelled_as_soon_as_there_is_a_folder_of_it(job: Launch) -> None:
    kind, seen = LocalCluster(), []

    def cancelled(run: Run) -> None:
        assert find(job.runs_folder, None).folder == run.folder
        assert not (run.folder / contract.CODE).exists()
        seen.append(cancel(run, kind).record.status.state)

    run, plan = submit.prepare(job, kind, cancelled)
    assert seen == [State.CANCELLED]
    with pytest.raises(StartCancelledError, match="was cancelled before it had started") as raised:
        submit.start(run, plan, kind, job.environ, detach=True, watched=False)
    assert raised.value.exit_code == 143
    assert load(run.folder).record.status.state is State.CANCELLED
    assert not _mark(run).exists()


def test_a_start_that_takes_long_hears_of_it(job: Launch) -> None:
    heard: list[int] = []

    def hear(interrupted: Callable[[], int]) -> None:
        heard.append(interrupted())
        _mark(run).touch()
        heard.append(interrupted())
        raise StartCancelledError("cancelled", 15)

    run, plan = submit.prepare(job, kind := Slow(hear))
    with pytest.raises(StartCancelledError):
        submit.start(run, plan, kind, job.environ, detach=True, watched=False)
    assert heard == [0, 15]


def test_a_start_that_fails_because_of_it_is_no_failure(job: Launch) -> None:
    """The command that cancels did not wait for a slow launcher, and has ended what that had started."""

    def fail(_: Callable[[], int]) -> None:
        _mark(run).touch()
        raise LaunchError("the agent on gpu01 cannot be started")

    run, plan = submit.prepare(job, kind := Slow(fail))
    with pytest.raises(StartCancelledError, match="was cancelled before it had started") as raised:
        submit.start(run, plan, kind, job.environ, detach=True, watched=False)
    assert (raised.value.exit_code, load(run.folder).record.status.state) == (143, State.CANCELLED)


def test_what_was_started_meanwhile_is_ended_by_its_launcher(job: Launch) -> None:
    """The agent is there, and its handle is not on record yet."""
    found: list[Run] = []
    other = threading.Thread(target=lambda: found.append(cancel(load(run.folder), LocalCluster())))

    def cancelled() -> None:
        other.start()
        wait_for("the mark", _mark(run).exists)

    run, plan = submit.prepare(job, kind := Slow(after=cancelled))
    run, started = submit.start(run, plan, kind, job.environ, detach=True, watched=False)
    assert started.wait(PATIENCE)
    other.join(PATIENCE)
    assert [each.record.status.state for each in found] == [State.CANCELLED]
    assert not _mark(run).exists()


def test_a_mark_that_is_left_beside_a_handle_is_taken_by_the_one_that_cancels(job: Launch) -> None:
    run, plan = submit.prepare(job, kind := LocalCluster())
    old = run
    run, started = submit.start(run, plan, kind, job.environ, detach=True, watched=False)
    assert cancel(old, kind).record.status.state is State.CANCELLED  # It has read the record before the handle.
    assert started.wait(PATIENCE)
    assert not _mark(run).exists()
