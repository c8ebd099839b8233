"""Signals and the end of the job's time are noted, and taken up when the rank asks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RankEnvironmentError
from allranks.runtime import stop


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch):
    for name in ("ALLRANKS_END_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    yield
    stop.close()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_noted_and_the_rank_goes_on(number: signal.Signals) -> None:
    """Sent twice at once, as torchrun passes on the Ctrl-C that its ranks have got too, it is one request."""
    stop.listen()
    assert stop.requested() is None
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert stop.requested() == f"got {number.name}"


def test_a_second_ctrl_c_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    stop.listen()
    signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("number", stop.TYPED)
def test_what_a_process_in_the_background_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        stop.listen()
        signal.raise_signal(number)
        assert stop.requested() is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        stop.close()
        signal.signal(number, before)


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
    now = 1_800_000_000.0
    monkeypatch.setenv(name, str(now + 600))
    for margin, seconds in ((60.0, 540.0), (3600.0, 300.0)):  # No more than half of what is left.
        monkeypatch.setattr(time, "time", lambda: now)
        stop.listen(margin=margin)
        monkeypatch.setattr(time, "time", lambda later=seconds: now + later)
        assert stop.requested() is None
        monkeypatch.setattr(time, "time", lambda later=seconds: now + later + 0.1)
        assert stop.requested() == "the job's time is nearly over"
        stop.close()


def test_our_own_word_on_the_time_wins_over_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    monkeypatch.setenv("ALLRANKS_END_TIME", str(time.time() + 600))
    stop.listen()
    assert stop.requested() is None


def test_an_end_time_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLRANKS_END_TIME", "soon")
    with pytest.raises(RankEnvironmentError, match="invalid number: ALLRANKS_END_TIME=soon"):
        stop.listen()


def test_a_context_that_has_stopped_leaves_with_75_and_signals_are_as_before(
    run_python: Any, clean_env: dict[str, str]
) -> None:
    script = """
import allranks, signal
with allranks.init() as ctx:
    ctx.closing.append(lambda: print("last thing", flush=True))
    ctx.progress.stopping = True
    print(ctx.stopping, flush=True)
print("not reached")
"""
    done = run_python(script, env=clean_env)
    assert (done.rc, done.stdout) == (os.EX_TEMPFAIL, "True\nlast thing\n")


@pytest.mark.parametrize("ending", ["ctx.close()", "with ctx: pass", "with ctx: raise SystemExit(0)"])
def test_however_a_context_is_closed_after_a_stop_the_code_is_75(
    run_python: Any, clean_env: dict[str, str], ending: str
) -> None:
    script = f"import allranks\nctx = allranks.init()\nctx.progress.stopping = True\n{ending}\n"
    done = run_python(script, env=clean_env)
    assert (done.rc, done.stderr) == (os.EX_TEMPFAIL, "")


EARLY = """
import faulthandler, signal, sys, torch, allranks
{before}
with allranks.init() as ctx:
    signal.raise_signal(signal.{name})
    print("alive", flush=True)
    {after}
print("closed", flush=True)
signal.raise_signal(signal.{name})
"""
CHECKPOINTS = """
    model = torch.nn.Linear(1, 1)
    checkpoints = ctx.checkpoints(sys.argv[1], model=model)
    print(checkpoints.step(), flush=True)
"""


@pytest.fixture
def early(run_python: Any, clean_env: dict[str, str]) -> Callable[..., tuple[int, str, str]]:
    """Run a script that gets a signal before it makes a checkpointer, and another one after the context is closed."""

    def run(folder: Path, name: str, before: str = "", after: str = "") -> tuple[int, str, str]:
        script = EARLY.format(name=name, before=before, after=after)
        done = run_python(script, folder, env=clean_env)
        return done.rc, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_before_there_are_checkpoints_is_taken_up_by_them(
    early: Any, tmp_path: Path, number: signal.Signals
) -> None:
    code, out, err = early(tmp_path, number.name, after=CHECKPOINTS)
    saved = tmp_path / "step-000000001"
    assert (code, out) == (os.EX_TEMPFAIL, "alive\nTrue\n")
    assert err == f"allranks: stopping at step 1: got {number.name}; saved {saved}\n"
    assert saved.is_dir()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_to_a_script_that_never_saves_ends_nothing_until_it_is_closed(
    early: Any, tmp_path: Path, number: signal.Signals
) -> None:
    assert early(tmp_path, number.name) == (-number, "alive\nclosed\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_there_are_checkpoints_ends_the_rank_at_once(
    early: Any, tmp_path: Path, number: signal.Signals
) -> None:
    assert early(tmp_path, number.name, after=CHECKPOINTS) == (-number, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_stack_dump_that_the_script_has_registered_stays(early: Any, tmp_path: Path) -> None:
    code, out, err = early(tmp_path, "SIGUSR1", before="faulthandler.register(signal.SIGUSR1)")
    assert (code, out) == (0, "alive\nclosed\n")
    assert err.count("most recent call first") == 2


def test_a_handler_that_the_script_sets_in_between_is_called_and_stays(early: Any, tmp_path: Path) -> None:
    theirs = "old = signal.signal(signal.SIGUSR1, lambda *got: (print('theirs', flush=True), old(*got)))"
    code, out, _ = early(tmp_path, "SIGUSR1", after=f"{theirs}\n    signal.raise_signal(signal.SIGUSR1)")
    assert (code, out) == (0, "alive\ntheirs\nclosed\ntheirs\n")


def test_an_init_that_fails_leaves_signals_as_they_were(run_python: Any, clean_env: dict[str, str]) -> None:
    script = """
import signal, allranks
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
try:
    allranks.init()
except allranks.RankError:
    print("failed", flush=True)
signal.raise_signal(signal.SIGUSR1)
"""
    env = {**clean_env, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = run_python(script, env=env)
    assert (done.rc, done.stdout) == (-signal.SIGUSR1, "failed\n")


def test_a_context_may_be_closed_in_another_thread(run_python: Any, clean_env: dict[str, str]) -> None:
    script = """
import threading, allranks
ctx = allranks.init()
thread = threading.Thread(target=lambda: print(ctx.close(), flush=True))
thread.start()
thread.join()
"""
    done = run_python(script, env=clean_env)
    assert (done.rc, done.stdout, done.stderr) == (0, "None\n", "")


def test_a_library_that_has_restored_its_handlers_takes_no_requests() -> None:
    """As Lightning's Trainer does at the end of each fit()."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop.listen()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.listen()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested() == "got SIGTERM"
        stop.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
