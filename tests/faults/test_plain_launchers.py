"""Ranks that torch's own launcher starts: their output, their ends, and that none is left, as with an agent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from allranks.system.processes import marked
from waiting import PATIENCE, wait_for

TELL = """\
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ALLRANKS_RUN_ID", "ALLRANKS_BACKEND", "OMP_NUM_THREADS")
os.write(1, f"{json.dumps([*map(os.environ.get, names), int(total), os.getcwd(), *sys.argv[1:]])}\\n".encode())
dist.destroy_process_group()
"""
UP = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(300)\n"
#: How long torch's own launcher waits for ranks that do not leave, before it kills them itself.
TORCHRUN_PATIENCE = 30.0
STUBBORN = f"import signal\nfor number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n{UP}"
LAUNCHES = {
    "legacy": "{launcher: legacy, nproc_per_node: 2}",
    "--use-env": "{launcher: legacy, launcher_args: [--use-env], nproc_per_node: 2}",
    "torchrun": "{agent: false, nproc_per_node: 2}",
}
RANKS = ("--nproc-per-node", "2")


def _start(allranks: Any, text: str, *flags: str) -> Any:
    allranks.script(text)
    process = allranks.popen("run", "train.py", *RANKS, *flags)
    wait_for("both ranks to be up", lambda: _said(allranks) == "up\nup\n")
    return process


def _said(allranks: Any, stream: str = "out") -> str:
    logs = [run / f"attempts/000/node-000/node.{stream}" for run in allranks.runs()]
    return "".join(log.read_text() for log in logs if log.exists())


def _launcher_of(run: Path) -> int:
    (found,) = [pid for pid in marked("ALLRANKS_RUN_DIR", str(run)) if b"torch.distributed." in _command(pid)]
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # What the script of a node starts all the time may have ended.
        return b""


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_the_ranks_meet_in_a_folder_with_any_name(allranks, weird_tmp_path: Path, watch, launch: str):
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch, and so does each rank."""
    allranks.folder = weird_tmp_path
    allranks.script(TELL)
    allranks.job(f'script: train.py\nargs: [--lr, "it\'s $HOME"]\nlaunch: {launch}\n')
    done = allranks("run", "job.yaml", OMP_NUM_THREADS="3")
    assert done.rc == 0, done.stderr
    name, folder = allranks.run().name, str(weird_tmp_path)
    given = {rank: [f"--local-rank={rank}"] if launch == LAUNCHES["legacy"] else [] for rank in (0, 1)}
    lines = re.findall(r"^\[node 0\] (\[.*\])$", done.stdout, re.MULTILINE)
    assert sorted(map(json.loads, lines)) == [
        [str(rank), str(rank), "2", name, "gloo", "3", 2, folder, *given[rank], "--lr", "it's $HOME"] for rank in (0, 1)
    ]
    assert [event["kind"] for event in watch.events()] == ["agent-started", "ranks-started", "ended"]
    (started,) = watch.events("ranks-started")
    assert (started["world_size"], started["nodes"], started["restart"]) == (2, 1, 0)
    assert watch.status()["state"] == "SUCCEEDED"
    assert allranks("logs").stdout == done.stdout


