"""Processes that are killed in the middle of saving, and disks that fill up: what was durable stays."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from allranks.record.checkpoints import entries, problems, unfinished
from waiting import PATIENCE

KILLED = """\
import os, signal, sys
import torch
from torch import nn
import allranks

FOLDER = os.path.abspath("checkpoints")
FILES = ("checkpoint.json", "config.json", "objects.pt", "rank-0.data", "rank-0.json")
WATCHED = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")
torch.set_num_threads(1)
left = None

def count(event, args):
    # Each time that a file of ours is about to be touched is a moment to die.
    global left
    if left is not None and event in WATCHED and (FOLDER in str(args[0]) or args[0] in FILES):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def live(moment, durable):
    global left
    sys.addaudithook(count)
    with allranks.init() as ctx:
        model = nn.Linear(300, 300)
        checkpoints = ctx.checkpoints(FOLDER, keep=2, model=model)
        step = checkpoints.resumed.step if checkpoints.resumed else 0
        newest = int.from_bytes(os.pread(durable, 8, 0), "little")
        assert step >= newest, f"step {step} after {newest} was durable"
        assert step == 0 or bool((model.weight == step).all()), "another step's weights"
        for number in range(3):
            ctx.progress.step = step = step + 1
            with torch.no_grad():
                model.weight.fill_(step)
            if number == 2:
                left = moment
            checkpoints.save()
            assert checkpoints.wait()
            os.pwrite(durable, step.to_bytes(8, "little"), 0)
        left = None

durable = os.open("durable", os.O_RDWR | os.O_CREAT)
for moment in range(1, 200):
    child = os.fork()
    if child == 0:
        try:
            live(moment, durable)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        print("moments", moment - 1)
        break
    assert code == -signal.SIGKILL, code
"""


def test_killed_at_any_moment_of_a_save_the_newest_whole_one_loads(tmp_path, allranks_env):
    """It takes more than 10 s: a process is forked, saves and dies for each file that a save touches."""
    (tmp_path / "train.py").write_text(KILLED)
    command, patience = [sys.executable, "train.py"], 2 * PATIENCE  # Of some thirty processes, one after the other.
    done = subprocess.run(command, cwd=tmp_path, env=allranks_env, capture_output=True, text=True, timeout=patience)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split("moments")[1]) > 20
    assert "corrupt" not in done.stderr
    folder = tmp_path / "checkpoints"
    assert not unfinished(folder)
    found = entries(folder)
    assert len(found) == 2
    assert not [problem for entry in found for problem in problems(entry.path)]


FULL = """\
import os, signal, sys
import torch
from torch import nn
import allranks

with allranks.init() as ctx:
    model = nn.Linear(512, 512)
    checkpoints = ctx.checkpoints(sys.argv[1] + "/checkpoints", keep=9, every=1, model=model)
    for number in range(20):
        stopping = checkpoints.step()
        if stopping:
            break
        checkpoints.wait()
        if checkpoints.last_error and number == 12:
            print("failed", checkpoints.last.name, flush=True)
            if sys.argv[2] == "free":
                os.unlink(sys.argv[1] + "/filler")
            else:
                os.kill(os.getpid(), signal.SIGTERM)
    print("last", checkpoints.last.name, checkpoints.last_error is None)
"""


@pytest.mark.parametrize(("then", "code"), [("free", 0), ("stop", 75)])
def test_a_full_disk_costs_the_save_and_not_the_training(tmp_path, small_disk, allranks_env, then, code):
    """It takes more than 10 s on a slow machine: an interpreter of its own imports torch."""
    (tmp_path / "train.py").write_text(FULL)
    (small_disk / "filler").write_bytes(bytes(2 << 20))
    done = subprocess.run(
        [sys.executable, "train.py", str(small_disk), then],
        cwd=tmp_path,
        env=allranks_env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == code, done.stderr
    failed, last = (line.split() for line in done.stdout.splitlines())
    folder = small_disk / "checkpoints"
    assert failed[1] == "step-000000003"
    assert "error: the checkpoint of step 4 could not be saved" in done.stderr
    assert f"why: rank 0 on {socket.gethostname()}: No space left on device" in done.stderr
    found = entries(folder)
    assert not [problem for entry in found for problem in problems(entry.path)]
    assert not unfinished(folder)
    assert (folder / "latest").resolve() == found[0].path
    if then == "free":
        assert int(last[1].removeprefix("step-")) > 12
    else:
        assert last == ["last", "step-000000003", "False"]
        assert "got SIGTERM; nothing was saved" in done.stderr


KILLED_WHEN_FULL = """\
import os, signal, sys
import torch
from torch import nn
import allranks

def kill(event, args):
    # What removes a save that the full disk has ended: everything that it wrote is still there.
    if event == "shutil.rmtree" and ".tmp-" in str(args[0]) and ".step-000000000" not in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

with allranks.init() as ctx:
    model = nn.Linear(512, 512)
    checkpoints = ctx.checkpoints(sys.argv[1], every=1, background=False, model=model)
    print("resumed", checkpoints.resumed and checkpoints.resumed.step, *sorted(os.listdir(sys.argv[1])), flush=True)
    if not checkpoints.resumed:
        sys.addaudithook(kill)
        checkpoints.step()
        open(os.path.dirname(sys.argv[1]) + "/filler", "wb").write(bytes(4 << 20))
        checkpoints.step()
"""


def test_resuming_removes_what_a_killed_save_has_left_on_a_full_disk(small_disk, allranks_env, run_python):
    """It takes more than 10 s on a slow machine: two trainings save to a disk that is full."""
    folder = small_disk / "checkpoints"
    done = run_python(KILLED_WHEN_FULL, folder, env={**allranks_env, "OMP_NUM_THREADS": "1"})
    assert (done.rc, done.stdout) == (-signal.SIGKILL, "resumed None\n"), done.stderr
    assert [step for _, step, _, _ in unfinished(folder)] == [2]
    with pytest.raises(OSError, match="No space left on device"):
        (small_disk / "byte").write_bytes(b"1")
    done = run_python(KILLED_WHEN_FULL, folder, env={**allranks_env, "OMP_NUM_THREADS": "1"})
    assert (done.rc, done.stdout) == (0, "resumed 1 latest step-000000001\n"), done.stderr


def test_a_disk_that_is_full_from_the_start_is_refused_and_nothing_is_left(small_disk, allranks_env, run_python):
    with pytest.raises(OSError, match="No space left on device"), (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(8 << 20))
    done = run_python(KILLED_WHEN_FULL, small_disk / "checkpoints", env={**allranks_env, "OMP_NUM_THREADS": "1"})
    assert done.rc == 1
    assert "RankError: checkpoints cannot be written to" in done.stderr
    assert "  why: No space left on device\n" in done.stderr
    assert list((small_disk / "checkpoints").iterdir()) == []


def test_a_signal_of_the_scheduler_ends_in_a_whole_checkpoint(tmp_path, allranks_env):
    script = FULL.replace("every=1", "every=None").replace("if checkpoints.last_error and", "if")
    (tmp_path / "train.py").write_text(script.replace('print("failed", checkpoints.last.name, flush=True)', "pass"))
    done = subprocess.run(
        [sys.executable, "train.py", str(tmp_path), "stop"],
        cwd=tmp_path,
        env=allranks_env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 75, done.stderr
    assert done.stdout.split() == ["last", "step-000000014", "True"]
    assert f"got {signal.SIGTERM.name}; saved" in done.stderr
