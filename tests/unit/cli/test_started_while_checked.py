"""While a run of this machine is checked its agent imports torch; it starts no ranks before the checks have passed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.system.processes import marked
from waiting import PATIENCE, wait_for

pytestmark = pytest.mark.usefixtures("checked")


@pytest.fixture
def gate(allranks: Any) -> Path:
    """Let a check of the site wait until somebody writes its exit code into this file."""
    gate: Path = allranks.folder / "gate"
    os.mkfifo(gate)
    folder = allranks.folder / "own"
    folder.mkdir()
    (folder / "rack").write_text(f"#!/bin/sh\nread code <'{gate}'\nexit \"$code\"\n")
    (folder / "rack").chmod(0o755)
    allranks.script("import torch\nprint('ran', torch.ones(2).sum())\n")
    return gate


@pytest.fixture
def waiting(allranks: Any) -> Callable[[], int]:
    """Give a function that waits for an agent that has imported torch, and returns its process id."""

    def has_torch(pid: int) -> bool:
        try:
            return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return False

    def find() -> int:
        run = wait_for("a run", lambda: allranks.runs() and allranks.runs()[0])
        return wait_for("torch", lambda: next(filter(has_torch, marked(contract.RUN_DIR, str(run))), None))

    return find


def job(allranks: Any, more: str = "") -> None:
    allranks.job(f"script: train.py\nchecks: {{folder: own}}\n{more}")


def test_the_agent_has_torch_before_the_checks_end(allranks: Any, gate: Path, waiting: Callable[[], int]) -> None:
    job(allranks)
    process = allranks.popen("run")
    agent = waiting()
    assert allranks("status", "--json").stdout.count('"PENDING"') == 1
    gate.write_text("0\n")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, b"[0] ran tensor(2.)\n"), err
    (events,) = allranks.run().glob(f"attempts/*/node-*/{contract.AGENT_EVENTS}")
    started = json.loads(events.read_text().splitlines()[0])
    assert (started["kind"], started["pid"]) == ("agent-started", agent)


def test_a_run_that_is_refused_leaves_no_agent(allranks: Any, gate: Path, waiting: Callable[[], int]) -> None:
    job(allranks)
    process = allranks.popen("run")
    waiting()
    gate.write_text("2\n")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (3, b""), err
    assert marked(contract.RUN_DIR, str(allranks.run())) == []
    status = allranks.record()["status"]
    assert (status["state"], status["native"]) == ("FAILED", "not started")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_agent_of_a_launcher_that_is_gone_ends(
    number: signal.Signals, allranks: Any, gate: Path, waiting: Callable[[], int]
) -> None:
    job(allranks)
    process = allranks.popen("run")
    waiting()
    process.send_signal(number)
    opened = os.open(gate, os.O_RDWR)  # Opening it to write alone waits for a check that may have ended with the run.
    os.write(opened, b"0\n")
    out, _ = process.communicate(timeout=PATIENCE)
    os.close(opened)
    assert (process.returncode, out) == (-number, b"")
    wait_for("its end", lambda: not marked(contract.RUN_DIR, str(allranks.run())))
    assert not [*allranks.run().glob(f"attempts/*/node-*/{contract.AGENT_EVENTS}")]


@pytest.mark.parametrize("flags", [("--detach",), ("--no-agent",), ()], ids=["detached", "no agent", "set-up"])
def test_nothing_runs_while_checks_do(flags: tuple[str, ...], allranks: Any, gate: Path) -> None:
    """It takes more than 10 s on a slow machine: without allranks' agent, torchrun imports torch."""
    job(allranks, "" if flags else "environment: {setup: touch was-set-up}\n")
    process = allranks.popen("run", *flags)
    run = wait_for("a run", lambda: allranks.runs() and allranks.runs()[0])
    with gate.open("w") as opened:  # The check runs now.
        assert not [*run.glob(f"attempts/*/node-*/{contract.AGENT_LOG}")]
        assert not (allranks.folder / "was-set-up").exists()
        opened.write("1\n")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err


def test_an_agent_that_exits_before_the_checks_end_fails_the_run(allranks: Any) -> None:
    allranks.script("print('ran')\n")
    allranks.job("script: train.py\nenvironment: {container: [sh, -c, exit 3]}\n")
    done = allranks("run")
    assert done.rc == 3, done.stderr
    assert "allranks: note: nodes on " in done.stderr
    assert "the container could not be inspected: " in done.stderr
    status = json.loads((allranks.run() / contract.RECORD_FILE).read_text())["status"]
    assert (status["state"], status["exit_code"]) == ("FAILED", 3)


def test_a_container_that_cannot_be_entered_is_refused(allranks: Any) -> None:
    allranks.script("print('ran')\n")
    allranks.job("script: train.py\nenvironment: {container: image.sif}\n")
    done = allranks("run")
    assert done.rc == 3
    assert "the container cannot be entered: " in done.stderr
    assert "image.sif: not found\n" in done.stderr
    fix = "environment.container is the command that enters it, such as [apptainer, exec, image.sif]"
    assert f"  fix: {fix}\n" in done.stderr
