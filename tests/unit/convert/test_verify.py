"""``allranks convert --verify``: scripts of all kinds, run by recorders in the sandbox, start what their jobs start."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from allranks.cli import convert
from allranks.convert import sandbox
from allranks.errors import LaunchError

HERE = Path(__file__).parent
_WORDS = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "true"]
pytestmark = pytest.mark.skipif(
    subprocess.run(_WORDS, check=False, capture_output=True).returncode != 0, reason="namespaces cannot be made here"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory in which the commands are typed, with what the scripts name."""
    home = tmp_path / "home"
    work = home / "work"
    for each in (work, work / "project", work / "sub"):
        each.mkdir(parents=True)
        (each / "train.py").touch()
        (each / "prepare.py").touch()
    (home / "train.py").touch()
    (work / "hosts.txt").write_text("gpu1\ngpu2\n")
    (work / "slots.txt").write_text("gpu1 slots=4\ngpu2 slots=4\n")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    for name in [each for each in os.environ if each.startswith(("SLURM_", "PBS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return work


def typed(*words: str) -> int:
    """Type the command, and return its exit code."""
    code = convert.command.main([*words, "--verify"], standalone_mode=False)
    assert isinstance(code, int)
    return code


SLURM = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\n"
HEAD = 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
C10D = "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$MASTER_ADDR:29500"
PBS = "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\n#PBS -l walltime=1:00:00\ncd $PBS_O_WORKDIR\n"
STATIC = "--nnodes=2 --nproc-per-node=4 --master-addr=gpu1 --master-port=29500"
GRID = "#!/bin/bash\n#$ -cwd\n#$ -pe smp 8\n#$ -l gpu=2\n#$ -l h_rt=1:00:00\n"
ONE = "#!/bin/bash\n#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=4 --time=1:00:00\n"

#: A script, by what is special about it; with the files beside it where there are some.
SCRIPTS: dict[str, str | tuple[str, dict[str, str]]] = {
    # One machine
    "torchrun": "torchrun --standalone --nproc-per-node=2 train.py --lr 0.1\n",
    "torchrun with underscores": "torchrun --standalone --nproc_per_node 3 train.py\n",
    "python": "python train.py --epochs 3\n",
    "python -u": "python3 -u -W ignore train.py\n",
    "python -m": "python -m project.train --lr 0.1\n",
    "python -m torch.distributed.run": "python -m torch.distributed.run --standalone --nproc-per-node=2 train.py a\n",
    "torch.distributed.launch": "python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py a\n",
    "torch.distributed.launch without --use_env": "python -m torch.distributed.launch --nproc_per_node=2 train.py a\n",
    "torchrun -m": "torchrun --standalone --nproc-per-node=2 -m project.train --x 1\n",
    "torchrun --no-python": "torchrun --standalone --nproc-per-node=2 --no-python bash -c 'exec python train.py $RANK'\n",
    "accelerate": "accelerate launch --num_processes 4 --mixed_precision bf16 train.py --lr 0.1\n",
    "accelerate with a file": (
        "accelerate launch --config_file cfg.yaml train.py\n",
        {"cfg.yaml": "num_machines: 1\nnum_processes: 2\nmixed_precision: fp16\n"},
    ),
    "deepspeed": "deepspeed --num_gpus 4 train.py --deepspeed ds.json\n",
    "quotes and spaces": "torchrun --standalone --nproc-per-node=2 train.py --name 'two words' \"it's\" a\\ b ''\n",
    "an array of arguments": 'ARGS=(--a "b c" --d)\ntorchrun --standalone --nproc-per-node=2 train.py "${ARGS[@]}"\n',
    "arguments in a string": 'ARGS="--lr 0.1 --epochs 3"\ntorchrun --standalone --nproc-per-node=2 train.py $ARGS\n',
    "arithmetic": "N=2\nexport BATCH=$((64 / N))\ntorchrun --standalone --nproc-per-node=$N train.py --batch $BATCH\n",
    "a function": 'launch() {\n  torchrun --standalone --nproc-per-node=2 train.py "$1"\n}\nlaunch --x\n',
    "variables before the command": "A=1 B='x y' torchrun --standalone --nproc-per-node=2 train.py\n",
    "env and nohup": "nohup env OMP_NUM_THREADS=4 torchrun --standalone --nproc-per-node=2 train.py > log 2>&1 &\n",
    "numactl": "numactl --cpunodebind=0 torchrun --standalone --nproc-per-node=2 train.py\n",
    "a directory": "cd project && torchrun --standalone --nproc-per-node=2 train.py\n",
    "a directory of the script": 'cd "$(dirname "$0")"\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a virtual environment": "source venv/bin/activate\nexport X=1\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a virtual environment elsewhere": ". /opt/env/bin/activate\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "an interpreter by its path": "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py\n",
    "torchrun by its path": "~/env/bin/torchrun --standalone --nproc-per-node=2 train.py\n",
    "conda": 'eval "$(conda shell.bash hook)"\nconda activate mine\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a sourced file": ("source ./env.sh\ntorchrun --standalone --nproc-per-node=$N train.py --data $DATA\n", {"env.sh": "export DATA=/data\nN=2\n"}),
    "a script that runs a script": ("./run.sh --lr 0.1\n", {"run.sh": '#!/bin/bash\ntorchrun --standalone --nproc-per-node=2 train.py "$@"\n'}),
    "one node of two": f"torchrun {STATIC} --node-rank=1 train.py\n",
    "a preparation": "python prepare.py --to /data\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    # Slurm
    "srun torchrun": f"{SLURM}{HEAD}srun torchrun {C10D} train.py --lr 0.1\n",
    "srun torchrun, with its faults": f"{SLURM}{HEAD}srun torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py\n",
    "srun bash -c": f"{SLURM}export {HEAD}srun bash -c 'torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py'\n",
    "srun python": f"{SLURM.replace('per-node=1', 'per-node=4')}export {HEAD}export MASTER_PORT=29500\nsrun python train.py --lr 0.1\n",
    "srun with options": f"{SLURM}{HEAD}srun --nodes=2 --ntasks=2 --cpu-bind=none torchrun {C10D} train.py\n",
    "modules and conda": f"{SLURM}module load cuda/12.4 nccl\nconda activate mine\n{HEAD}srun torchrun {C10D} train.py\n",
    "variables of a batch": f'{SLURM}export NCCL_DEBUG=INFO\nexport DATA="/data/my set"\n{HEAD}srun torchrun {C10D} train.py --data "$DATA"\n',
    "a launcher in a variable": f'{SLURM}{HEAD}LAUNCHER="torchrun {C10D}"\nsrun $LAUNCHER train.py\n',
    "a script of each node": (
        f"{SLURM}export {HEAD}srun bash node.sh 4\n",
        {"node.sh": "export A=1\ntorchrun --nnodes=2 --nproc-per-node=$1 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py\n"},
    ),
    "a loop of srun": f'{SLURM}nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nfor i in 0 1; do\n  srun --nodes=1 --ntasks=1 -w "${{nodes[$i]}}" torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$i --master-addr=${{nodes[0]}} --master-port=29500 train.py &\ndone\nwait\n',
    "one node of Slurm": f"{ONE}torchrun --standalone --nproc-per-node=4 train.py\n",
    "an array": f"{ONE}#SBATCH --array=0-3\ntorchrun --standalone --nproc-per-node=4 train.py --seed $SLURM_ARRAY_TASK_ID\n",
    "a container": f"{ONE}srun apptainer exec --nv image.sif torchrun --standalone --nproc-per-node=4 train.py\n",
    "a directory of a batch": f"{ONE}cd $SLURM_SUBMIT_DIR/project\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "accelerate on two nodes": f"{SLURM}export {HEAD}srun bash -c 'accelerate launch --num_processes 8 --num_machines 2 --machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR --main_process_port 29500 train.py'\n",
    "python by its path in srun": f"{SLURM.replace('per-node=1', 'per-node=4')}srun /opt/env/bin/python -u train.py\n",
    "a port of Python": f"{SLURM}{HEAD}PORT=$(python -c 'import socket; print(29500)')\nsrun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$PORT train.py\n",
    # PBS and Grid Engine
    "pbs": f"{PBS.replace('select=2', 'select=1')}torchrun --standalone --nproc-per-node=4 train.py\n",
    "pbs and mpiexec": f"{PBS}HEAD=$(head -n1 $PBS_NODEFILE)\nmpiexec -n 2 --ppn 1 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py\n",
    "pbs and ranks of mpirun": f"{PBS}mpirun -np 8 --map-by ppr:4:node python train.py\n",
    "grid engine": f"{GRID}torchrun --standalone --nproc_per_node=2 train.py --data /data\n",
    # Machines
    "ssh in a loop": f'i=0\nfor host in gpu1 gpu2; do\n  ssh $host "cd {{work}} && torchrun {STATIC} --node-rank=$i train.py" &\n  i=$((i + 1))\ndone\nwait\n',
    "ssh with hosts of a file": f'i=0\nfor host in $(cat hosts.txt); do\n  ssh $host "cd {{work}} && A=1 torchrun {STATIC} --node-rank=$i train.py" &\n  i=$((i + 1))\ndone\nwait\n',
    "pdsh": "pdsh -w gpu[1-2] 'cd {work}; torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=gpu1:29500 train.py'\n",
    "mpirun with hosts": "mpirun -np 8 -H gpu1:4,gpu2:4 -x NCCL_DEBUG=INFO python train.py\n",
    "deepspeed with a file of hosts": "deepspeed --hostfile slots.txt --num_gpus 4 train.py --deepspeed\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_job_starts_what_its_script_started(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    given = SCRIPTS[name]
    script, files = given if isinstance(given, tuple) else (given, {})
    for beside, text in files.items():
        (folder / beside).write_text(text)
        (folder / beside).chmod(0o755)
    (folder / "start.sh").write_text(script.replace("{work}", str(folder)))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code = typed("start.sh")
    said = capfd.readouterr()
    assert "start.sh: verified: " in said.err, said.err
    assert "DIFFERS" not in said.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert code == 0, said.err
