"""A detached run continues without its terminal and its launcher, and other commands find it again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_ending import FAMILY, SLEEPER

from allranks import contract
from waiting import wait_for

COUNT = """\
import os, time
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(.01)
print("done", os.environ["RANK"], flush=True)
"""


def _told(allranks):
    told = json.loads(allranks("status", "--json").stdout)
    return {**told, **told["status"]}


def _detach(allranks, watch, text, *options):
    allranks.script(text)
    done = allranks("run", "train.py", "--nproc-per-node", "2", "--detach", *options)
    assert (done.rc, done.stdout) == (0, watch.run.name + "\n")
    for rank in (0, 1):
        watch.line(rank, "up")


def test_other_commands_find_a_detached_run(allranks, watch, finish):
    _detach(allranks, watch, COUNT)
    told = _told(allranks)
    assert (told["state"], told["id"]) == ("RUNNING", watch.run.name)
    follower = allranks.popen("logs", "-f")
    (allranks.folder / "go").touch()
    code, out, _ = finish(follower)
    assert code == 0
    # Equal lines are folded if they were written at about the same time.
    folded, apart = ["[0-1] up"], ["[0] up", "[1] up"]
    done = ["[0] done 0", "[1] done 1"]
    assert sorted(out.splitlines()) in (sorted(folded + done), sorted(apart + done))
    assert watch.status()["state"] == "SUCCEEDED"
    watch.nothing_left()


FAILS_ONCE = """\
import os, pathlib, time
print("up", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise KeyError("weights")
"""


def test_logs_of_a_detached_run_show_its_restarts_and_how_it_ended(allranks, watch, finish):
    _detach(allranks, watch, FAILS_ONCE, "--max-restarts", "2")
    follower = allranks.popen("logs", "-f")
    assert b"up\n" in follower.stdout.readline()
    (allranks.folder / "go").touch()
    code, _, err = finish(follower)
    name, lines = watch.run.name, err.splitlines()
    assert (code, lines[-1]) == (0, f"allranks: {name} ended: SUCCEEDED")
    error = lines.index("[1] KeyError: 'weights'")
    restart = f"allranks: {name}: rank 1 failed: KeyError: 'weights' (train.py:6); restarting, 1 of 2"
    assert lines[error + 1 :] == [restart, lines[-1]]
    assert watch.status()["state"] == "SUCCEEDED"


@pytest.mark.parametrize("text", [SLEEPER, FAMILY], ids=["sleeper", "family"])
def test_cancel_leaves_nothing(allranks, watch, text):
    _detach(allranks, watch, text)
    if text is FAMILY:
        for name in ("group-0", "group-1", "session-0", "session-1"):
            watch.pid_file(name)
    done = allranks("cancel")
    assert (done.rc, done.stderr) == (0, f"{watch.run.name} cancelled\n")
    watch.nothing_left()
    status = watch.status()
    assert (status["state"], status["exit_code"], status["reason"]) == ("CANCELLED", 143, "got SIGTERM")


#: Stays when its agent's end is noticed, and leaves when it is cancelled: it hears SIGTERM each time.
LEAVES_AT_THE_SECOND = """\
import os, signal
def hear(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    open(f"heard-{os.environ['RANK']}", "w").close()
signal.signal(signal.SIGTERM, hear)
print("up", flush=True)
while True:
    signal.pause()
"""


def test_cancel_of_a_run_whose_agent_was_killed(allranks, watch):
    _detach(allranks, watch, LEAVES_AT_THE_SECOND, "--stop-timeout", "600")
    os.kill(watch.agent(), signal.SIGKILL)
    for rank in (0, 1):
        wait_for(f"rank {rank} to hear of it", (allranks.folder / f"heard-{rank}").exists)
    told = _told(allranks)
    assert (told["state"], told["native"]) == ("RUNNING", "agent gone")  # Its ranks are still being ended.
    assert allranks("cancel").rc == 0
    watch.nothing_left()
    assert watch.status()["state"] == "FAILED"
    again = allranks("cancel")
    assert (again.rc, again.stderr) == (0, f"{watch.run.name} had ended before: FAILED\n")


def test_cancel_while_the_node_is_being_set_up(allranks, watch):
    allranks.script(SLEEPER)
    setup = "environment:\n  node_setup: |\n    echo $$ > shell\n    sleep 302\n"
    allranks.job(f"script: train.py\nlaunch: {{stop_timeout: 600}}\n{setup}")
    assert allranks("run", "job.yaml", "--detach").rc == 0
    watch.pid_file("shell")
    assert allranks("cancel").rc == 0  # It waits for none of these 600 s.
    watch.nothing_left()
    assert watch.status()["state"] == "CANCELLED"


@pytest.fixture
def terminal(allranks, tmp_path):
    """Give a function that types a command into a terminal, and one that closes that terminal."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    socket = str(tmp_path / "tmux")

    def tmux(*args):
        return subprocess.run(["tmux", "-S", socket, "-f", "/dev/null", *args], env=allranks.env, capture_output=True)

    def run(*args):
        words = [sys.executable, "-m", "allranks", *args]
        done = tmux("new-session", "-d", "-c", str(allranks.folder), "exec " + shlex.join(words) + " 2>terminal.err")
        assert done.returncode == 0, done.stderr
        return lambda: tmux("kill-session")

    yield run
    tmux("kill-server")


def test_a_closed_terminal_ends_an_attached_run(allranks, watch, terminal):
    allranks.script(FAMILY)
    close = terminal("run", "train.py", "--nproc-per-node", "2")
    for rank in (0, 1):
        watch.line(rank, "up")
    close()
    watch.nothing_left()
    assert watch.event("stop-requested")["by"] in ("got SIGHUP", "the launcher is gone")
    assert watch.event("ended")["state"] == "CANCELLED"
    assert watch.status()["state"] == "CANCELLED"


def test_a_detached_run_survives_its_terminal(allranks, watch, terminal):
    allranks.script(COUNT)
    close = terminal("run", "train.py", "--nproc-per-node", "2", "--detach")
    for rank in (0, 1):
        watch.line(rank, "up")
    close()
    (allranks.folder / "go").touch()
    assert watch.event("ended")["state"] == "SUCCEEDED"


def _as_if_on_another_host(watch, beat):
    path = watch.run / "record.json"
    record = json.loads(path.read_text())
    record["handle"]["host"] = "elsewhere"
    path.write_text(json.dumps(record))
    (watch.node / "heartbeat").write_text(f"{beat:017.6f}\n")


def test_from_another_host_the_heartbeat_tells(allranks, watch):
    allranks.env[contract.WAITS] = "1"
    _detach(allranks, watch, SLEEPER)
    agent = watch.agent()
    _as_if_on_another_host(watch, time.time() - 20)
    assert _told(allranks)["state"] == "RUNNING"
    refused = allranks("cancel")
    assert (refused.rc, refused.stderr.splitlines()[0]) == (1, f"error: {watch.run.name} runs on elsewhere")
    os.kill(agent, signal.SIGSTOP)
    try:
        _as_if_on_another_host(watch, time.time() - 40)
        told = _told(allranks)
        assert (told["state"], told["native"]) == ("UNKNOWN", "no heartbeat")
        said = r"it was started on elsewhere, and its agent's last heartbeat is (\d+) s old"
        (age,) = re.fullmatch(said, told["reason"]).groups()
        assert int(age) >= 40
    finally:
        os.kill(agent, signal.SIGCONT)
    os.kill(agent, signal.SIGTERM)
    watch.nothing_left()
