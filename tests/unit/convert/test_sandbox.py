"""The sandbox of ``allranks convert --verify``: what runs in it harms nothing, and ends."""

# ruff: noqa: E501 - scripts as they are written

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from verifying import NAMESPACES, TRAIN, typed

from allranks.convert import sandbox
from allranks.convert.recorder.main import COMMANDS, mpirun
from allranks.errors import LaunchError, UsageError
from allranks.lint.model import MPI

pytestmark = NAMESPACES


def test_without_a_sandbox_nothing_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    unshare = tmp_path / "bin" / "unshare"
    unshare.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (folder / "start.sh").write_text("touch made\ntorchrun --standalone --nproc-per-node=2 train.py\n")
    with pytest.raises(LaunchError, match="runs no script without one") as raised:
        typed("start.sh")
    assert raised.value.why == "unshare: unshare failed: Operation not permitted"
    assert not (folder / "made").exists()


#: Scripts that would do harm. None takes longer than the limits of the sandbox.
HOSTILE = {
    "rm of all": 'rm -rf "$HOME"; rm -rf /etc /home /var 2>/dev/null\n',
    "rm by its path": "/bin/rm -rf {work} {home}\n",
    "an endless loop": "while true; do :; done\n",
    "loops that ignore signals": "trap '' TERM INT HUP\n(while true; do :; done) & (while true; do :; done) & wait\n",
    "a fork bomb": ":(){ :|:& };:\n",
    "a huge file": "head -c 100G /dev/zero > huge\nyes > {home}/yes\n",
    "many files": "mkdir many; for i in $(seq 100000); do : > many/$i; done\n",
    "memory": "x=$(yes)\n",
    "endless output": "yes\n",
    "writing beside it": "echo bad > train.py; echo bad > {home}/train.py; mv hosts.txt x; chmod 0 slots.txt\n",
    "writing by a link": "ln -s {home} link; echo bad > link/train.py; ln -sf /etc/passwd p; echo x >> p\n",
    "a program of the user": "chmod +x evil; ./evil; {work}/evil; exec ./evil\n",
    "an interpreter": 'perl -e \'unlink "train.py"\'; python -c \'open("made", "w")\'; /.allranks/python/bin/python3 -c \'open("{work}/made", "w")\'\n',
    "the loader": "/lib64/ld-linux-x86-64.so.2 {work}/evil\n",
    "mounting": "mount -o remount,rw /; umount -l {work}; /.allranks/python/bin/python3 -c 'import ctypes; print(ctypes.CDLL(None).umount2(b\"{work}\", 2))'\n",
    "killing": "kill -9 -1\n",
    "devices": "echo x > /dev/sda; cat /dev/mem > m; echo b > /proc/sysrq-trigger\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_harms_nothing(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """Some take over 10 s: that is the CPU time of a process in the sandbox, and these use it up."""
    home = folder.parent
    (folder / "evil").write_text(f"#!/usr/bin/python3\nopen({str(folder / 'made')!r}, 'w')\n")
    script = HOSTILE[name].replace("{work}", str(folder)).replace("{home}", str(home))
    (folder / "start.sh").write_text(script + TRAIN)
    before = {path: (path.stat().st_mode, path.is_file() and path.read_bytes()) for path in home.rglob("*")}
    typed("start.sh")
    assert "start.sh: " in capfd.readouterr().err
    assert {path: (path.stat().st_mode, path.is_file() and path.read_bytes()) for path in home.rglob("*")} == before
    assert Path("/etc/passwd").stat().st_size > 0
    assert list((home.parent / "temporary").iterdir()) == []


def test_processes_are_limited_before_they_are_counted() -> None:
    """On a busy machine a fork bomb has thousands of them before anything else gets the CPU."""
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 14):
        pytest.skip("needs Linux 6.14, whose PID namespaces have a limit of their own")
    most = Path("/proc/sys/kernel/pid_max")
    before = most.read_text()
    places = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    said = sandbox.run(
        ["bash", "-c", f"cat {most} >&2"], cwd="/tmp", environ=places, files={}, stubs=[], commands=[], facts={}
    )
    assert (said["stderr"], most.read_text()) == ("1000\n", before)


def test_a_script_reaches_no_network(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached >&3\ncurl http://127.0.0.1:{port}\n"
        (folder / "start.sh").write_text(reach + TRAIN)
        typed("start.sh")
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("data", [b"\x7fELF\x02\x01\0\0" * 100, b"echo 'no end\ntorchrun train.py\n", b"\0" * 10, b""])
def test_what_is_no_script_is_refused_before_it_is_run(folder: Path, data: bytes) -> None:
    (folder / "start.sh").write_bytes(b"touch made\n" + data if data.startswith(b"echo") else data)
    with pytest.raises(UsageError):
        typed("start.sh")
    assert not (folder / "made").exists()


def test_ranks_of_a_launcher_that_is_given_nonsense_are_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text("exit 3\n" + TRAIN)
    assert typed("start.sh") == 1
    said = capfd.readouterr().err
    assert "start.sh: not verified: the script ended before its training\n  DIFFERS: ranks: 0 -> 2\n" in said


def test_the_sandbox_plays_each_launcher_of_mpi() -> None:
    """It imports nothing of allranks, so that it has the names itself."""
    assert {name for name, part in COMMANDS.items() if part is mpirun} == MPI
