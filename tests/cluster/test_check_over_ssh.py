"""``allranks check`` of machines over SSH: what is wrong is put in for real, and found on the right one."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import missing_commands
from findings import bad, found_by
from needed import need
from nodes import Network
from ssh_nodes import SshNodes

FOUR = ("--nodes", "gpu01,gpu02,gpu03,gpu04", "--nproc-per-node", "1", "--backend", "gloo")


def only(host: str, then: str, otherwise: str = ":") -> str:
    """Return a line of a job's set-up that does something on one machine."""
    return f'if [ "$(hostname)" = {host} ]; then {then}; else {otherwise}; fi'


def check(ssh: Any, *args: str, set_up: tuple[str, ...] = (), **environment: Any) -> Any:
    """Check a script on all four machines."""
    ssh.job(json.dumps({"script": "train.py", "environment": {"node_setup": [*set_up], **environment}}))
    return ssh("check", "job.yaml", *FOUR, "--json", *args)


@pytest.mark.smoke
def test_nothing_is_wrong_with_healthy_machines(ssh: Any) -> None:
    ssh.script("import json, torch\n")
    done = check(ssh)
    assert bad(found_by(done)) == {}
    assert done.rc == 0
    told = json.loads(done.stdout)
    assert [node["facts"]["host"]["name"] for node in told["nodes"]] == ["gpu01", "gpu02", "gpu03", "gpu04"]
    assert sorted(path.name for path in ssh.folder.iterdir()) == ["job.yaml", "train.py"]


def test_other_software_on_one_machine(ssh: Any, tmp_path: Path) -> None:
    old = tmp_path / "old" / "torch"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "version.py").write_text("__version__ = '2.4.0+cpu'\ncuda: Optional[str] = None\n")
    module = tmp_path / "here" / "my_layers.py"
    module.parent.mkdir()
    module.touch()
    ssh.script("import torch, my_layers\n")
    here = f"export PYTHONPATH={module.parent}"
    done = check(
        ssh, set_up=(only("gpu02", f"export PYTHONPATH={old.parent}", here), only("gpu03", f"{here}:{old.parent}"))
    )
    found = bad(found_by(done))
    common = json.loads(done.stdout)["nodes"][0]["facts"]["torch"]["version"].partition("+")[0]
    assert found == {
        ("imports", "gpu02"): ("FAIL", "not found: my_layers (train.py:1)"),
        ("versions", "gpu02"): ("FAIL", f"torch 2.4.0, and {common} on the others"),
        ("versions", "gpu03"): ("FAIL", f"torch 2.4.0, and {common} on the others"),
    }
    assert done.rc == 3


def test_a_script_that_one_machine_does_not_see(ssh: Any, network: Network, undo: Callable[..., None]) -> None:
    script = ssh.folder / "inner" / "train.py"
    script.parent.mkdir()
    script.write_text("import torch\n")
    network.nodes["gpu03"].run(f"mount -t tmpfs tmpfs '{script.parent}'")
    undo(network.nodes["gpu03"], f"umount '{script.parent}'")
    found = bad(found_by(ssh("check", "inner/train.py", *FOUR, "--json")))
    assert found == {("script", "gpu03"): ("FAIL", f"there is no {script}")}


