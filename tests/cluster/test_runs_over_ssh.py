"""``allranks run`` over SSH: real sshds on nodes with networks of their own, which share the run's directory."""

from __future__ import annotations

import json
import re
import signal
from typing import Any

import pytest
from cluster_tools import wait_until
from nodes import Network
from ranks_told import PLACES, UP, ranks_saying, who
from ssh_nodes import SshNodes
from ssh_runs import left_on, wait_for_ranks

from allranks.record.events import read_events
from terminals import Terminal
from waiting import PATIENCE

OPTIONS = ("--epochs", "2", "--quiet")


def test_ranks_of_machines_that_are_named_in_the_command(ssh: Any, network: Network) -> None:
    """One of them by a name that only the user's configuration of ssh knows."""
    ssh.script(PLACES)
    done = ssh("run", "train.py", "--nodes", "alias01,gpu[02-04]", "--nproc-per-node", "2")
    assert done.rc == 0, done.stderr
    nodes, world = 4, 8
    assert who(done.stdout) == [[rank, rank % 2, world, 2, f"gpu{rank // 2 + 1:02}", world] for rank in range(world)]
    first, *_, last = done.stderr.splitlines()
    name = ssh.run().name
    why = "the machines are taken to be like this one: no GPU on this machine"
    assert first == f"allranks: {name}: {world} ranks on {nodes} nodes of ssh, backend gloo ({why})"
    assert re.fullmatch(rf"allranks: {name} succeeded in .* s", last)
    record = ssh.record()
    assert (record["kind"], record["world_size"], record["nnodes"]) == ("ssh", world, nodes)
    assert left_on(network, ssh.run()) == {}


