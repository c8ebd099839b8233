from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from seen import found, seen_of

from allranks.checks.model import Finding, Grade
from allranks.checks.topics import job
from allranks.clusters.base import Feasibility, Issue
from allranks.errors import LaunchError


@dataclass
class Answering:
    """A kind whose scheduler says what it is told to."""

    answer: Feasibility | LaunchError

    def feasibility(self, *_: object) -> Feasibility:
        if isinstance(self.answer, LaunchError):
            raise self.answer
        return self.answer


def judged(
    monkeypatch: pytest.MonkeyPatch, answer: Feasibility | LaunchError, *, is_submitted: bool = False
) -> Sequence[Finding]:
    monkeypatch.setattr(job, "load_kind", lambda _: Answering(answer))
    return found("scheduler", seen_of({}, is_submitted=is_submitted))


def test_a_machine_has_no_scheduler() -> None:
    assert found("scheduler", seen_of({})) == [Finding(Grade.SKIP, "local: there is no scheduler to ask")]


def test_when_a_job_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    (now,) = judged(monkeypatch, Feasibility("partition main", start=time.time() + 5))
    assert now == Finding(Grade.PASS, "partition main: the job could start now")
    late = time.mktime((2099, 5, 1, 7, 30, 0, 0, 0, -1))
    (later,) = judged(monkeypatch, Feasibility("partition main", start=late))
    assert later == Finding(Grade.PASS, "partition main: the job is expected to start on Friday at 07:30")
    (unknown,) = judged(monkeypatch, Feasibility("queue workq"))
    assert unknown == Finding(Grade.PASS, "queue workq: it takes the job")


def test_what_stands_against_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    never, now = Issue("too long", "be brief"), Issue("it is down", "wait", is_final=False)
    assert judged(monkeypatch, Feasibility("partition main", [never, now], start=0.0)) == [
        Finding(Grade.FAIL, "too long", "be brief"),
        Finding(Grade.WARN, "it is down", "wait"),
    ]


def test_a_scheduler_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    error = LaunchError("Slurm cannot be reached", why="no answer", fix="see scontrol ping")
    assert judged(monkeypatch, error) == [
        Finding(Grade.FAIL, "Slurm cannot be reached: no answer", "see scontrol ping")
    ]


def test_what_the_submission_tells_itself_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    never, now = Issue("too many nodes", "ask for 4"), Issue("it is down", "wait", is_final=False)
    refusal = Issue("Slurm refuses the job", "change it", is_refusal=True)
    assert judged(monkeypatch, Feasibility("partition main", [never, now, refusal]), is_submitted=True) == [
        Finding(Grade.FAIL, "too many nodes", "ask for 4; --no-check submits it all the same"),
        Finding(Grade.WARN, "it is down", "wait"),
        Finding(Grade.SKIP, "Slurm refuses the job"),
    ]
    error = LaunchError("pbsnodes failed", why="Unauthorized Request")
    assert judged(monkeypatch, error, is_submitted=True) == [
        Finding(Grade.SKIP, "pbsnodes failed: Unauthorized Request")
    ]
