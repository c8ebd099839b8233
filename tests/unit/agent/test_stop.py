"""Requests to end: noted at once, taken up where it is safe, hurried by a second one."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from allranks import contract
from allranks.agent.stop import SIGNALS, StopRequest, StopRequestedError
from allranks.agent.workers.group import failed


@pytest.fixture
def early():
    return []


@pytest.fixture
def stop(early):
    old = {number: signal.getsignal(number) for number in SIGNALS}
    stop = StopRequest(early.append)
    stop.listen()
    yield stop
    for number, handler in old.items():
        signal.signal(number, handler)


def _send(number):
    os.kill(os.getpid(), number)
    time.sleep(0)  # The handler runs between two steps of the interpreter.


def _taken_up(stop):
    with pytest.raises(StopRequestedError) as caught:
        stop.check()
    return stop.signal, str(caught.value)


def test_a_signal_is_taken_up_once(stop, early):
    stop.ready()
    stop.check()
    _send(signal.SIGHUP)
    assert _taken_up(stop) == (signal.SIGHUP, "got SIGHUP")
    stop.check()
    assert early == []


def test_a_signal_before_there_is_a_rank_ends_at_once(stop, early):
    _send(signal.SIGTERM)
    assert early == [stop]
    assert (stop.signal, stop.why) == (signal.SIGTERM, "got SIGTERM")


def test_a_second_signal_is_a_hurry_but_not_one_that_came_with_the_first(stop, monkeypatch):
    monkeypatch.setattr(contract, "ONE_REQUEST_SECONDS", 600.0)
    stop.ready()
    _send(signal.SIGINT)
    _send(signal.SIGINT)
    assert not stop.hurry
    monkeypatch.setattr(contract, "ONE_REQUEST_SECONDS", 0.0)
    _send(signal.SIGTERM)
    assert stop.hurry
    assert _taken_up(stop) == (signal.SIGINT, "got SIGINT")


def test_signals_that_were_blocked_meanwhile_are_not_lost(early):
    old = signal.getsignal(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        stop = StopRequest(early.append)
        stop.listen()
        assert early == [stop]
    finally:
        for number in SIGNALS:
            signal.signal(number, old if number == signal.SIGTERM else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "rank 2 exited with code 3"),
        (-9, "rank 2 was killed by SIGKILL"),
        (-34, "rank 2 was killed by SIGRTMIN"),
        (-40, "rank 2 was killed by signal 40"),
    ],
)
def test_ends_in_words(code, said):
    outcome = failed(2, code)
    assert (outcome.state, outcome.rank, outcome.reason) == ("FAILED", 2, said)