@pytest.mark.parametrize("flag", ["--launcher=legacy", "--no-agent"])
def test_a_rank_that_fails(allranks, watch, flag: str):
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch."""
    allranks.script(f"import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no data')\n{UP}")
    done = allranks("run", "train.py", *RANKS, flag)
    module, name = "launch" if "legacy" in flag else "run", allranks.run().name
    assert done.rc == 1
    assert done.stderr.splitlines()[-4:] == [
        f"error: {name} FAILED: torch.distributed.{module} exited with code 1 on {os.uname().nodename}",
        "  why: ValueError: no data (train.py:3)",
        f"  fix: correct train.py:3, then: allranks resume {name} (no checkpoint: from the beginning, unless the "
        "script loads its own)",
        f"  see: runs/{name}/attempts/000/node-000/node.err",
    ]
    watch.nothing_left()
    refused = allranks("logs", "--rank", "1")
    assert (refused.rc, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: --rank: the ranks of this run have no logs of their own\n")


def test_a_rank_that_fails_without_a_word_is_told_by_torchrun(allranks):
    """It takes more than 10 s on a slow machine: torchrun and its two ranks import torch."""
    allranks.script(f"import os\nif os.environ['RANK'] == '1':\n    os._exit(7)\n{UP}")
    done = allranks("run", "train.py", *RANKS, "--no-agent")
    assert done.rc == 1
    assert done.stderr.splitlines()[-2] == "  why: rank 1 exited with code 7"


def test_restarts_of_torchrun_itself(allranks):
    allranks.script("import os\nos._exit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '1')\n")
    assert allranks("run", "train.py", "--no-agent", "--max-restarts", "1").rc == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_command_ends_the_run(allranks, watch, finish, name: str):
    """It takes more than 10 s on a slow machine: torch's own launcher and its ranks import torch."""
    number = getattr(signal, name)
    process = _start(allranks, UP, "--launcher=legacy")
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number, err
    watch.nothing_left()
    status = watch.status()
    assert (status["state"], status["reason"], status["exit_code"]) == ("CANCELLED", f"got {name}", 128 + number)
    (asked,) = watch.events("stop-requested")
    assert (asked["signal"], asked["by"]) == (name, f"got {name}")


def test_ranks_that_ignore_sigterm_are_killed(allranks, watch, finish):
    process = _start(allranks, STUBBORN, "--no-agent", "--stop-timeout", "1")
    asked = time.time()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert 0.9 < watch.event("ended")["time"] - asked < TORCHRUN_PATIENCE
    watch.nothing_left()


def test_the_second_ctrl_c_kills(allranks, watch, finish):
    process = _start(allranks, STUBBORN, "--no-agent", "--stop-timeout", "600")
    process.send_signal(signal.SIGINT)
    asked = watch.event("stop-requested")
    time.sleep(0.4)  # A second one at once would count as the same.
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert watch.event("ended")["time"] - asked["time"] < TORCHRUN_PATIENCE
    watch.nothing_left()


def test_a_killed_command_ends_the_run(allranks, watch):
    process = _start(allranks, UP, "--no-agent")
    process.kill()
    process.wait()
    assert watch.event("ended")["reason"] == "the launcher is gone"
    watch.nothing_left()


def test_a_killed_launcher_of_torch_leaves_no_rank(allranks, watch, finish):
    process = _start(allranks, UP, "--launcher=legacy")
    os.kill(_launcher_of(allranks.run()), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 137
    assert "FAILED: torch.distributed.launch was ended by SIGKILL on " in err
    watch.nothing_left()


def test_cancel_and_resume(allranks, watch):
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch in both attempts."""
    allranks.script(f"import os\nif os.path.exists('go'):\n    raise SystemExit\n{UP}")
    assert allranks("run", "train.py", *RANKS, "--no-agent", "--detach").rc == 0
    wait_for("both ranks to be up", lambda: _said(allranks) == "up\nup\n")
    beat = watch.node / "heartbeat"
    (started,) = watch.events("agent-started")
    assert started["time"] <= float(beat.read_text()) <= time.time()
    assert allranks("cancel").rc == 0
    assert marked("ALLRANKS_RUN_DIR", str(allranks.run())) == []
    assert watch.status()["state"] == "CANCELLED"
    (allranks.folder / "go").touch()
    done = allranks("resume")
    assert done.rc == 0, done.stderr
    assert (allranks.run() / "attempts/001/node-000/agent.jsonl").exists()


def test_a_port_that_is_taken_is_passed_over(allranks):
    allranks.script("import os\nos.write(1, os.environ['MASTER_PORT'].encode())\n")
    told = json.loads(allranks("plan", "train.py", "--no-agent", "--json").stdout)
    (file,), folder = told["files"], allranks.folder / "elsewhere"
    (port,) = re.findall(r"ALLRANKS_RDZV_PORT=(\d+)\n", file["text"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        text = file["text"].replace(told["run_dir"], str(folder))
        script = allranks.script(text.replace(f"={port}\n", f"={number}\n"), "node.sh")
        subprocess.run(["bash", str(script)], env=allranks.env, check=True, timeout=PATIENCE)
    assert int((folder / "attempts/000/node-000/node.out").read_text()) > number
