"""A script as it was, and its converted job: run side by side, their ranks get the same and compute the same."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cluster_tools import missing_commands
from grid_engine_cluster import GridEngineCluster
from needed import need
from pbs_cluster import StandInPbs
from slurm_cluster import SlurmCluster

from waiting import PATIENCE

#: Two steps of gradient descent on numbers that depend on the rank: the result shows who took part.
TRAIN = """\
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
weight = torch.tensor([1.0])
for step in range(2):
    gradient = weight * (rank + 1)
    dist.all_reduce(gradient)
    weight -= float(sys.argv[2]) * gradient
local, world, scale = (os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "SCALE"))
with open(f"rank-{rank}.json", "w") as file:
    json.dump([rank, local, world, scale, os.getcwd(), sys.argv[1:], weight.item().hex()], file)
dist.destroy_process_group()
"""
#: Where a rank is, as whatever started it says, and what it computes from that alone, to the bit.
PLACE = """\
import json, os, sys
def first(*names):
    return next((os.environ[name] for name in names if name in os.environ), "0")
rank = int(first("RANK", "SLURM_PROCID"))
local, world = first("LOCAL_RANK", "SLURM_LOCALID"), first("WORLD_SIZE", "SLURM_NTASKS")
task, scale = os.environ.get("SLURM_ARRAY_TASK_ID", ""), os.environ.get("SCALE")
weight = 1.0
for step in range(10):
    weight -= float(sys.argv[2]) * float(scale) * (rank + 1) / int(world) * weight
with open(f"rank-{task}{rank}.json", "w") as file:
    json.dump([rank, local, world, scale, os.getcwd(), sys.argv[1:], weight.hex()], file)
"""
#: Two parts of such a training: the first one waits for a warning, saves and says that it is to be continued.
PARTS = """\
import json, os, signal, sys
from pathlib import Path
rank, world = (int(os.environ.get(new, os.environ.get(old))) for new, old in (
    ("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")))
saved = Path(f"saved-{rank}.json")
step, weight = json.loads(saved.read_text()) if saved.exists() else (0, 1.0)
first = step
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.signal(signal.SIGUSR1, lambda *_: None)
while step < 10:
    weight -= float(sys.argv[2]) * float(os.environ["SCALE"]) * (rank + 1) / world * weight
    step += 1
    if step == 5:
        Path(f"up-{rank}").touch()
        signal.sigwait({signal.SIGUSR1})
        saved.write_text(json.dumps([step, weight]))
        sys.exit(75)
with open(f"rank-{rank}.json", "w") as file:
    json.dump([rank, world, first, Path.cwd().name, sys.argv[1:], weight.hex()], file)
"""
REQUEUE = """\
#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --time=5:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
export SCALE=2
again() {
  kill -USR1 $PID
  wait $PID
  scontrol requeue $SLURM_JOB_ID
}
trap again USR1
srun PYTHON parts.py --lr 0.01 "a b" &
PID=$!
wait $PID
"""
#: For TRAIN, where mpirun starts it.
OF_MPI = """\
import os
for name in ("RANK", "LOCAL_RANK"):
    os.environ.setdefault(name, os.environ.get(f"OMPI_COMM_WORLD_{name}", ""))
os.environ.setdefault("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", ""))
"""
SBATCH = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --time=5:00
export SCALE=2
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID \\
    --rdzv-endpoint=$MASTER_ADDR:29511 train.py --lr 0.01 "a b"
"""


