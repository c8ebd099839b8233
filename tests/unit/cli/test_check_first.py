"""What ``allranks run`` checks before it starts anything."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE, is_alive, wait_for

pytestmark = pytest.mark.usefixtures("checked")
HOST = socket.gethostname()


def _site_check(allranks: Any, text: str) -> None:
    """Give the job a check of the site's own."""
    folder = allranks.folder / "own"
    folder.mkdir()
    (folder / "rack").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "rack").chmod(0o755)
    allranks.script("print('ran')\n")
    allranks.job("script: train.py\nchecks: {folder: own}\n")


def test_what_cannot_work_is_not_started(allranks: Any) -> None:
    allranks.script("import no_such_module\n")
    done = allranks("run", "train.py")
    run = allranks.run()
    assert (done.rc, done.stdout) == (3, "")
    message = done.message
    assert message["error"].startswith(f"imports on {HOST}: ")
    assert message["error"].endswith("no_such_module (train.py:1)")
    assert [*message] == ["error", "why", "fix", "see"]
    assert message["see"] == f"runs/{run.name}/preflight.json"
    status = allranks.record()["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("FAILED", "not started", 3)
    (failed,) = [each for each in json.loads((run / "preflight.json").read_text())["checks"] if each["grade"] == "FAIL"]
    assert (failed["check"], failed["host"]) == ("imports", HOST)


def test_what_may_go_wrong_is_noted_and_started(allranks: Any) -> None:
    allranks.script("print('ran')\n")
    done = allranks("run", "train.py", "--env", "NCCL_SOCKET_IFNAM=lo")
    assert (done.rc, done.stdout) == (0, "[0] ran\n")
    notes = [line for line in done.stderr.splitlines() if line.startswith("allranks: note: variables on ")]
    assert ["NCCL_SOCKET_IFNAM " in note and "NCCL_SOCKET_IFNAME" in note for note in notes] == [True]
    assert json.loads((allranks.run() / "preflight.json").read_text())["good"]


def test_a_check_that_is_left_out_refuses_nothing(allranks: Any) -> None:
    _site_check(allranks, "echo no rack; exit 2")
    assert allranks("run").rc == 3
    resumed = allranks("resume")  # It is told what was found, and checks nothing.
    said = "allranks: note: this run was refused before, and resume does not check again: "
    assert (resumed.stdout, resumed.stderr.startswith(said + f"rack on {HOST}: no rack")) == ("[0] ran\n", True)
    allranks.job("script: train.py\nchecks: {folder: own, skip: [rack]}\n")
    assert allranks("run").stdout == "[0] ran\n"


def test_without_checks_nothing_is_looked_at(allranks: Any) -> None:
    _site_check(allranks, "echo no rack; exit 2")
    assert allranks("run", "--no-check").stdout == "[0] ran\n"
    assert not (allranks.run() / "preflight.json").exists()


def test_the_run_keeps_nothing_else_of_a_look(allranks: Any) -> None:
    allranks.script("print('ran')\n")
    assert allranks("run", "train.py", "--name", "checked").rc == 0
    assert allranks("run", "train.py", "--name", "unchecked", "--no-check").rc == 0
    of_checked, of_unchecked = ({path.name for path in run.iterdir()} for run in allranks.runs())
    assert of_checked - of_unchecked == {"preflight.json"}


def test_ctrl_c_while_it_looks(allranks: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    _site_check(allranks, f"echo $$ >'{begun}'; exec sleep 300")
    process = allranks.popen("run")
    pid = wait_for("the check", lambda: begun.exists() and begun.read_text().strip())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"error: {allranks.run().name} was cancelled before it had started" in err.decode()
    assert allranks.record()["status"]["state"] == "CANCELLED"
    wait_for("its end", lambda: not is_alive(int(pid)))


def test_a_module_of_the_job_that_is_not_python_is_named_with_its_line(allranks: Any) -> None:
    allranks.script("import own\n")
    own = allranks.script("if True\n", "own.py")
    done = allranks("run", "train.py")
    assert (done.rc, done.stdout) == (3, "")
    assert f": {own}:1 is not valid Python 3." in done.stderr
    assert "\n  fix: correct it, or choose the Python that it is written for: environment.python" in done.stderr


def test_an_environment_that_is_not_there_is_named(allranks: Any) -> None:
    allranks.script("print('never')")
    done = allranks("run", "train.py", "--venv", "nope")
    assert (done.rc, done.stdout) == (3, "")
    assert done.stderr.count("environment.venv: there is no virtual environment") == 1
    assert f": environment.venv: there is no virtual environment at {allranks.folder}/nope\n" in done.stderr
    assert "\n  fix: make it there, or correct environment.venv\n" in done.stderr
    assert allranks("status").stderr == f"next: allranks why {allranks.run().name}\n"
    cause = allranks("why").stdout.splitlines()[0]
    assert cause == f"cause   there is no virtual environment {allranks.folder}/nope"


def test_a_note_that_the_failed_check_does_not_say_is_shown_beside_it(allranks: Any) -> None:
    allranks.script("print('never')")
    done = allranks("run", "train.py", "--python", "./nope")
    assert done.rc == 3
    assert "note: environment.python: there is no ./nope here\nerror: nodes on " in done.stderr


def test_what_the_set_up_makes_need_not_be_there_before(allranks: Any) -> None:
    allranks.script("print('ran')")
    lines = (
        f"mkdir -p env/bin; ln -sf {sys.executable} env/bin/python; echo 'PATH=$PWD/env/bin:$PATH' >env/bin/activate"
    )
    allranks.job(f"script: train.py\nenvironment:\n  venv: env\n  setup: {json.dumps(lines)}\n")
    done = allranks("run")
    assert (done.rc, done.stdout) == (0, "[0] ran\n"), done.stderr


def test_a_run_that_is_cancelled_while_it_is_checked_does_not_start(allranks: Any, tmp_path: Path) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    os.mkfifo(gate)
    _site_check(allranks, f"echo $$ >'{begun}'; read line <'{gate}'")
    process = allranks.popen("run")
    wait_for("the check", lambda: begun.exists() and begun.read_text().strip())
    name = allranks.run().name
    done = allranks("cancel")
    assert (done.rc, done.stderr) == (0, f"{name} cancelled\n")
    gate.write_text("continue\n")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (143, b"")
    assert f"error: {name} was cancelled before it had started\n" in err.decode()
    status = allranks.record()["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("CANCELLED", "not started", 143)
    done = allranks("cancel")
    assert (done.rc, done.stderr) == (0, f"{name} had ended before: CANCELLED\n")


def test_why_gives_the_advice_with_which_a_run_was_refused(allranks: Any) -> None:
    allranks.script("import no_such_module\n")
    refused = allranks("run", "train.py")
    verdict = json.loads(allranks("why", "--json").stdout)["diagnosis"]
    assert (refused.rc, verdict["sure"]) == (3, "certain")
    assert verdict["fix"] == refused.message["fix"]
    assert refused.message["fix"].startswith("install what has no_such_module")
    assert "\ndiagnosis" not in allranks("status").stdout  # The reason says it.
