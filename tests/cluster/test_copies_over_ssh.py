"""``sync: rsync``: machines that share nothing with this one, each with a home of its own."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import missing_commands, wait_until
from needed import need
from nodes import Network
from ranks_told import PLACES, UP, ranks_saying, who
from ssh_nodes import SshNodes
from ssh_runs import wait_for_ranks

from exact_runs import WHOLE, undisturbed, weights_in
from waiting import PATIENCE

COPIED = ("--sync", "rsync", "--python", sys.executable)
#: So many steps that a training which is slow until it is let go cannot end before it is stopped.
OPTIONS = ("--epochs", "12", "--every", "10", "--quiet")


@pytest.fixture
def apart(ssh: Any, mended: Network, ssh_nodes: SshNodes) -> Iterator[Any]:
    """Give the command in a directory that no node sees; each node has an empty home."""
    need("rsync", missing_commands({"rsync": "rsync"}))
    for node in mended.nodes.values():
        for folder in (ssh_nodes.home, ssh.folder):
            node.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)])
    yield ssh
    for node in mended.nodes.values():
        for folder in (ssh_nodes.home, ssh.folder) if node.is_alive else ():
            node.run(["umount", "-l", str(folder)])


def left_on(network: Network, run: Path) -> dict[str, str]:
    """Return what the nodes still have of a run, by node; each has a directory of its own for it."""
    look = f"grep -lsxzE 'ALLRANKS_RUN_DIR=.*/{run.name}' /proc/[0-9]*/environ || true"
    found = {name: node.run(look) for name, node in network.nodes.items() if node.is_alive}
    return {name: text for name, text in found.items() if text}


def test_all_meet_and_their_logs_come_back(apart: Any, network: Network) -> None:
    apart.script(PLACES + "print('for', socket.gethostname(), file=sys.stderr)\n")
    done = apart("run", "train.py", "--nodes", "gpu[01-03]", "--nproc-per-node", "2", *COPIED)
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == [[rank, rank % 2, 6, 2, f"gpu{rank // 2 + 1:02}", 6] for rank in range(6)]
    run = apart.run()
    logs = sorted(log.relative_to(run / "attempts/000") for log in run.glob("attempts/*/node-*/rank-*.err"))
    assert [str(log) for log in logs] == [f"node-00{rank // 2}/rank-{rank}.err" for rank in range(6)]

    assert left_on(network, run) == {}


def test_what_the_ranks_of_a_test_tell_comes_back(apart: Any) -> None:
    """It takes more than 10 s: ranks import torch on each machine, measure, and train."""
    done = apart("test", "--nodes", "gpu[01-02]", "--nproc-per-node", "1", "--backend", "gloo", "--json", *COPIED)
    assert done.rc == 0, done.stderr
    assert [who["host"] for who in json.loads(done.stdout)["ranks"]] == ["gpu01", "gpu02"]


def test_a_training_is_cancelled_and_goes_on_exactly(apart: Any, network: Network, ssh_nodes: SshNodes) -> None:
    """Its directory has a name that a shell would read; rank 0's checkpoints come back to their place in it.

    It takes more than 10 s: three trainings import torch on each node, which has a copy of the files.
    """
    folder = apart.folder / "it's $HOME"
    folder.mkdir()
    shutil.copy(WHOLE, folder / "train.py")
    flags = ("--nodes", "gpu[01-02]", "--nproc-per-node", "1", "--env", "OMP_NUM_THREADS=1", *COPIED)
    script = ("--folder", "checkpoints", "--slow-until", "go", *OPTIONS)
    process = apart.popen("run", "train.py", *flags, "--", *script, cwd=folder)
    wait_until("a checkpoint that has come back", (folder / "checkpoints" / "latest").exists)
    runs = folder / "runs"
    assert apart("cancel", cwd=folder).rc == 0
    assert process.wait(PATIENCE) == 143
    (run,) = [path for path in runs.glob("[!.]*") if not path.is_symlink()]
    assert left_on(network, run) == {}
    (folder / "go").touch()
    done = apart("resume", cwd=folder)
    assert weights_in(done.stdout) == undisturbed(apart, *OPTIONS)
    there = f"{ssh_nodes.home}/allranks/*/project/checkpoints"
    newest = (folder / "checkpoints" / "latest").resolve()
    assert newest.name == network.nodes["gpu01"].run(f"readlink {there}/latest").strip()
    assert apart("checkpoint", "verify", newest).rc == 0
    names = network.nodes["gpu01"].run(f"ls {there}").split()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names
    assert {json.loads(line)["attempt"] for line in (run / "checkpoints.jsonl").read_text().splitlines()} == {0, 1}


def test_torchs_own_launcher_finds_the_copy(apart: Any, network: Network) -> None:
    """It takes more than 10 s on a slow machine: torch's own launcher imports torch on each machine."""
    apart.script("import os\nprint('rank', os.environ['RANK'])\n")
    flags = ("--nodes", "gpu01,gpu02", "--nproc-per-node", "1", "--no-agent", *COPIED)
    done = apart("run", "train.py", *flags)
    assert sorted(done.stdout.splitlines()) == ["[node 0] rank 0", "[node 1] rank 1"], done.stderr
    assert left_on(network, apart.run()) == {}


