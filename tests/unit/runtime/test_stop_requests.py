"""Signals and the end of the job's time are noted, and taken up when the rank asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from allranks.errors import RankEnvironmentError
from allranks.runtime import stop


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch):
    for name in ("ALLRANKS_END_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    yield
    stop.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_noted_and_the_rank_goes_on(number: signal.Signals) -> None:
    stop.listen()
    assert stop.requested() is None
    signal.raise_signal(number)
    assert stop.requested() == f"got {number.name}"


def test_the_first_request_is_the_one_that_is_told() -> None:
    stop.listen()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested() == "got SIGUSR1"


def test_the_scripts_own_handler_is_called_too_and_comes_back() -> None:
    got: list[int] = []

    def theirs(number: int, _: object) -> None:
        got.append(number)

    before = signal.signal(signal.SIGUSR1, theirs)
    try:
        stop.listen()
        stop.listen()
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        stop.close()
        assert signal.getsignal(signal.SIGUSR1) is theirs
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["ALLRANKS_END_TIME", "SLURM_JOB_END_TIME"])
def test_the_end_of_the_jobs_time_is_a_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(int(time.time()) + 600))
    stop.listen(margin=60)
    assert stop.requested() is None
    stop.close()
    stop.listen(margin=3600)
    assert stop.requested() == "the job's time is nearly over"


def test_our_own_word_on_the_time_wins_over_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    monkeypatch.setenv("ALLRANKS_END_TIME", str(time.time() + 600))
    stop.listen()
    assert stop.requested() is None


def test_an_end_time_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_END_TIME", "soon")
    with pytest.raises(RankEnvironmentError, match="ALLRANKS_END_TIME=soon is no number"):
        stop.listen()


def test_a_context_that_has_stopped_leaves_with_75_and_signals_are_as_before(clean_env: dict[str, str]) -> None:
    script = """
import allranks, signal
with allranks.init() as ctx:
    ctx.closing.append(lambda: print("last thing", flush=True))
    ctx.progress.stopping = True
    print(ctx.stopping, flush=True)
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", script], env=clean_env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (os.EX_TEMPFAIL, "True\nlast thing\n")


@pytest.mark.parametrize("ending", ["ctx.close()", "with ctx: pass", "with ctx: raise SystemExit(0)"])
def test_however_a_context_is_closed_after_a_stop_the_code_is_75(clean_env: dict[str, str], ending: str) -> None:
    script = f"import allranks\nctx = allranks.init()\nctx.progress.stopping = True\n{ending}\n"
    done = subprocess.run([sys.executable, "-c", script], env=clean_env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (os.EX_TEMPFAIL, "")
