"""Scripts that were written for Lightning or Accelerate run as they are, under each launcher that these know.

Lightning knows torchrun, Slurm (tests/cluster), and MPI by way of mpi4py. Accelerate knows torchrun, and on CPUs the
variables of mpirun, if it is told the master address. ``allranks run`` sets what torchrun sets.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import PATIENCE

SCRIPTS = Path(__file__).parent.parent / "scripts"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable],
    "MPICH": ["mpiexec.hydra", "-n", "2", sys.executable],
}


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_an_unmodified_script_runs(allranks, watch, name):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    pytest.importorskip(name)
    done = allranks("run", SCRIPTS / f"{name}_script.py", "--nproc-per-node", "2", timeout=PATIENCE)
    assert done.rc == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if f"{name}: rank" in line) == [
        f"[{rank}] {name}: rank {rank} of 2 steps 4" for rank in (0, 1)
    ]
    watch.nothing_left()


@pytest.mark.parametrize(
    ("name", "changes", "note"),
    [
        (
            "lightning",
            {"devices=args.devices": 'devices="auto"', 'strategy="ddp",': ""},
            "allranks: note: the 2 ranks formed no process group: each ran the whole script alone; "
            'write Trainer(devices=N, strategy="ddp"), with N the ranks of a node',
        ),
        (
            "accelerate",
            {"cpu=True": ""},
            "[0] allranks: note: Accelerate ran each rank alone, as the only process; "
            "write Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true, to train together on CPUs",
        ),
    ],
)
def test_ranks_that_a_framework_trains_alone_are_noted(allranks, name, changes, note):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    pytest.importorskip(name)
    text = (SCRIPTS / f"{name}_script.py").read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    (allranks.folder / "train.py").write_text(text)
    done = allranks("run", "train.py", "--nproc-per-node", "2", timeout=PATIENCE)
    assert done.rc == 0, done.stderr
    assert f"{name}: rank 0 of 1 steps 8\n" in done.stdout
    assert [line for line in done.stderr.splitlines() if "note: " in line] == [note]


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_runs_under_the_launcher_that_it_was_written_for(launcher, name, allranks_env, tmp_path):
    """It takes more than 10 s: these frameworks are large to import, for each rank."""
    pytest.importorskip(name)
    command = LAUNCHERS[launcher]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}: apt-get install openmpi-bin mpich")
    env = {**allranks_env, "OMP_NUM_THREADS": "1"}
    if launcher != "torchrun":
        env |= for_mpi4py(launcher, tmp_path) if name == "lightning" else master()
    command = [*command, str(SCRIPTS / f"{name}_script.py")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(rf"{name}: rank (\d+) of (\d+) steps (\d+)", done.stdout)
    assert sorted(found) == [("0", "2", "4"), ("1", "2", "4")]


def master() -> dict[str, str]:
    """Give what a user exports before mpirun, so that the ranks find each other."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def for_mpi4py(launcher: str, folder: Path) -> dict[str, str]:
    """Let mpi4py find the library of this mpirun; Debian has MPICH's, but not by the name that all kinds agreed on."""
    pytest.importorskip("mpi4py")
    if launcher == "Open MPI":
        return {"MPI4PY_MPIABI": "openmpi"}
    library = next(Path("/usr/lib").glob("*/libmpich.so.12"), None)
    if library is None:
        pytest.skip("there is no libmpich.so.12: apt-get install libmpich12")
    (folder / "libmpi.so.12").symlink_to(library)
    return {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}