def test_machines_that_lack_room(ssh: Any, network: Network, undo: Callable[..., None], tmp_path: Path) -> None:
    ssh.script("import torch\n")
    network.nodes["gpu02"].run("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    undo(network.nodes["gpu02"], "umount /dev/shm")
    full = tmp_path / "full"
    full.mkdir()
    network.nodes["gpu04"].run(f"mount -t tmpfs -o size=16k tmpfs {full} && head -c 16384 /dev/zero >{full}/filled")
    undo(network.nodes["gpu04"], f"umount {full}")
    found = bad(found_by(check(ssh, "--", "--checkpoint-dir", str(full))))
    assert found == {
        ("shm", "gpu02"): ("WARN", "1.05 MB of 1.05 MB free"),
        ("room", "gpu04"): ("WARN", f"{full} (--checkpoint-dir) cannot be written: No space left on device"),
    }


def test_runs_that_one_machine_does_not_see(ssh: Any, network: Network, undo: Callable[..., None]) -> None:
    ssh.script("import torch\n")
    (ssh.folder / "runs").mkdir()
    network.nodes["gpu02"].run(f"mount -t tmpfs -o size=1m tmpfs '{ssh.folder}/runs'")
    undo(network.nodes["gpu02"], f"umount '{ssh.folder}/runs'")
    found = bad(found_by(check(ssh)))
    assert [(key, grade) for key, (grade, _) in found.items()] == [
        (("shared", "gpu02"), "FAIL"),
        (("room", "gpu02"), "WARN"),
    ]
    assert found["shared", "gpu02"][1].startswith(f"No such file or directory: {ssh.folder}/runs/.look-")


def test_what_an_earlier_run_has_left_on_one_machine(ssh: Any, network: Network) -> None:
    ssh.script("import torch\n")
    command = f"ALLRANKS_RUN_DIR='{ssh.folder}/runs/old-1' sleep 300 >/dev/null 2>&1 </dev/null & echo $!"
    pid = network.nodes["gpu03"].run(command).strip()
    try:
        ((key, (grade, what)),) = bad(found_by(check(ssh))).items()
    finally:
        network.nodes["gpu03"].run(f"kill {pid}")
    assert (key, grade) == (("leftovers", "gpu03"), "WARN")
    assert what.startswith(f"1 of {ssh.folder}/runs/old-1: {pid} (sleep 300, ")


@pytest.fixture
def hung(ssh_nodes: SshNodes) -> Iterator[str]:
    """Give the name of a machine that takes connections and does not answer."""
    ssh_nodes.hang("gpu04")
    yield "gpu04"
    ssh_nodes.wake("gpu04")


def test_a_machine_that_hangs(ssh: Any, hung: str) -> None:
    """It takes more than 10 s: ssh tries for 10 s to reach it."""
    ssh.script("import torch\n")
    done = check(ssh)
    ((key, (grade, what)),) = [item for item in bad(found_by(done)).items() if item[0][0] == "nodes"]
    assert (key, grade) == (("nodes", hung), "FAIL")
    assert re.fullmatch("it cannot be reached: Connection .*timed out.*", what)


def test_a_set_up_that_fails_on_one_machine_is_quoted(ssh: Any) -> None:
    """It takes more than 10 s: the first machine waits for 10 s for the one that does not come."""
    ssh.script("import torch\n")
    found = bad(found_by(check(ssh, set_up=(only("gpu02", "module load cuda/99"),))))
    assert [*found] == [("nodes", "gpu02")]
    assert "module load cuda/99 failed with exit code 127" in found["nodes", "gpu02"][1]


def test_what_cannot_work_is_not_started(ssh: Any, network: Network) -> None:
    """It takes more than 10 s: agents of the run that is not checked import torch on four machines."""
    ssh.checks = True
    ssh.script("import nosuch_module\n")
    done = ssh("run", "train.py", *FOUR)
    assert done.rc == 3
    run = ssh.run()
    assert done.stderr.splitlines()[0] == "error: imports on gpu[01-04]: not found: nosuch_module (train.py:1)"
    assert done.stderr.splitlines()[-1] == f"  see: runs/{run.name}/preflight.json"
    assert (ssh.record()["status"]["state"], ssh.record()["status"]["exit_code"]) == ("FAILED", 3)
    assert not json.loads((run / "preflight.json").read_text())["good"]
    unchecked = ssh("run", "train.py", *FOUR[:2], "--nproc-per-node", "1", "--no-check")
    assert unchecked.rc == 1
    assert "ModuleNotFoundError" in unchecked.stderr


def test_machines_that_pdsh_reaches(ssh: Any) -> None:
    need("pdsh", missing_commands({"pdsh": "pdsh"}))
    ssh.env["PDSH_RCMD_TYPE"] = "ssh"
    ssh.script("lab: {kind: pdsh, resources: {hosts: 'gpu[01-04]'}}\n", "clusters.yaml")
    ssh.script("import torch\n")
    done = ssh("check", "train.py", "--on", "lab", "--nodes", "4", "--nproc-per-node", "1", "--json")
    assert bad(found_by(done)) == {}
    assert [node["host"] for node in json.loads(done.stdout)["nodes"]] == ["gpu01", "gpu02", "gpu03", "gpu04"]


def test_little_memory_may_be_locked_on_one_machine(
    ssh: Any, network: Network, undo: Callable[..., None], tmp_path: Path
) -> None:
    port = tmp_path / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(f"{text}\n")
    undo(network.nodes["gpu02"], "rmdir --ignore-fail-on-non-empty /dev/infiniband")  # All nodes have the same /dev.
    for node in (network.nodes["gpu02"], network.nodes["gpu03"]):  # There is no such device here: the kernel's word is.
        node.run(f"mount --bind '{tmp_path / 'class'}' /sys/class")
        undo(node, "umount /sys/class")
        node.run("mkdir -p /dev/infiniband && mount -t tmpfs tmpfs /dev/infiniband && touch /dev/infiniband/uverbs0")
        undo(node, "umount /dev/infiniband")
    ssh.script("import torch\n")
    flags = ("--only", "memlock", "--backend", "nccl", "--gpus-per-node", "1")
    limits = (only("gpu02", "ulimit -l 64", "ulimit -l 4096"),)
    assert bad(found_by(check(ssh, *flags, set_up=limits))) == {}  # Root may lock any amount of memory.
    bound = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "--", sys.executable]
    found = bad(found_by(check(ssh, *flags, set_up=limits, python=bound)))
    assert found == {
        ("memlock", "gpu02"): ("FAIL", "65.5 KB, and mlx5_0 is active"),
        ("memlock", "gpu03"): ("WARN", "4.19 MB, and mlx5_0 is active"),
    }
