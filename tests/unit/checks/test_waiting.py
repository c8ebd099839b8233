"""How long preflight waits for the ranks that it starts, and what signals do meanwhile."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from seen import seen_of

from allranks.checks.waiting import Patience, Waiting, noted
from allranks.errors import LaunchError
from allranks.runs.status import Handle, State, Status
from recorded_trial import trial_of

STARTED = trial_of([], size=1).run
RUN = STARTED._replace(record=STARTED.record._replace(handle=Handle(job_id="7")))


def patience(state: State, signals: list[int], told: list[str]) -> Patience:
    """Return one that waits for no time, attached to a run that is in that state."""
    kind: Any = SimpleNamespace(status=lambda run: Status(state, reason="all nodes are in use"))
    made = Patience(kind, Waiting(0, told.append), signals)
    started: Any = None
    made.attach(RUN, seen_of({}).plan, started)
    return made


def test_a_run_that_waits_for_too_long_is_given_up() -> None:
    with pytest.raises(LaunchError) as caught:
        patience(State.PENDING, [], []).news(RUN, [])
    assert caught.value.what == ("local gave no nodes within 0 s: all nodes are in use (--wait SECONDS waits longer)")


def test_a_run_without_a_scheduler_may_take_long_to_start() -> None:
    """Its ranks import torch before they are up, or its nodes are being set up."""
    patience(State.PENDING, [], []).news(STARTED, [])


def test_a_run_that_has_its_nodes_may_take_its_time() -> None:
    told: list[str] = []
    made = patience(State.RUNNING, [], told)
    made.news(RUN, ["node01 is up"])
    made.news(RUN, [])
    assert (told, made.interrupted()) == (["node01 is up"], 0)


@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)]
)
def test_a_signal_ends_it(number: signal.Signals, error: type[BaseException], code: int | None) -> None:
    told: list[str] = []
    made = patience(State.RUNNING, [number], told)
    with pytest.raises(error) as caught:
        made.news(RUN, [])
    assert getattr(caught.value, "code", None) == code
    assert (told, made.interrupted()) == ([f"{number.name}: test-1 is being cancelled"], number)


def test_a_signal_that_nobody_looks_for_ends_the_command() -> None:
    with pytest.raises(KeyboardInterrupt), noted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_terminal_that_is_closed_sends_its_signal_more_than_once() -> None:
    with pytest.raises(SystemExit) as caught, noted() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals == [signal.SIGHUP] * 2
    assert caught.value.code == 129
