"""``allranks shell`` on PBS, in a real terminal, and ``allranks run`` inside of allocations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from followed_runs import hosts_of, run_named
from left_behind import assert_nothing_lives
from pbs_cluster import PbsCluster, StandInPbs
from ranks_told import PLACES, UP, WHO, expected, who

from allranks import contract
from terminals import Terminal
from waiting import PATIENCE

BIN = str(Path(sys.executable).parent)
FAILS = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(1000)\n"
TWO_NODES = {
    "openpbs": "#PBS -l select=2:ncpus=2:mpiprocs=2 -l place=scatter\n",
    "torque": "#PBS -l nodes=2:ppn=2\n",
}


class Shell(Terminal):
    """A shell on the nodes, once it is there.

    Attributes:
        job: the id of its job.
        hosts: its nodes.
    """

    def __init__(self, lab: Any, pbs: PbsCluster, *words: str) -> None:
        super().__init__(lab, "shell", "--on", "lab", "--nodes", "2", *words)
        self.job = self.read_until(r"qsub: waiting for job (\S+) to start")[1]
        self.read_until(f"qsub: job {self.job} ready")
        self.hosts = hosts_of(pbs, self.job)

    def told(self, command: str, seconds: float = PATIENCE) -> tuple[int, str]:
        """Type a command at the shell's prompt, and return its exit code and what was shown meanwhile."""
        self.read_until("# ")  # A prompt that comes later than the command would stand before its output.
        before = len(self.shown)
        self.type(f"{command}; echo ended with $?\n")
        found = self.read_until(r"\nended with (\d+)\r\n", seconds)
        return int(found[1]), self.shown[before : found.start() + 1].replace("\r", "")


@pytest.fixture
def lab(pbs_lab: Any) -> Any:
    """Give the command in a directory that knows PBS, to one who has a shell and the command in PATH."""
    pbs_lab.env.update(SHELL="/bin/sh", PATH=f"{BIN}:{pbs_lab.env['PATH']}")
    return pbs_lab


def test_a_shell_uses_all_its_nodes(lab: Any, pbs: PbsCluster, terminals: list[Terminal]) -> None:
    """It takes more than 10 s: ranks import torch on each node of the shell."""
    shell = Shell(lab, pbs, "--cpus-per-node", "2")
    terminals.append(shell)
    asked = "allranks: qsub -I -l select=2:ncpus=2:mpiprocs=1 -l place=scatter -l walltime=00:05:00 -- /bin/bash -c "
    assert asked in shell.shown
    code, said = shell.told("hostname; pwd; echo $PATH")
    assert (code, said.splitlines()[-3:]) == (0, [shell.hosts[0], str(lab.folder), lab.env["PATH"]])
    for launcher in ("torchrun", "direct"):
        flags = f"--launcher {launcher} --backend gloo"
        lab.script(WHO if launcher == "torchrun" else PLACES)
        code, said = shell.told(f"allranks run train.py --name who-{launcher} --nproc-per-node 2 {flags}")
        assert code == 0, said
        assert who(said) == expected([2, 2], shell.hosts)
        record = lab.record(run_named(lab, f"who-{launcher}"))
        told = (record["kind"], record["cluster"], record["status"]["state"])
        assert told == ("pbs", f"allocation {shell.job}", "SUCCEEDED")
        lab.script(FAILS)
        code, said = shell.told(f"allranks run train.py {flags}")
        assert code == 3, said
        assert f"error: rank 1 on {shell.hosts[1]} exited with code 3\n" in said
        lab.script(UP)
        shell.type(f"allranks run train.py --name {launcher} {flags}; echo ended with $?\n")
        wait_for_two(pbs, lab, f"runs/{launcher}-*/{contract.attempt_dir(0)}/*/rank-*.out")
        shell.type("\x03")
        assert shell.read_until(r"\nended with (\d+)\r\n")[1] == "130"
        assert lab.record(run_named(lab, launcher))["status"]["state"] == "CANCELLED"
    shell.type("exit 3\n")
    assert shell.wait() == 0  # As qsub ends, whatever the shell says.
    pbs.wait_for_state(shell.job)
    assert_nothing_lives(pbs, lab)


def wait_for_two(pbs: PbsCluster, lab: Any, logs: str) -> None:
    """Wait until two ranks have said that they are up."""
    pbs.wait_until("both ranks", lambda: [log.read_text() for log in lab.folder.glob(logs)] == ["up\n"] * 2)