def results(folder: Path) -> list[Any]:
    """Take what the ranks of a run have written, by rank."""
    files = sorted(folder.glob("rank-*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def by_bash(command: Any, script: str) -> list[list[Any]]:
    """Run a script by bash in the command's directory, and return its results."""
    (command.folder / "start.sh").write_text(script)
    subprocess.run(["bash", "start.sh"], cwd=command.folder, env=command.env, check=True, timeout=PATIENCE)
    return results(command.folder)


def converted(command: Any, script: str, folder: Path, *flags: str) -> list[Any]:
    """Return what the ranks of a script's job write in a directory, once the script is converted."""
    done = command("convert", script, "-o", ".")
    assert done.rc == 0, done.stderr
    done = command("run", "job.yaml", *flags)
    assert done.rc == 0, done.stderr
    return results(folder)


def test_torchrun_of_a_shell_script(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: torchrun imports torch for each rank."""
    folder: Path = allranks.folder
    (folder / "train.py").write_text(TRAIN)
    run = f'{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 train.py --lr 0.1 "a b"'
    old = by_bash(allranks, f"#!/bin/bash\nexport SCALE=2\n{run}\n")
    args = ["--lr", "0.1", "a b"]
    assert [each[:-1] for each in old] == [[rank, str(rank), "2", "2", str(folder), args] for rank in (0, 1)]
    assert converted(allranks, "start.sh", folder) == old


def test_srun_torchrun_of_an_sbatch_script(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: torchrun imports torch on each node."""
    folder: Path = lab.folder
    (folder / "train.py").write_text(TRAIN)
    (folder / "train.sbatch").write_text(SBATCH)
    job = slurm.sbatch("train.sbatch", folder=folder)
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    old = results(folder)
    args = ["--lr", "0.01", "a b"]
    assert [each[:-1] for each in old] == [[rank, str(rank % 2), "4", "2", str(folder), args] for rank in range(4)]
    assert converted(lab, "train.sbatch", folder, "--on", "lab", "--backend", "gloo") == old


def test_torchrun_of_an_ssh_loop(ssh: Any) -> None:
    """It takes more than 10 s: torchrun imports torch on each machine."""
    folder: Path = ssh.folder
    (folder / "train.py").write_text(TRAIN)
    meet = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=gpu01:29512"
    run = f"{sys.executable} -m torch.distributed.run {meet} train.py --lr 0.01 'a b'"
    script = f'#!/bin/bash\nfor host in gpu01 gpu02; do\n  ssh $host "cd {folder} && SCALE=2 {run}" &\ndone\nwait\n'
    old = by_bash(ssh, script)
    args = ["--lr", "0.01", "a b"]
    assert [each[:-1] for each in old] == [[rank, str(rank % 2), "4", "2", str(folder), args] for rank in range(4)]
    assert converted(ssh, "start.sh", folder) == old


def test_torchrun_by_pbsdsh_of_a_pbs_script(standin_lab: Any, standin: StandInPbs) -> None:
    """It takes more than 10 s: torchrun imports torch on each node."""
    folder: Path = standin_lab.folder
    (folder / "train.py").write_text(TRAIN)
    meet = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-id=1 --rdzv-endpoint=$MASTER_ADDR:29513"
    run = f"export SCALE=2; cd {folder}; {sys.executable} -m torch.distributed.run {meet} train.py --lr 0.01 'a b'"
    (folder / "train.pbs").write_text(
        "#!/bin/bash\n#PBS -l select=2:ncpus=2:ngpus=2\n#PBS -l place=scatter\n#PBS -l walltime=0:05:00\n"
        f'cd "$PBS_O_WORKDIR"\nMASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")\npbsdsh -- bash -c "{run}"\n'
    )
    job = standin.qsub("-j", "oe", "-o", "out", "train.pbs", folder=folder)
    standin.wait_for_state(job)
    old = results(folder)
    args = ["--lr", "0.01", "a b"]
    assert [each[:-1] for each in old] == [[rank, str(rank % 2), "4", "2", str(folder), args] for rank in range(4)]
    assert converted(standin_lab, "train.pbs", folder, "--on", "lab", "--backend", "gloo") == old


def test_python_behind_a_function_of_a_shell_script(allranks: Any) -> None:
    folder: Path = allranks.folder
    (folder / "place.py").write_text(PLACE)
    (folder / "env.sh").write_text("export SCALE=2\n")
    run = f'train() {{\n  env WORLD_SIZE=1 {sys.executable} place.py --lr 0.1 "a b"\n}}\ntrain\n'
    old = by_bash(allranks, f"#!/bin/bash\nsource ./env.sh\n{run}")
    assert [each[:-1] for each in old] == [[0, "0", "1", "2", str(folder), ["--lr", "0.1", "a b"]]]
    assert converted(allranks, "start.sh", folder) == old


def test_srun_python_of_an_sbatch_script(lab: Any, slurm: SlurmCluster) -> None:
    folder: Path = lab.folder
    (folder / "place.py").write_text(PLACE)
    (folder / "train.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n#SBATCH --gpus-per-node=2\n#SBATCH --time=5:00\n"
        f'export SCALE=2\nYEAR=$(date +%Y)\nsrun {sys.executable} place.py --lr 0.1 "a b" run-$YEAR\n'
    )
    job = slurm.sbatch("train.sbatch", folder=folder)
    assert slurm.wait_for_state(job)["JobState"] == "COMPLETED"
    old = results(folder)
    args = ["--lr", "0.1", "a b", f"run-{time.localtime().tm_year}"]
    assert [each[:-1] for each in old] == [[rank, str(rank % 2), "4", "2", str(folder), args] for rank in range(4)]
    assert converted(lab, "train.sbatch", folder, "--on", "lab") == old


def test_a_directory_of_a_pbs_script(standin_lab: Any, standin: StandInPbs) -> None:
    folder: Path = standin_lab.folder
    (folder / "project").mkdir()
    (folder / "project/place.py").write_text(PLACE)
    (folder / "train.pbs").write_text(
        "#!/bin/bash\n#PBS -l select=1:ncpus=2:ngpus=1\n#PBS -l walltime=0:05:00\n"
        f'cd $PBS_O_WORKDIR/project\nexport SCALE=2 WORLD_SIZE=1\n{sys.executable} place.py --lr 0.1 "a b"\n'
    )
    standin.wait_for_state(standin.qsub("-j", "oe", "-o", "out", "train.pbs", folder=folder))
    old = results(folder / "project")
    assert [each[:-1] for each in old] == [[0, "0", "1", "2", f"{folder}/project", ["--lr", "0.1", "a b"]]]
    assert converted(standin_lab, "train.pbs", folder / "project", "--on", "lab") == old


def test_python_of_a_grid_engine_script(grid_engine_lab: Any, grid_engine: GridEngineCluster) -> None:
    """It takes more than 10 s: Grid Engine looks at its queue every few seconds."""
    folder: Path = grid_engine_lab.folder
    (folder / "place.py").write_text(PLACE)
    (folder / "train.sh").write_text(
        "#!/bin/bash\n#$ -cwd\n#$ -pe one 1\n#$ -l h_rt=300\n#$ -j y\n"
        f'export SCALE=2 WORLD_SIZE=1\n{sys.executable} place.py --lr 0.1 "a b"\n'
    )
    grid_engine.finished(grid_engine.qsub("train.sh", folder=folder))
    old = results(folder)
    assert [each[:-1] for each in old] == [[0, "0", "1", "2", str(folder), ["--lr", "0.1", "a b"]]]
    assert converted(grid_engine_lab, "train.sh", folder, "--on", "lab") == old


def test_accelerate_launch_of_a_shell_script(allranks: Any) -> None:
    """It takes more than 10 s on a slow machine: accelerate launch imports torch."""
    folder: Path = allranks.folder
    (folder / "place.py").write_text(PLACE)
    launcher = shlex.join([str(Path(sys.executable).with_name("accelerate")), "launch"])
    run = f'{launcher} --multi_gpu --num_processes 2 place.py --lr 0.1 "a b"'
    old = by_bash(allranks, f"#!/bin/bash\nexport SCALE=2\n{run}\n")
    args = ["--lr", "0.1", "a b"]
    assert [each[:-1] for each in old] == [[rank, str(rank), "2", "2", str(folder), args] for rank in (0, 1)]
    assert converted(allranks, "start.sh", folder) == old


def test_ranks_that_pdsh_numbers(ssh: Any) -> None:
    need("pdsh", missing_commands({"pdsh": "pdsh"}))
    folder: Path = ssh.folder
    (folder / "place.py").write_text(PLACE)
    ssh.env["PDSH_RCMD_TYPE"] = "ssh"
    run = f"cd {folder} && SCALE=2 RANK=%n WORLD_SIZE=2 {sys.executable} place.py --lr 0.1 'a b'"
    old = by_bash(ssh, f'#!/bin/bash\npdsh -w gpu[01-02] "{run}"\n')
    args = ["--lr", "0.1", "a b"]
    assert [each[:-1] for each in old] == [[rank, "0", "2", "2", str(folder), args] for rank in (0, 1)]
    assert converted(ssh, "start.sh", folder) == old


def test_mpirun_on_machines(ssh: Any) -> None:
    """It takes more than 10 s on a slow machine: each rank imports torch."""
    need("mpirun", missing_commands({"mpirun": "openmpi-bin"}))
    folder: Path = ssh.folder
    (folder / "train.py").write_text(OF_MPI + TRAIN)
    ssh.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sets = "-x SCALE=2 -x OMP_NUM_THREADS=1 -x MASTER_ADDR=gpu01 -x MASTER_PORT=29514"
    run = f'mpirun -np 2 -H gpu01:1,gpu02:1 {sets} {sys.executable} train.py --lr 0.1 "a b"'
    old = by_bash(ssh, f"#!/bin/bash\n{run}\n")
    args = ["--lr", "0.1", "a b"]
    assert [each[:-1] for each in old] == [[rank, "0", "2", "2", str(folder), args] for rank in (0, 1)]
    assert converted(ssh, "start.sh", folder) == old


def test_a_job_array(lab: Any, slurm: SlurmCluster) -> None:
    folder: Path = lab.folder
    (folder / "place.py").write_text(PLACE)
    (folder / "train.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks=2\n#SBATCH --gpus-per-node=2\n#SBATCH --time=5:00\n"
        "#SBATCH --array=3,4\nexport SCALE=2\nRATES=(0.0 0.1 0.2 0.3 0.4)\nRATE=${RATES[$SLURM_ARRAY_TASK_ID]}\n"
        f'srun {sys.executable} place.py --lr $RATE "a b"\n'
    )
    slurm.run("sbatch", "--wait", "train.sbatch", folder=folder)
    old = results(folder)
    wanted = [
        [rank, str(rank), "2", "2", str(folder), ["--lr", f"0.{task}", "a b"]] for task in (3, 4) for rank in (0, 1)
    ]
    assert [each[:-1] for each in old] == wanted
    assert converted(lab, "train.sbatch", folder, "--on", "lab") == old


def test_a_script_that_requeues_its_job(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s: Slurm lets a requeued job wait for that long."""
    jobs: dict[str, int] = {}
    work: Path = lab.folder
    for name in ("old", "new"):
        folder = work / name
        folder.mkdir()
        (folder / "parts.py").write_text(PARTS)
        (folder / "train.sbatch").write_text(REQUEUE.replace("PYTHON", sys.executable))
    jobs["old"] = slurm.sbatch("train.sbatch", folder=work / "old")
    lab.folder /= "new"
    shutil.copy(work / "clusters.yaml", lab.folder)
    assert lab("convert", "train.sbatch", "-o", ".").rc == 0
    run = lab.popen("run", "job.yaml", "--on", "lab")
    for name in ("old", "new"):
        slurm.wait_until("the ranks", lambda name=name: len([*(work / name).glob("up-*")]) == 2)
        job = jobs.get(name) or int(lab.record()["handle"]["job_id"])
        slurm.run("scancel", "--signal=USR1", "--batch", str(job))
    assert run.wait(PATIENCE) == 0
    assert slurm.wait_for_state(jobs["old"])["JobState"] == "COMPLETED"
    old, new = (results(work / name) for name in ("old", "new"))
    args = ["--lr", "0.01", "a b"]
    assert [each[:-1] for each in old] == [[rank, 2, 5, "old", args] for rank in (0, 1)]
    assert [[*each[:3], "old", *each[4:]] for each in new] == old
