"""Ports that are taken, directories that cannot be written, disks that are full or fill up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RESTARTED = """\
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)
dist.barrier()  # Else a rank may exit while the other one still connects to it.
print("second generation at", os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""
FILLS_THE_DISK = """\
import os, pathlib, sys
descriptor = os.open(pathlib.Path(os.environ["ALLRANKS_RUN_DIR"], "filler"), os.O_WRONLY | os.O_CREAT)
print("before", flush=True)
for size in (1 << 16, 1 << 12, 1):
    try:
        while True:
            os.write(descriptor, b"x" * size)
    except OSError as error:
        pass
os._exit(7)
"""


def test_port_in_use(allranks, taken_port: int, assert_nothing_left):
    allranks.script("print('ran')")
    result = allranks("run", "train.py", "--master-port", str(taken_port))
    assert (result.rc, result.stdout) == (1, "")
    message = result.message
    assert (f"127.0.0.1:{taken_port}" in message["error"], message["why"]) == (True, "Address already in use")
    assert "--master-port" in message["fix"]
    assert allranks.record()["status"]["state"] == "FAILED"
    assert allranks("status").stdout.splitlines()[2].startswith("state      FAILED")
    assert_nothing_left(allranks.run())


def test_a_file_of_the_user_s_own_that_is_called_latest(allranks):
    allranks.script("print('ran')")
    latest = allranks.folder / "runs/latest"
    latest.parent.mkdir()
    latest.write_text("mine")
    done = allranks("run", "train.py")
    assert (done.rc, done.stdout, latest.read_text()) == (0, "[0] ran\n", "mine")
    assert f"allranks: note: {latest} " in done.stderr
    assert allranks("status").stdout.splitlines()[2].startswith("state      SUCCEEDED")
    latest.unlink()
    latest.symlink_to("../train.py")
    assert allranks("run", "train.py").rc == 0
    assert str(latest.readlink()) == "../train.py"
    latest.unlink()
    assert allranks("run", "train.py").rc == 0
    assert latest.resolve() in allranks.runs()


def test_a_directory_that_was_removed(allranks):
    line = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m allranks run ../train.py"
    done = subprocess.run(
        ["bash", "-c", line], cwd=allranks.folder, env=allranks.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "error: the current directory does not exist any more\n" in done.stderr


@pytest.mark.parametrize("check", ["--check", "--no-check"])
def test_no_bash_on_path(allranks, tmp_path, check: str):
    allranks.script("print('ran')")
    (empty := tmp_path / "empty").mkdir()
    result = allranks("run", "train.py", check, PATH=str(empty))
    assert (result.rc, result.stdout) == (1, "")
    assert (result.message["error"], result.message["why"]) == ("cannot run bash", "No such file or directory")
    assert result.message["fix"] == "install bash, or put the directory that it is in on PATH"
    status = allranks.record()["status"]
    assert (status["state"], status["native"]) == ("FAILED", "not started")
    assert status["reason"] == "cannot run bash: No such file or directory"


def test_restart_with_a_fixed_port(allranks, free_port: int):
    allranks.script(RESTARTED)
    port = str(free_port)
    result = allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", port)
    told = {rank: [f"second generation at {port}"] for rank in (0, 1)}
    assert (result.rc, result.by_rank) == (0, told), result.stderr
    assert allranks.record()["status"]["restarts"] == 1


def test_runs_folder_below_a_file(allranks):
    allranks.script("print('ran')")
    result = allranks("run", "train.py", "--runs-folder", "train.py/runs")
    folder = allranks.folder
    assert (result.rc, result.stdout) == (1, "")
    message = result.message
    assert (f"{folder}/train.py/runs" in message["error"], message["why"]) == (
        True,
        "a file is where a directory must be",
    )
    assert [entry.name for entry in folder.iterdir()] == ["train.py"]


def test_runs_folder_that_may_only_be_read(allranks):
    allranks.script("print('ran')")
    runs = allranks.folder / "runs"
    runs.mkdir()
    lock = ["chattr", "+i", str(runs)] if os.geteuid() == 0 else ["chmod", "500", str(runs)]
    unlock = ["chattr", "-i", str(runs)] if os.geteuid() == 0 else ["chmod", "700", str(runs)]
    if subprocess.run(lock, check=False, capture_output=True).returncode:
        pytest.skip("no directory can be locked for root here: chattr +i is refused")
    try:
        result = allranks("run", "train.py")
    finally:
        subprocess.run(unlock, check=True)
    assert (result.rc, result.stdout) == (1, "")
    assert (str(runs) in result.message["error"], [*result.message]) == (True, ["error", "why", "fix"])
    assert [entry.name for entry in runs.iterdir()] == []


def test_a_refused_job_leaves_no_folder(allranks):
    allranks("run", "missing.py")
    assert [entry.name for entry in allranks.folder.iterdir()] == []


def test_disk_that_is_full(allranks, small_disk, fill):
    allranks.script("print('ran')")
    disk = small_disk("64k")
    fill(disk)
    result = allranks("run", "train.py", "--runs-folder", disk / "runs")
    assert (result.rc, result.stdout) == (1, "")
    message = result.message
    assert (f"{disk}/runs" in message["error"], message["why"]) == (True, "No space left on device")
    assert "fix" in message
    assert [path.name for path in disk.rglob("*") if path.name not in ("filler", "runs")] == []


def test_disk_that_becomes_full_while_the_run_is_prepared(allranks, small_disk):
    allranks.script("print('ran')")
    disk = small_disk("200k")
    result = allranks("run", "train.py", "--runs-folder", disk / "runs")
    assert (result.rc, result.stdout) == (1, "")
    message = result.message
    assert (f"{disk}/runs" in message["error"], message["why"]) == (True, "No space left on device")
    assert [path.name for path in disk.rglob("*") if path.name != "runs"] == []


def test_disk_that_fills_up_while_ranks_run(allranks, small_disk, assert_nothing_left):
    """The script's own exit code comes out, and nobody is told that all went well."""
    allranks.script(FILLS_THE_DISK)
    disk = small_disk("4m")
    result = allranks("run", "train.py", "--runs-folder", disk / "runs")
    assert (result.rc, result.stdout) == (7, "[0] before\n")
    assert "No space left on device" in result.stderr
    (run,) = [path for path in (disk / "runs").iterdir() if path.name != "latest"]
    assert_nothing_left(run)
    (run / "filler").unlink()
    status = allranks("status", "--runs-folder", disk / "runs")
    assert "FAILED" in status.stdout
    assert allranks("logs", "--runs-folder", disk / "runs").stdout == "[0] before\n"