def test_what_is_refused_in_a_shell(lab: Any, pbs: PbsCluster, terminals: list[Terminal]) -> None:
    shell = Shell(lab, pbs)
    terminals.append(shell)
    code, said = shell.told("allranks run train.py --nodes 3")
    assert code == 3
    assert said.splitlines()[-3:] == [
        "error: 3 nodes were requested, and this allocation has 2",
        f"  why: PBS_JOBID is {shell.job}: the command was typed inside an allocation",
        "  fix: --nodes 2, or qsub -I -l select=3:... -l place=scatter, "
        "or env -u PBS_JOBID allranks ... for a job of its own",
    ]
    code, said = shell.told("allranks shell --on lab")
    assert code == 3
    assert f"error: this is inside an allocation already: PBS_JOBID is {shell.job}\n" in said
    shell.type("exit\n")
    assert shell.wait() == 0
    pbs.wait_for_state(shell.job)  # Else the next test's shell may get nodes that this one still has.


def test_a_command_instead_of_the_shell(lab: Any, pbs: PbsCluster, terminals: list[Terminal]) -> None:
    shell = Shell(lab, pbs, "--", "sh", "-c", 'sort -u "$PBS_NODEFILE"; hostname; pwd; command -v allranks; exit 4')
    terminals.append(shell)
    assert shell.wait() == 0
    first, second = shell.hosts
    shown = "\r\n".join([first, second, first, str(lab.folder), f"{BIN}/allranks", ""])
    assert shown in shell.shown
    pbs.wait_for_state(shell.job)


def test_a_batch_job_of_ones_own(lab: Any, pbs: PbsCluster) -> None:
    lab.script(PLACES)
    runs = "".join(
        f"allranks run train.py --backend gloo --nproc-per-node 2 --launcher {name}\n"
        for name in ("torchrun", "direct")
    )
    text = f"{TWO_NODES['openpbs']}cd $PBS_O_WORKDIR\nexport PATH={lab.env['PATH']}\n{runs}"
    job = pbs.qsub("-j", "oe", "-o", "log", lab.script(text, "own.sh"), folder=lab.folder)
    assert pbs.wait_for_state(job)["Exit_status"] == "0"
    told = who((lab.folder / "log").read_text())
    assert told == sorted(expected([2, 2], hosts_of(pbs, job)) * 2)
    assert_nothing_lives(pbs, lab)


def test_a_shell_of_torque(torque_lab: Any, torque: StandInPbs, terminals: list[Terminal]) -> None:
    """It starts at home, with the PATH of a login.

    It takes more than 10 s on a slow machine: a shell on two nodes, and a run in it.
    """
    torque_lab.script(PLACES)
    refused = torque_lab("shell", "--on", "lab", "--", "hostname")
    assert (refused.rc, refused.stderr) == (
        2,
        "error: Torque's qsub -I runs no command\n  fix: allranks shell without one, and type it there\n",
    )
    shell = Shell(torque_lab, torque)
    terminals.append(shell)
    assert "allranks: qsub -I -l nodes=2:ppn=1 -l walltime=00:05:00\r\n" in shell.shown
    assert shell.told("pwd")[1].splitlines()[-1] == str(torque.home)
    shell.told(f"cd {torque_lab.folder}; export PATH={BIN}:{torque_lab.env['PATH']}")
    code, said = shell.told("allranks run train.py --backend gloo")
    assert code == 0, said
    assert who(said) == expected([1, 1], shell.hosts)
    shell.type("exit\n")
    assert shell.wait() == 0
    assert_nothing_lives(torque, torque_lab)


def test_another_node_of_torque_does_not_know_the_nodes(torque_lab: Any, torque: StandInPbs) -> None:
    torque_lab.script(PLACES)
    text = f"{TWO_NODES['torque']}pbsdsh -h pbs02 /bin/sh -c 'cd {torque_lab.folder}; {BIN}/allranks run train.py'\n"
    job = torque.qsub("-j", "oe", "-o", "log", torque_lab.script(text, "own.sh"), folder=torque_lab.folder)
    torque.wait_for_state(job)
    assert (torque_lab.folder / "log").read_text().splitlines()[:3] == [
        "error: the nodes of this allocation cannot be found out",
        "  why: PBS_NODEFILE is not set; the first node alone has it",
        "  fix: type the command on the first node of the allocation, where qsub -I gives its shell",
    ]
