"""Torch's own launchers on machines over SSH: as a run of ours, and as lines that a person pastes on each."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import wait_until
from nodes import Network
from ranks_told import PLACES, UP, WHO, who
from ssh_runs import left_on

from waiting import PATIENCE

MACHINES = ("--nodes", "gpu01,gpu02", "--nproc-per-node", "2")
LAUNCHERS = {
    "legacy": "{launcher: legacy}",
    "legacy with --use-env": "{launcher: legacy, launcher_args: [--use-env]}",
    "torchrun": "{agent: false}",
}
#: What each rank is given beside the script's own arguments.
#: Ranks that share a file: a line must come in one piece.
IN_ONE_PIECE = """\
import os
def print(*words, flush=True):
    os.write(1, (" ".join(words) + "\\n").encode())
"""
TOLD = 'print("argv", json.dumps([os.environ["RANK"], *sys.argv[1:]]), flush=True)\n'


def _wait_until_up(ssh: Any) -> Path:
    logs = ("node-000/node.out", "node-001/node.out")

    def are_up() -> bool:
        return bool(ssh.runs()) and all(_lines(ssh.run() / "attempts/000" / log) == ["up", "up"] for log in logs)

    wait_until("all ranks to be up", are_up)
    run: Path = ssh.run()
    wait_until("the command to know all nodes", lambda: ssh.record(run)["handle"]["extra"].get("nodes"))
    return run


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("launch", LAUNCHERS.values(), ids=LAUNCHERS)
def test_all_meet(ssh: Any, network: Network, launch: str) -> None:
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch on each machine."""
    ssh.script(IN_ONE_PIECE + PLACES + TOLD)
    ssh.job(f"script: train.py\nargs: [--lr, 'a b']\nlaunch: {launch}\n")
    done = ssh("run", "job.yaml", *MACHINES)
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == [[rank, rank % 2, 4, 2, f"gpu{rank // 2 + 1:02}", 4] for rank in range(4)]
    argv = dict(re.findall(r'argv \["(\d)", (.*)\]$', done.stdout, re.MULTILINE))
    local = {rank: f'"--local-rank={rank % 2}", ' if launch == LAUNCHERS["legacy"] else "" for rank in range(4)}
    assert argv == {str(rank): f'{local[rank]}"--lr", "a b"' for rank in range(4)}
    assert {*re.findall(r"^\[(.*?)\] who", done.stdout, re.MULTILINE)} == {"node 0", "node 1"}
    record = ssh.record()
    assert (record["world_size"], record["nnodes"], record["status"]["state"]) == (4, 2, "SUCCEEDED")
    said = (ssh.run() / "attempts/000/node-001/agent.log").read_text()
    assert re.search(r"^GLOO_SOCKET_IFNAME=\w+: it carries the route to gpu01$", said, re.MULTILINE)
    assert left_on(network, ssh.run()) == {}


@pytest.mark.parametrize("launch", ["--no-agent", "--launcher=legacy"])
def test_a_rank_that_fails_ends_the_other_machine(ssh: Any, network: Network, launch: str) -> None:
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch on each machine."""
    ssh.script(f"import os\nif os.environ['RANK'] == '3':\n    raise ValueError('no data')\n{UP}")
    done = ssh("run", "train.py", launch, *MACHINES)
    name, module = ssh.run().name, "launch" if "legacy" in launch else "run"
    assert done.rc == 1
    assert done.stderr.splitlines()[-4:] == [
        f"error: {name} FAILED: torch.distributed.{module} exited with code 1 on gpu02",
        "  why: ValueError: no data (train.py:3)",
        f"  fix: correct train.py:3, then: allranks resume {name} (no checkpoint: from the beginning, unless the "
        "script loads its own)",
        f"  see: runs/{name}/attempts/000/node-001/node.err",
    ]
    events = (ssh.run() / "attempts/000/node-000/agent.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in events][-2:] == ["stop-requested", "ended"]
    assert left_on(network, ssh.run()) == {}


def test_ctrl_c_ends_both_machines(ssh: Any, network: Network) -> None:
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch on each machine."""
    ssh.script(UP)
    process = ssh.popen("run", "train.py", "--no-agent", *MACHINES)
    run = _wait_until_up(ssh)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err.decode()
    assert f"allranks: {run.name} was cancelled" in err.decode()
    assert left_on(network, run) == {}


def test_a_run_that_was_left_alone_is_cancelled(ssh: Any, network: Network) -> None:
    ssh.script(UP)
    assert ssh("run", "train.py", "--launcher", "legacy", "--detach", *MACHINES).rc == 0
    run = _wait_until_up(ssh)
    assert re.search(r"^state +RUNNING\b", ssh("status").stdout, re.MULTILINE)
    assert sorted(left_on(network, run)) == ["gpu01", "gpu02"]
    assert (ssh("cancel").rc, left_on(network, run)) == (0, {})
    assert re.search(r"^state +CANCELLED\b", ssh("status").stdout, re.MULTILINE)


@pytest.mark.parametrize("launch", ["--agent", "--no-agent", "--launcher=legacy"])
def test_lines_that_are_pasted_on_each_machine(ssh: Any, network: Network, launch: str) -> None:
    """It takes more than 10 s: ranks import torch on each machine, and with torch's own launcher each for itself."""
    ssh.script(IN_ONE_PIECE + WHO)
    told = ssh("plan", "train.py", "--per-node", "--json", launch, *MACHINES)
    assert told.rc == 0, told.stderr
    env = {**ssh.env, "PATH": f"{Path(sys.executable).parent}:{ssh.env['PATH']}", "GLOO_SOCKET_IFNAME": "eth0"}
    pasted = [
        network.nodes[one["host"]].popen(
            ["bash", "-c", one["line"]], ssh.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for one in json.loads(told.stdout)
    ]
    said = [process.communicate(timeout=PATIENCE) for process in pasted]
    assert [process.returncode for process in pasted] == [0, 0], said
    assert who("".join(out for out, _ in said)) == [
        [rank, rank % 2, 4, 2, f"gpu{rank // 2 + 1:02}", 4] for rank in range(4)
    ]
