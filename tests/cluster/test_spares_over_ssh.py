"""Runs over SSH that lose machines and continue: with fewer of them, or with a spare one in the place of the lost."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import wait_until
from nodes import Network
from ranks_told import PLACES, UP, who
from ssh_nodes import SshNodes
from ssh_runs import left_on, wait_for_ranks
from trainings import SCRIPT, undisturbed

from allranks import contract
from allranks.record.events import Event, read_events
from exact_runs import weights_in
from waiting import PATIENCE

#: So many steps that a training which is slow until it is let go cannot end before a machine has.
OPTIONS = ("--epochs", "20", "--every", "10", "--quiet")


def events(run: Path, node: int, kind: str) -> list[Event]:
    """Return what a node's agent has told of a kind."""
    told = read_events(run / contract.node_dir(0, node) / contract.AGENT_EVENTS)
    return [event for event in told if event.kind == kind]


def train(ssh: Any, *flags: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a training that waits in each step for the file ``go``; return it and its run, with a checkpoint."""
    # Sums are rounded as their parts are shared by threads; variables of this shell stay here.
    given = ("--nproc-per-node", "1", "--env", "OMP_NUM_THREADS=1", *flags)
    process = ssh.popen("run", SCRIPT, *given, "--", "--folder", "checkpoints", "--slow-until", "go", *OPTIONS)
    wait_until("a checkpoint", (ssh.folder / "checkpoints" / "latest").exists)
    return process, ssh.run()


def finish(ssh: Any, process: subprocess.Popen[bytes], run: Path, node: int) -> tuple[str, str]:
    """Let a training continue without waiting once a node has started ranks again; return what it says at its end."""
    wait_until("ranks to be started again", lambda: len(events(run, node, contract.RANKS_STARTED)) > 1)
    (ssh.folder / "go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    return out.decode(), err.decode()


def test_a_spare_takes_the_place_of_a_machine_that_dies(ssh: Any, mended: Network) -> None:
    """The training ends as one that nothing happens to, and no restart is counted: none is allowed.

    It takes more than 10 s: the training imports torch on three machines, and the undisturbed one here.
    """
    process, run = train(ssh, "--hosts", "gpu01,gpu02,gpu03", "--spares", "1")
    assert ssh.record(run)["world_size"] == 2
    wait_until("the spare to be set up", lambda: events(run, 2, contract.WAITING))
    mended.kill("gpu02")
    out, err = finish(ssh, process, run, 0)
    assert f"allranks: {run.name}: 2 ranks on 2 nodes and 1 spare of ssh, " in err
    assert weights_in(out) == undisturbed(ssh, *OPTIONS)
    assert [event.fields["nodes"] for event in events(run, 0, contract.RANKS_STARTED)] == [2, 2]
    (taken,) = events(run, 2, contract.RANKS_STARTED)
    assert [rank["rank"] for rank in taken.fields["ranks"]] == [1]
    record = ssh.record(run)
    assert (record["status"]["state"], record["world_size"], record["nnodes"]) == ("SUCCEEDED", 2, 2)
    assert left_on(mended, run) == {}


def test_a_spare_that_is_not_needed(ssh: Any, network: Network) -> None:
    ssh.script(f"import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n{PLACES}")
    flags = ("--nodes", "2", "--hosts", "gpu[01-04]", "--spares", "2", "--nproc-per-node", "1")
    process = ssh.popen("run", "train.py", *flags)
    run = wait_until("the run", lambda: next(iter(ssh.runs()), None))
    for spare in (2, 3):
        wait_until("the spare to be set up", lambda spare=spare: events(run, spare, contract.WAITING))
    (ssh.folder / "go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    assert [[rank, world] for rank, _, world, *_ in who(out.decode())] == [[0, 2], [1, 2]]
    states = [event.fields["state"] for node in range(4) for event in events(run, node, contract.ENDED)]
    assert states == ["SUCCEEDED"] * 4
    assert len([*run.glob("attempts/000/node-*/rank-*.out")]) == 2
    assert re.search(r"^ranks +2 on 2 nodes$", ssh("status", run.name).stdout, re.MULTILINE)
    assert left_on(network, run) == {}


def test_a_spare_that_dies_or_never_comes_ends_nothing(ssh: Any, ssh_nodes: SshNodes, mended: Network) -> None:
    ssh.script(UP.replace("while True", "import os\nwhile not os.path.exists('go')"))
    ssh_nodes.lock_out("gpu04")
    process = ssh.popen("run", "train.py", "--hosts", "gpu[01-04]", "--spares", "2", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    wait_until("the spare to be set up", lambda: events(run, 2, contract.WAITING))
    mended.kill("gpu03")
    (lost,) = wait_until("the spare to be missed", lambda: events(run, 0, contract.NODE_LOST))
    assert (lost.fields["node"], lost.host) == (2, "gpu03")
    (ssh.folder / "go").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    said = "cannot reach gpu04: root@gpu04: Permission denied (publickey).; the run continues without it"
    assert err.decode().count(f"allranks: {run.name}: {said}\n") == 1
    assert len(events(run, 0, contract.RANKS_STARTED)) == 1
    ssh_nodes.restart("gpu04")
    assert left_on(mended, run) == {}


def test_a_machine_that_cannot_be_reached_is_not_waited_for(ssh: Any, ssh_nodes: SshNodes, network: Network) -> None:
    ssh.script(PLACES)
    ssh_nodes.lock_out("gpu02")
    try:
        done = ssh("run", "train.py", "--nodes", "2:3", "--hosts", "gpu[01-03]", "--nproc-per-node", "1")
    finally:
        ssh_nodes.restart("gpu02")
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == [[0, 0, 2, 1, "gpu01", 2], [1, 0, 2, 1, "gpu03", 2]]
    name = ssh.run().name
    assert f"allranks: {name}: 2 to 3 ranks on 2 to 3 nodes of ssh, " in done.stderr
    said = "cannot reach gpu02: root@gpu02: Permission denied (publickey).; the run continues without it"
    assert done.stderr.count(f"allranks: {name}: {said}\n") == 1
    assert re.search(r"^ranks +2 on 2 nodes$", ssh("status", name).stdout, re.MULTILINE)
    assert left_on(network, ssh.run()) == {}


@pytest.mark.parametrize("absent", ["gpu01", "gpu02,gpu03"])
def test_too_few_machines_can_be_reached(ssh: Any, ssh_nodes: SshNodes, network: Network, absent: str) -> None:
    """All meet at the first one, so there is no run without it.

    It takes more than 10 s: machines that are checked wait for 10 s for those that do not come.
    """
    ssh.script(UP)
    for name in absent.split(","):
        ssh_nodes.lock_out(name)
    try:
        flags = ("--nodes", "2:3", "--hosts", "gpu[01-03]", "--nproc-per-node", "1")
        checked = ssh("run", "train.py", *flags, "--check")
        done = ssh("run", "train.py", *flags, "--no-check")
    finally:
        for name in absent.split(","):
            ssh_nodes.restart(name)
    assert (checked.rc, done.rc) == (3, 1)
    assert "error: nodes on gpu" in checked.stderr
    assert f"error: cannot reach {absent[:5]}" in done.stderr
    assert [left_on(network, run) for run in ssh.runs()] == [{}, {}]


def test_the_others_go_on_when_a_machine_dies(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: the training imports torch on three machines, and the undisturbed one here."""
    process, run = train(ssh, "--nodes", "2:3", "--hosts", "gpu[01-03]")
    mended.kill("gpu02")
    out, err = finish(ssh, process, run, 0)
    assert [event.fields["world_size"] for event in events(run, 0, contract.RANKS_STARTED)] == [3, 2]
    told = [line.partition(f"allranks: {run.name}: ")[2] for line in err.splitlines()]
    (lost,) = (line for line in told if line.startswith("node 1 (gpu02) was lost: "))
    assert told[told.index(lost) :].count("restarted with 2 ranks on 2 nodes") == 1
    assert weights_in(out)[0] == undisturbed(ssh, *OPTIONS)[0]
    assert f"allranks: {run.name} succeeded in " in err
    told = ssh("status", run.name).stdout
    assert re.search(r"^state +SUCCEEDED\b", told, re.MULTILINE)
    assert re.search(r"^ranks +2 on 2 nodes$", told, re.MULTILINE)
    assert left_on(mended, run) == {}


def test_the_first_machine_cannot_be_replaced(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: ssh tries for 10 s to reach the lost machine, once."""
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--hosts", "gpu[01-03]", "--spares", "1", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    mended.kill("gpu01")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.search(r"node 0 \(gpu01\) was lost: .* \(no other node can take its place\)", err.decode())
    assert f"  fix: allranks resume {run.name} continues from the newest checkpoint, when the machine is back" in (
        err.decode()
    )
    assert left_on(mended, run) == {}


def test_no_spare_is_left(ssh: Any, mended: Network) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--hosts", "gpu[01-03]", "--spares", "1", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    wait_until("the spare to be set up", lambda: events(run, 2, contract.WAITING))
    mended.kill("gpu02")
    wait_until("the spare to take its place", lambda: events(run, 2, contract.RANKS_STARTED))
    mended.kill("gpu03")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "(1 of 3 nodes left, 2 needed)" in err.decode()
    assert left_on(mended, run) == {}
