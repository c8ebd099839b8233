"""What torch's own launchers cannot do, and nodes that nobody can name: said before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

LEGACY, PLAIN = ("--launcher", "legacy"), ("--no-agent",)
MACHINES = ("--hosts", "gpu1,gpu2", "--master-addr", "gpu1")
REFUSED = {
    "spares": (
        (*PLAIN, *MACHINES, "--spares", "1"),
        "launch.agent: false: spares were requested, and torch's own launcher needs a fixed number of nodes",
    ),
    "restarts of legacy": (
        (*LEGACY, "--max-restarts", "1"),
        "launcher legacy: max_restarts cannot be 1",
    ),
    "restarts on several nodes": (
        (*PLAIN, *MACHINES, "--max-restarts", "1"),
        "launch.agent: false: no restarts on several nodes",
    ),
    "direct": (("--launcher", "direct", *PLAIN), "launcher direct starts no ranks here"),
    "on Slurm": (("--on", "lab", *PLAIN), "launch.agent cannot be false on cluster lab"),
    "legacy on Slurm": (("--on", "lab", *LEGACY), "launcher legacy does not exist on cluster lab"),
    "a port": ((*PLAIN, "--master-port", "0"), "--master-port: cannot be '0'"),
}


def _refused(allranks: Any, *words: str) -> list[str]:
    done = allranks(*words)
    assert (done.stdout, allranks.runs()) == ("", [])
    assert done.rc in (2, 3)
    lines: list[str] = done.stderr.splitlines()
    return lines


@pytest.fixture
def job(allranks: Any) -> Any:
    """Give the command, in a directory with a script, a program, and a cluster of kind slurm."""
    allranks.script("")
    allranks.script("#!/bin/sh\n", "program").chmod(0o755)
    allranks.script("lab: {kind: slurm}\nracks: {kind: ssh, resources: {hostfile: hosts}}\n", "clusters.yaml")
    allranks.script("gpu1 slots=2\ngpu2 slots=4\n", "hosts")
    return allranks


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had(job: Any, verb: str, name: str):
    flags, what = REFUSED[name]
    said = _refused(job, verb, "train.py", *flags)
    assert said[0] == f"error: {what}"
    assert any(line.startswith("  fix: ") for line in said) or name == "a port"


def test_a_range_of_nodes(job: Any):
    said = _refused(job, "run", "train.py", *PLAIN, "--nnodes", "1:2")
    what = "1:2 nodes were requested, and torch's own launcher needs a fixed number of nodes"
    assert said[0] == f"error: launch.agent: false: {what}"


def test_nodes_with_different_numbers_of_ranks(job: Any):
    said = _refused(job, "run", "train.py", *LEGACY, "--on", "racks", "--backend", "gloo")
    assert said[0] == "error: launcher legacy: nodes have 2 to 4 ranks"
    assert said[-1] == "  fix: --nproc-per-node 2, or launcher torchrun with its agent"


def test_a_program_gets_no_local_rank(job: Any):
    said = _refused(job, "run", "--binary", "./program", *LEGACY)
    assert said[0] == "error: launcher legacy: a program needs --use-env"
    assert said[-1] == "  fix: launch.launcher_args: [--use-env]"


def test_arguments_of_a_launcher_that_is_not_started(job: Any):
    job.job("script: train.py\nlaunch: {launcher_args: [--use-env]}\n")
    said = _refused(job, "run", "job.yaml")
    assert said[0] == "error: launch.launcher_args: on cluster local the agent takes none"


LINES = {
    "one node": ((), "--per-node: the job has one node"),
    "no address": (("--nnodes", "2"), "--master-addr is not given"),
    "a range": (
        ("--nnodes", "1:2", "--master-addr", "gpu1"),
        "--nnodes 1:2: nodes started by hand need a fixed number",
    ),
    "a scheduler": (("--on", "lab"), "--per-node: it is not known yet which nodes of lab the job will get"),
    "no script": (("--nnodes", "2", "--master-addr", "gpu1"), "there is no script nowhere.py"),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_for_nodes_that_cannot_be_written(job: Any, name: str):
    flags, what = LINES[name]
    target = "nowhere.py" if name == "no script" else "train.py"
    assert _refused(job, "plan", target, "--per-node", *flags)[0] == f"error: {what}"


@pytest.mark.parametrize("line", ["echo a # b", "cat <<END", "echo 'a", "sleep 9 &", "echo \\"])
def test_a_setup_that_fits_on_no_line(job: Any, line: str):
    job.job(f"script: train.py\nlaunch: {{agent: false}}\nenvironment:\n  node_setup: |\n    {line}\n")
    said = _refused(job, "plan", "job.yaml", "--per-node", *MACHINES)
    assert said[0] == "error: environment.node_setup does not fit on one line"
    assert said[1] == f"  why: it would have to be a part of a longer line: {line}"
