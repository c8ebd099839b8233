"""What the supervisor of a Grid Engine job finds out, and how it starts tasks; answers are those of a real one."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from allranks.agent.grid_engine_job import Job
from allranks.errors import LaunchError
from node_orders import NODE, ORDERS

ANSWERS = Path(__file__).parents[2] / "cluster/answers/grid-engine-8.1.9"


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give the environment of a script on two hosts, the first of which has slots in two queues."""
    lines = ["n1 2 main.q@n1 UNDEFINED", "n1 2 short.q@n1 UNDEFINED", "n2 4 main.q@n2 UNDEFINED"]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)  # Which the job may make longer.
    hosts = str(tmp_path / "hosts")
    return {"PATH": path, "JOB_ID": "11", "SGE_TASK_ID": "undefined", "PE_HOSTFILE": hosts, "HOSTNAME": "n1"}


def job(environ: Mapping[str, str], nodes: int = 2, **orders: object) -> Job:
    known = {"module": "allranks.agent.grid_engine_job", **orders}
    return Job(ORDERS._replace(**known), NODE._replace(nnodes=nodes), environ)  # type: ignore[arg-type]


def test_ids(environ: dict[str, str]):
    assert (job(environ).id, job(environ).array_task) == ("11", None)
    task = job({**environ, "SGE_TASK_ID": "3"})
    assert (task.id, task.array_task, task.number) == ("11.3", "3", 14)
    with pytest.raises(LaunchError, match="JOB_ID is not set: qsub this script"):
        job({})


def test_hosts(environ: dict[str, str]):
    assert job(environ).hosts() == ["n1", "n2"]
    assert job({**environ, "PE_HOSTFILE": ""}, nodes=1).hosts() == ["n1"]
    with pytest.raises(LaunchError, match="Grid Engine gave the hosts n1 n2, and the job needs 3 different ones: "):
        job(environ, nodes=3).hosts()


def test_a_task_is_started_here_or_by_qrsh_in_any_shell(environ: dict[str, str]):
    words = ["printf", "%s|", "a b", "$HOME", "it's"]
    assert job(environ).command("n1", words) == words
    *command, line = job(environ, options=("-verbose",)).command("n2", words)
    assert command == ["qrsh", "-inherit", "-nostdin", "-verbose", "n2"]
    assert subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout == "a b|$HOME|it's|"
    *command, same = job(environ, start_with="ssh").command("n2", words)
    assert (command[0], command[-1], same) == ("ssh", "n2", line)


def answers(folder: Path, **commands: str) -> None:
    """Put commands there that print a text."""
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >{folder}/asked\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(stat.S_IRWXU)


def test_the_end_of_a_job(environ: dict[str, str], tmp_path: Path):
    answers(tmp_path, qstat=(ANSWERS / "running" / "job.xml").read_text())
    assert job(environ, time=60).end_time() == 1795432461 + 3600  # What is in force counts.
    assert (tmp_path / "asked").read_text() == "-j 11 -xml\n"


def test_another_job_follows_one_of_several_nodes(environ: dict[str, str], tmp_path: Path):
    answers(tmp_path, qsub="12")
    several = job(environ)
    assert (
        several.requeue(lost=False) == "Grid Engine does not take the further nodes of a job again that it has requeued"
    )
    assert several.submit(tmp_path, lost=False) == ("12", None)
    assert (tmp_path / "asked").read_text() == f"-terse -hold_jid 11 {tmp_path}/script.pbs\n"
    assert several.submit(tmp_path, lost=True) == ("12", None)
    assert (tmp_path / "asked").read_text() == f"-terse {tmp_path}/script.pbs\n"
    answers(tmp_path, qsub="13.3-3:1")
    assert job({**environ, "SGE_TASK_ID": "3"}).submit(tmp_path, lost=False) == ("13.3", None)
    assert (tmp_path / "asked").read_text() == f"-terse -t 3 {tmp_path}/script.pbs\n"


def test_what_exit_code_99_is_for(environ: dict[str, str], tmp_path: Path):
    """A job of one node, and one of several where nodes may submit no jobs."""
    with pytest.raises(SystemExit) as caught:
        job({**environ, "PE_HOSTFILE": ""}, nodes=1).requeue(lost=False)
    assert caught.value.code == 99
    answers(tmp_path, qsub="denied")
    with (tmp_path / "qsub").open("a") as file:
        file.write("exit 1\n")
    with pytest.raises(SystemExit) as caught:
        job(environ).submit(tmp_path, lost=False)
    assert caught.value.code == 99
    assert job(environ).submit(tmp_path, lost=True)[1] == "qsub: exit code 1"