def test_it_goes_on_without_this_machine(apart: Any, network: Network) -> None:
    apart.script(UP)
    process = apart.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1", *COPIED)
    run = wait_for_ranks(apart, "0:0", "1:1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert re.search(r"^state +RUNNING\b", apart("status", run.name).stdout, re.MULTILINE)
    shown = apart("logs").stdout
    assert ranks_saying(shown, "up") == ranks_saying(shown, ".*") == [0, 1]
    follower = apart.popen("logs", "-f")
    assert apart("cancel").rc == 0
    assert follower.wait(PATIENCE) == 0
    assert left_on(network, run) == {}
    assert re.search(r"^state +CANCELLED\b", apart("status", run.name).stdout, re.MULTILINE)


def test_what_is_copied(apart: Any, network: Network, ssh_nodes: SshNodes) -> None:
    apart.script("print(*sorted(str(p) for p in __import__('pathlib').Path().rglob('*') if p.is_file()))\n")
    apart.script("data/\n*.bin\n", ".gitignore")
    (apart.folder / "package" / "data").mkdir(parents=True)
    for name in ("package/module.py", "package/data/large", "weights.bin", "notes.txt", "small.bin"):
        (apart.folder / name).write_text(name)
    apart.job("script: train.py\nsync: {method: rsync, exclude: [notes.txt, '+ small.bin'], folder: ~/here/}\n")
    done = apart("run", "job.yaml", "--nodes", "gpu02", "--python", sys.executable)
    assert done.stdout == "[0] .gitignore job.yaml package/module.py small.bin train.py\n", done.stderr
    assert network.nodes["gpu02"].run(f"ls {ssh_nodes.home}/here").split() == ["project", "runs"]


def test_a_folder_that_is_too_large(apart: Any) -> None:
    apart.script("")
    (apart.folder / "images").mkdir()
    for name, size in (("images/a", 700_000), ("images/b", 600_000), ("model.ckpt", 5_000)):
        (apart.folder / name).write_bytes(bytes(size))
    apart.job("script: train.py\nsync: {method: rsync, max_size: 1MB}\n")
    done = apart("run", "job.yaml", "--nodes", "gpu01")
    assert (done.rc, done.stdout, apart.runs()) == (2, "", [])
    size = sum(path.stat().st_size for path in apart.folder.rglob("*") if path.is_file())
    assert done.stderr.splitlines() == [
        f"error: the working directory is too large to be copied to each machine: 5 files, {size / 1e6:.3g} MB",
        "  why: sync.max_size is 1M; the largest in it: images/ 1.3 MB, model.ckpt 5 KB, job.yaml 54 B",
        "  fix: sync: {method: rsync, exclude: [/images/]}, or a larger sync.max_size",
    ]


def test_a_machine_without_room(apart: Any, network: Network, ssh_nodes: SshNodes) -> None:
    apart.script(UP)
    (apart.folder / "weights").write_bytes(bytes(2 << 20))
    network.nodes["gpu02"].run(f"mount -t tmpfs -o size=1M tmpfs {ssh_nodes.home}")
    done = apart("run", "train.py", "--nodes", "gpu[01-03]", "--nproc-per-node", "1", *COPIED)
    network.nodes["gpu02"].run(f"umount {ssh_nodes.home}")
    assert done.rc == 1
    assert "error: the job cannot be copied to gpu02\n  why: rsync: " in done.stderr
    assert "No space left on device" in done.stderr
    assert left_on(network, apart.run()) == {}


def test_a_machine_that_loses_power(apart: Any, mended: Network) -> None:
    """It takes more than 10 s: rsync and then ssh each try to reach the lost machine for 10 s."""
    apart.script(UP)
    process = apart.popen("run", "train.py", "--nodes", "gpu01,gpu02", "--nproc-per-node", "1", *COPIED)
    run = wait_for_ranks(apart, "0:0", "1:1")
    mended.kill("gpu02")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"error: {run.name} FAILED: node 1 (gpu02) was lost: the connection broke" in err.decode()
    assert f"allranks: {run.name}: what gpu02 wrote last is not here: " in err.decode()
    assert left_on(mended, run) == {}


@pytest.mark.parametrize("code", [255, 12])
def test_a_machine_that_cannot_be_reached(apart: Any, code: int) -> None:
    """Now and then rsync ends before it knows how ssh has ended."""
    apart.script(UP)
    real = shutil.which("rsync")
    hasty = apart.script(f'#!/bin/sh\n{real} "$@"\ncode=$?\n[ $code != 255 ] || code={code}\nexit $code\n', "rsync")
    hasty.chmod(0o755)
    apart.env["PATH"] = f"{apart.folder}:{apart.env['PATH']}"
    done = apart("run", "train.py", "--no-check", "--nodes", "gpu01,gpu99", "--nproc-per-node", "1", *COPIED)
    assert done.rc == 1
    assert "error: cannot reach gpu99\n  why: ssh: Could not resolve hostname gpu99: " in done.stderr


def test_a_machine_that_is_not_needed_cannot_be_reached(apart: Any) -> None:
    apart.script(PLACES)
    flags = ("--hosts", "gpu01,gpu99,gpu03", "--nodes", "2:3", "--nproc-per-node", "1")
    done = apart("run", "train.py", *flags, *COPIED)
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == [[0, 0, 2, 1, "gpu01", 2], [1, 0, 2, 1, "gpu03", 2]]
    assert "cannot reach gpu99: ssh: Could not resolve hostname gpu99" in done.stderr


def test_a_script_that_is_not_in_the_folder(apart: Any) -> None:
    apart.script(UP, "elsewhere.py")
    (apart.folder / "project").mkdir()
    done = apart("run", "elsewhere.py", "--workdir", "project", "--nodes", "gpu01", *COPIED)
    assert done.rc == 2
    assert done.stderr.splitlines()[:2] == [
        f"error: {apart.folder}/elsewhere.py is outside of the working directory, and only that is copied to the "
        "machines",
        f"  why: the working directory is {apart.folder}/project",
    ]