def test_a_terminal_shows_what_is_done_with_the_machines(ssh: Any, terminals: list[Terminal]) -> None:
    ssh.script("print('here')\n")
    ssh.env["TERM"] = "xterm"
    terminal = Terminal(ssh, "run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    terminals.append(terminal)
    for shown in ("checking 2 nodes of ssh", "starting on 2 nodes of ssh", "allranks: .* backend gloo .*\r\n"):
        terminal.read_until(rf"\r\x1b\[K{shown}")
    assert terminal.wait() == 0
    shown = re.sub(r"\x1b\[[0-9;]*[mAJK]", "", terminal.shown.replace("\r", "\n"))
    assert ranks_saying(shown, "here") == [0, 1]


def test_a_cluster_with_a_file_of_hosts(ssh: Any) -> None:
    """Its first machine alone notifies of the end, and has the URL for it, which is in no file."""
    ssh.script("racks: {kind: ssh, resources: {hostfile: hosts.txt}, launch: {backend: gloo}}\n", "clusters.yaml")
    ssh.script("# two machines\ngpu03 slots=1\nroot@gpu01:22 slots=3\n", "hosts.txt")
    ssh.job("script: train.py\ncluster: racks\nnotify: {on: [end], command: hostname >>told; exit 3}\n")
    ssh.script(PLACES)
    done = ssh("run", "job.yaml", ALLRANKS_NOTIFY_WEBHOOK="http://127.0.0.1:9/tell-nobody")
    assert done.rc == 0, done.stderr
    assert f"allranks: {ssh.run().name}: 4 ranks on 2 nodes of racks, backend gloo " in done.stderr
    places = [(0, 0, 1, "gpu03"), *((1 + local, local, 3, "gpu01") for local in range(3))]
    assert who(done.stdout) == [[rank, local, 4, count, name, 4] for rank, local, count, name in places]
    events = ssh.run() / "attempts/000/node-000/agent.jsonl"

    def problems() -> list[str] | None:
        found = [event.fields["problem"] for event in read_events(events) if event.kind == "notify-failed"]
        return found if len(found) == 2 else None

    command = "the command hostname >>told; exit 3 exited with code 3"
    refused = "the webhook at 127.0.0.1 cannot be reached: Connection refused"
    assert wait_until("the notifications", problems) == [command, refused]
    assert (ssh.folder / "told").read_text() == "gpu03\n"
    assert not [path for path in ssh.run().rglob("*") if path.is_file() and b"tell-nobody" in path.read_bytes()]


def test_a_launcher_that_is_killed_ends_nothing(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = ssh("status", run.name).stdout
    assert re.search(r"^state +RUNNING\b", told, re.MULTILINE)
    assert re.search(r"^ranks +2 on 2 nodes$", told, re.MULTILINE)
    assert sorted(left_on(network, run)) == ["gpu01", "gpu02"]
    done = ssh("cancel")
    assert (done.rc, left_on(network, run)) == (0, {})
    assert re.search(r"^state +CANCELLED\b", ssh("status", run.name).stdout, re.MULTILINE)


def test_a_launcher_that_is_killed_while_it_starts_the_agents(ssh: Any, network: Network) -> None:
    """It has not written down which processes they are.

    It takes more than 10 s on a slow machine: two nodes are reached four times.
    """
    ssh.script(UP)
    ssh.job(
        "script: train.py\nenvironment: {node_setup: [': >here-$HOSTNAME', '[ $HOSTNAME = gpu01 ] || sleep 600']}\n"
    )
    process = ssh.popen("run", "job.yaml", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    wait_until("both to be set up", lambda: len([*ssh.folder.glob("here-gpu*")]) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = ssh.run()
    assert ssh.record(run)["handle"]["extra"] == {}
    assert re.search(r"^state +PENDING\b", ssh("status", run.name).stdout, re.MULTILINE)
    assert sorted(left_on(network, run)) == ["gpu01", "gpu02"]
    done = ssh("cancel")
    assert (done.rc, left_on(network, run)) == (0, {}), done.stderr


def test_a_run_that_is_cancelled_while_it_starts_the_agents(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    ssh.job("script: train.py\nenvironment: {node_setup: [': >here-$HOSTNAME', sleep 600]}\n")
    process = ssh.popen("run", "job.yaml", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    wait_until("both to be set up", lambda: len([*ssh.folder.glob("here-gpu*")]) == 2)
    name = ssh.run().name
    done = ssh("cancel")
    assert (done.rc, done.stderr) == (0, f"{name} cancelled\n")
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, left_on(network, ssh.run())) == (143, {})
    assert f"error: {name} was cancelled before it had started\n" in err.decode()
    assert ssh.record()["status"]["state"] == "CANCELLED"


def test_a_terminal_that_is_closed_ends_nothing(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 129
    assert err.decode().endswith(f"allranks: SIGHUP: the run continues\nnext: allranks logs -f {run.name}\n")
    assert sorted(left_on(network, run)) == ["gpu01", "gpu02"]
    follower = ssh.popen("logs", "-f")
    assert ssh("cancel").rc == 0
    assert follower.wait(PATIENCE) == 0
    assert left_on(network, run) == {}


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ()), (signal.SIGINT, 130, ("--detach",))],
)
def test_a_signal_while_the_machines_are_set_up(
    ssh: Any, network: Network, number: signal.Signals, code: int, options: tuple[str, ...]
) -> None:
    ssh.script(UP)
    ssh.job(
        "script: train.py\nenvironment: {node_setup: [': >here-$HOSTNAME', '[ $HOSTNAME = gpu01 ] || sleep 1000']}\n"
    )
    process = ssh.popen("run", "job.yaml", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1", *options)
    wait_until("both to be set up", lambda: len([*ssh.folder.glob("here-gpu*")]) == 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    run = ssh.run()
    assert process.returncode == code, err.decode()
    assert err.decode() == f"error: {run.name} was cancelled before it had started\n"
    assert left_on(network, run) == {}
    status = ssh.record(run)["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("CANCELLED", "not started", code)


def test_a_machine_that_loses_power_is_named(ssh: Any, mended: Network) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--nodes", "gpu[01-03]", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1", "2:2")
    mended.kill("gpu03")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "node 2 (gpu03) was lost: the connection broke" in err.decode()
    assert left_on(mended, run) == {}


def test_all_machines_lose_power(ssh: Any, mended: Network) -> None:
    """It takes more than 10 s: ssh tries for 10 s to reach the lost machines."""
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    for name in ("gpu01", "gpu02"):
        mended.kill(name)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"error: {run.name} FAILED: the agents are gone without a word" in err.decode()


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(ssh: Any, mended: Network) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    mended.cut("gpu02")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.search(r"node (0 \(gpu01\)|1 \(gpu02\)) was lost: ", err.decode())  # Each side lost the other one.
    wait_until("nothing left on either side", lambda: left_on(mended, run) == {})


REFUSALS = {
    "forget_key": "  why: Host key verification failed.\n  fix: ssh gpu02 once by hand, ",
    "lock_out": "  why: root@gpu02: Permission denied (publickey).\n  fix: ssh-copy-id gpu02, ",
}


@pytest.mark.parametrize("breaks", REFUSALS)
def test_a_machine_that_lets_nobody_in(ssh: Any, ssh_nodes: SshNodes, network: Network, breaks: str) -> None:
    ssh.script(UP)
    getattr(ssh_nodes, breaks)("gpu02")
    try:
        done = ssh("run", "train.py", "--no-check", "--nodes", "gpu01,gpu02,gpu03", "--nproc-per-node", "1")
    finally:
        ssh_nodes.know_all()
        ssh_nodes.restart("gpu02")
    assert done.rc == 1
    assert f"error: cannot reach gpu02\n{REFUSALS[breaks]}" in done.stderr
    assert left_on(network, ssh.run()) == {}
    assert ssh.record()["status"]["state"] == "FAILED"


def test_no_such_machine(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    done = ssh("run", "train.py", "--no-check", "--nodes", "gpu01,gpu99", "--nproc-per-node", "1")
    assert done.rc == 1
    assert "error: cannot reach gpu99\n  why: ssh: Could not resolve hostname gpu99: " in done.stderr
    assert left_on(network, ssh.run()) == {}


def test_a_machine_without_the_folder(ssh: Any, mended: Network) -> None:
    ssh.script(UP)
    mended.nodes["gpu02"].run(["mount", "-t", "tmpfs", "tmpfs", str(ssh.folder)])
    done = ssh("run", "train.py", "--no-check", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    mended.nodes["gpu02"].run(["umount", str(ssh.folder)])
    assert done.rc == 1
    assert "error: gpu02 does not see the run's directory\n" in done.stderr
    assert left_on(mended, ssh.run()) == {}


def test_a_machine_on_which_the_setup_fails(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    ssh.job("script: train.py\nenvironment: {node_setup: [echo fine, '[ $HOSTNAME = gpu01 ] || exit 4']}\n")
    done = ssh("run", "job.yaml", "--hosts", "gpu01,gpu02", "--nproc-per-node", "1")
    assert (done.rc, json.loads(ssh("status", "--json").stdout)["status"]["exit_code"]) == (4, 4)
    assert "error: on gpu02: line 2 of environment.node_setup failed: exit 4\n" in done.stderr
    assert left_on(network, ssh.run()) == {}


def test_what_is_set_up_once_is_there_on_all(ssh: Any, network: Network) -> None:
    ssh.script("print(open('made').read().strip())\n")
    ssh.job(
        "script: train.py\nenvironment: {setup: ['[ -d . ] || exit 4', 'echo talks', 'echo by $HOSTNAME >>made']}\n"
    )
    done = ssh("run", "job.yaml", "--hosts", "gpu02,gpu03", "--nproc-per-node", "1")
    assert done.rc == 0, done.stderr
    assert ranks_saying(done.stdout, "by gpu02") == ranks_saying(done.stdout, ".*") == [0, 1]
    assert (ssh.run() / "setup.log").read_text() == "talks\n"


def test_what_is_set_up_once_fails(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    ssh.job("script: train.py\nenvironment: {setup: [cp /nowhere/data .]}\n")
    done = ssh("run", "job.yaml", "--hosts", "gpu02,gpu03", "--nproc-per-node", "1")
    assert done.rc == 1
    what, why, see = done.stderr.splitlines()[-3:]
    assert what == "error: on gpu02: line 1 of environment.setup failed: cp /nowhere/data ."
    assert why == "  why: cp: cannot stat '/nowhere/data': No such file or directory"
    assert see == f"  see: {ssh.run()}/setup.log"
    assert left_on(network, ssh.run()) == {}


def test_what_is_set_up_once_is_cancelled(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    ssh.job("script: train.py\nenvironment: {setup: [touch started, sleep 1000]}\n")
    process = ssh.popen("run", "job.yaml", "--hosts", "gpu01,gpu02", "--nproc-per-node", "1")
    wait_until("the set-up", (ssh.folder / "started").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert [node.run("pgrep -f '[s]leep 1000' || true") for node in network.nodes.values()] == ["", "", "", ""]


def test_nobody_waits_for_a_set_up_when_another_has_failed(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    ssh.job(
        "script: train.py\nenvironment: {node_setup: ['[ $HOSTNAME = gpu03 ] || sleep 1000', cp /nowhere/data .]}\n"
    )
    done = ssh("run", "job.yaml", "--hosts", "gpu[01-03]", "--nproc-per-node", "1")
    assert done.rc == 1
    assert "error: on gpu03: line 2 of environment.node_setup failed: cp /nowhere/data .\n" in done.stderr
    assert left_on(network, ssh.run()) == {}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_what_is_attached_ends_with_its_command(ssh: Any, network: Network, number: signal.Signals) -> None:
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--attach", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    run = wait_for_ranks(ssh, "0:0", "1:1")
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == (-9 if number is signal.SIGKILL else 129)
    wait_until("the end on both nodes", lambda: left_on(network, run) == {})
    told = ssh("status", run.name).stdout
    assert re.search(r"^state +CANCELLED\b", told, re.MULTILINE), told


def test_what_is_attached_ends_as_all_else(ssh: Any, network: Network) -> None:
    ssh.script(PLACES)
    done = ssh("run", "train.py", "--attach", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1")
    assert (done.rc, len(who(done.stdout))) == (0, 2), done.stderr
    # Each sees the end of its connection, which is not waited for.
    wait_until("its end", lambda: not any(node.run("pgrep -f '[e]nd.sh' || true") for node in network.nodes.values()))


def test_attached_and_detached(ssh: Any) -> None:
    ssh.script(UP)
    done = ssh("run", "train.py", "--attach", "--detach", "--nodes", "gpu01")
    assert (done.rc, ssh.runs()) == (2, [])
    assert done.stderr.startswith("error: --detach lets the run continue, and --attach ends it with this command\n")
