"""What a person is told on a real Slurm: before the ranks run, when they never do, after Ctrl-C, in an allocation."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ranks_told import PLACES, expected, ranks_saying, who
from slurm_cluster import SlurmCluster

from allranks import contract
from allranks.system.processes import marked
from terminals import Terminal
from waiting import PATIENCE

NOT_THERE = (
    "  why: cp: cannot stat '/nowhere/file': No such file or directory\n"
    "  fix: correct the path: a relative one starts from the ranks' --workdir, and every node needs the file"
)
#: Set-ups that fail, where Slurm's log is, the exit code, and what is told: what failed, and why or what to do.
SET_UPS = {
    "on a node": (
        "environment: {node_setup: ['true', '[ $SLURMD_NODENAME = node01 ] || { echo no scratch >&2; exit 4; }']}",
        "runs/{run}/slurm-{job}.out",
        4,
        "on node02: line 2 of environment.node_setup failed: exit 4",
        "  why: no scratch\n  fix: correct that line, and run the job again",
    ),
    "on all nodes": (
        "environment: {venv: /nowhere}",
        "runs/{run}/slurm-{job}.out",
        1,
        "environment.venv: there is no virtual environment at /nowhere",
        "  fix: make it there, or correct environment.venv",
    ),
    "in the script": (
        "environment: {setup: [echo hello, cp /nowhere/file . || exit 5]}",
        "runs/{run}/slurm-{job}.out",
        5,
        "line 2 of environment.setup failed: exit 5",
        NOT_THERE,
    ),
    "with logs elsewhere": (
        "environment: {setup: [echo hello, cp /nowhere/file .]}\nscheduler: {output: '%x-%j.out', error: 'to %%.%j'}",
        "to %.{job}",
        1,
        "line 2 of environment.setup failed: cp /nowhere/file .",
        NOT_THERE,
    ),
}


@pytest.mark.parametrize("kind", SET_UPS)
def test_a_set_up_that_fails_is_told_in_its_own_words(lab: Any, kind: str) -> None:
    job, log, code, failed, why = SET_UPS[kind]
    lab.script(PLACES)
    lab.job(f"script: train.py\nresources: {{nodes: 2}}\n{job}\n")
    done = lab("run", "--on", "lab")
    status, place = lab.record()["status"], log.format(run=lab.run().name, job=lab.record()["handle"]["job_id"])
    assert (done.rc, status["exit_code"], status["reason"]) == (code, code, failed)
    assert done.stderr.endswith(f"\nerror: {lab.run().name} FAILED: {failed}\n{why}\n  see: {place}\n")
    assert (lab.folder / place).stat().st_size


def test_a_set_up_that_fails_in_an_allocation(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(PLACES)
    lab.job("script: train.py\nenvironment: {setup: [cp /nowhere/file .]}\nretry: {requeue: false}\n")
    said = _in_allocation(slurm, lab, "run", "--backend", "gloo", nodes=1)
    assert f"error: {lab.run().name} FAILED: line 1 of environment.setup failed: cp /nowhere/file .\n" in said
    assert f"{NOT_THERE}\n  see: runs/{lab.run().name}/attempts/000/node-000/agent.log\n" in said


@pytest.fixture
def stubborn(lab: Any) -> Any:
    """Give a script whose ranks are up, and leave only when they are killed."""
    lab.script(
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(1000)\n"
    )
    return lab


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_job(stubborn: Any, slurm: SlurmCluster) -> None:
    terminal = Terminal(stubborn, "run", "train.py", "--on", "lab")
    try:
        terminal.read_until("] up")
        job = stubborn.record()["handle"]["job_id"]
        terminal.type("\x03")
        terminal.read_until(f"SIGINT: job {job} is being cancelled; once more to leave at once, without waiting for it")
        terminal.read_until("Slurm gives its ranks the site's KillWait to leave")
        time.sleep(0.5)  # A second one at once would count as the same.
        assert terminal.process.poll() is None
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%t").split() == ["CG"]
    finally:
        terminal.close()
    assert f"not waiting; it is cancelled\r\nnext: allranks status {stubborn.run().name}\r\n" in terminal.shown
    assert "the ranks have" not in terminal.shown
    for pid in marked(contract.RUN_DIR, str(stubborn.run())):  # Slurm would do so when its KillWait is over.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    slurm.wait_for_state(int(job), "CANCELLED")
    assert re.search(r"^state +CANCELLED\b", stubborn("status").stdout, re.MULTILINE)


def test_a_terminal_shows_that_a_job_waits_in_the_queue(
    lab: Any, slurm: SlurmCluster, terminals: list[Terminal]
) -> None:
    lab.script("print('here')\n")
    lab.env["TERM"] = "xterm"
    holder = slurm.sbatch("--nodes=4", "--exclusive", "--wrap=sleep 600", folder=lab.folder)
    slurm.wait_for_state(holder, "RUNNING")
    terminal = Terminal(lab, "run", "train.py", "--on", "lab", "--nodes", "4")
    terminals.append(terminal)
    terminal.read_until(r"[\r\n][-\\|/] waiting in the queue: \S.* \(\d+ s\)")
    slurm.run("scancel", str(holder))
    terminal.read_until(r"[\r\n][-\\|/] starting ranks \(\d+ s\)")
    assert terminal.wait() == 0
    shown = re.sub(r"\x1b\[[0-9;]*[mAJK]", "", terminal.shown.replace("\r", "\n"))
    assert ranks_saying(shown, "here") == [0, 1, 2, 3]
    assert re.search(r"\r\x1b\[[JK]allranks: \S+ succeeded in \S+ s\r\n$", terminal.shown)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["--gres=gpu:2"], [2, 2]),
        (["--ntasks-per-node=2", "--gpus-per-task=1"], [2, 2]),
    ],
)
def test_the_gpus_of_an_allocation_are_used(
    lab: Any, slurm: SlurmCluster, options: list[str], ranks: list[int]
) -> None:
    lab.script(PLACES)
    said = _in_allocation(slurm, lab, "run", "train.py", "--backend", "gloo", options=options)
    assert who(said) == expected(ranks)
    job = lab.record()["cluster"].removeprefix("allocation ")
    assert f": {sum(ranks)} ranks on 2 nodes of allocation {job}, backend gloo" in said
    assert "note" not in said
    assert f"allocation {job}" in lab("ps").stdout
    assert f"allocation {job} (slurm)" in lab("status").stdout


def test_different_numbers_of_gpus_in_an_allocation_are_told(lab: Any, slurm: SlurmCluster) -> None:
    lab.script(PLACES)
    said = _in_allocation(slurm, lab, "run", "train.py", "--backend", "gloo", options=["--gpus=4"])
    assert who(said) == expected([1, 1])
    assert "note: the nodes of this allocation have 1 to 3 GPUs, of which 1 on each are used: " in said


def _in_allocation(slurm: SlurmCluster, lab: Any, *words: str, nodes: int = 2, options: list[str] | None = None) -> str:
    """Type a command in the shell of salloc; return what it says."""
    command = ["salloc", "--quiet", f"--nodes={nodes}", *(options or [])]
    log = Path(lab.folder, "said")
    typed = ["bash", "-c", 'python -m allranks "$@" >said 2>&1 || true', "typed", *words]
    slurm.run(*command, *typed, folder=lab.folder, timeout=PATIENCE)
    return log.read_text()
