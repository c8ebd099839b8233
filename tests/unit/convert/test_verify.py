"""``allranks convert --verify``: scripts of all kinds, run by recorders in the sandbox, start what their jobs start."""

# ruff: noqa: E501 - scripts as they are written

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from verifying import C10D, GRID, HEAD, NAMESPACES, ONE, PBS, SLURM, STATIC, TRAIN, typed

from allranks.cli import convert
from allranks.convert import write
from allranks.errors import UsageError

HERE = Path(__file__).parent
pytestmark = NAMESPACES


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
    "a function": "launch() {\n  torchrun --standalone --nproc-per-node=2 train.py --x 1\n}\nlaunch\n",
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
    "a sourced file": (
        "source ./env.sh\ntorchrun --standalone --nproc-per-node=$N train.py --data $DATA\n",
        {"env.sh": "export DATA=/data\nN=2\n"},
    ),
    "the start file of the shell": "source ~/.bashrc\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "options by their beginnings": "torchrun --nnode 1 --nproc_per 2 --master_po 29511 train.py --lr 1\n",
    "modules that are loaded twice": f"{ONE}module load cuda\nmodule load cuda\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "a script that runs a script": (
        "./run.sh --lr 0.1\n",
        {"run.sh": '#!/bin/bash\ntorchrun --standalone --nproc-per-node=2 train.py "$@"\n'},
    ),
    "one node of two": f"torchrun {STATIC} --node-rank=1 train.py\n",
    "a preparation": "python prepare.py --to /data\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a machine of two, by the argument of the script": "export NODE=$1\naccelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank $NODE --main_process_ip gpu1 --main_process_port 29500 train.py\n",
    "arguments of functions": 'train() {\n  local lr=$1\n  shift\n  torchrun --standalone --nproc-per-node=2 train.py --lr $lr "$@"\n}\nall() { train $2 --name "$1"; }\nall "a b" 0.1\n',
    "paths beside the script": (
        "bash sub/run.sh\n",
        {
            "sub/run.sh": 'HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nROOT=$(dirname "$HERE")\nexport PYTHONPATH=$ROOT:$PYTHONPATH\ntorchrun --standalone --nproc-per-node=2 "$(dirname "$0")/train.py" --config "$HERE/a.yaml" --out $(pwd)/out\n'
        },
    ),
    "a configuration that it writes": "LR=0.1\nNAME=conf\ncat > $NAME.yaml <<EOF\nlr: $LR\nEOF\necho 3 > seed.txt\ntorchrun --standalone --nproc-per-node=2 train.py --config $NAME.yaml --seed-file=seed.txt\n",
    "a program below a directory that is not known": "PYTHON=${HOME}/env/bin/python\nmpirun -np 2 ${PYTHON} train.py --epochs 5\n",
    "defaults of variables": 'GPUS=${GPUS:-2}\nLR=${LR:-0.1}\ntorchrun --standalone --nproc_per_node=$GPUS train.py --lr $LR --seed ${SEED:-3} --name "${1:-x}"\n',
    "csh": "#!/bin/tcsh\nsource /etc/profile.d/modules.csh\nset lr = 0.1\nsetenv A 1\nsetenv B 'x y'\nif ( ! $?C ) setenv C $lr\ntorchrun --standalone --nproc-per-node=2 train.py --lr $lr\n",
    "a directory of the script in a variable of the command": 'PYTHONPATH="$(dirname $0)/..":$PYTHONPATH \\\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a directory of the script in a variable": "export PYTHONPATH=$(dirname $0)/..:$PYTHONPATH\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    # Slurm
    "defaults of an srun outside of a job": "PARTITION=${PARTITION:-video}\nGPUS=${GPUS:-8}\nGPUS_PER_NODE=${GPUS_PER_NODE:-4}\nsrun -p $PARTITION --gres=gpu:$GPUS_PER_NODE --ntasks=$GPUS --ntasks-per-node=$GPUS_PER_NODE ${SRUN_ARGS} python train.py --lr 0.1\n",
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
        {
            "node.sh": "export A=1\ntorchrun --nnodes=2 --nproc-per-node=$1 --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR train.py\n"
        },
    ),
    "a loop of srun": f'{SLURM}nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nfor i in 0 1; do\n  srun --nodes=1 --ntasks=1 -w "${{nodes[$i]}}" torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$i --master-addr=${{nodes[0]}} --master-port=29500 train.py &\ndone\nwait\n',
    "one node of Slurm": f"{ONE}torchrun --standalone --nproc-per-node=4 train.py\n",
    "an array": f"{ONE}#SBATCH --array=0-3\ntorchrun --standalone --nproc-per-node=4 train.py --seed $SLURM_ARRAY_TASK_ID\n",
    "an item for each task of an array": f"{ONE}#SBATCH --array=0-2\nLRS=(0.1 0.2 0.3)\nLR=${{LRS[$SLURM_ARRAY_TASK_ID]}}\nsrun torchrun --standalone --nproc-per-node=4 train.py --lr $LR\n",
    "a case for each task of an array": f"{ONE}#SBATCH --array=0-2\ncase $SLURM_ARRAY_TASK_ID in\n  0) ARGS=(--a 'b c');;\n  *) ARGS=(--b);;\nesac\ntorchrun --standalone --nproc-per-node=4 train.py \"${{ARGS[@]}}\"\n",
    "a condition on the task of an array": f"{ONE}#SBATCH --array=0-2\nif [ $SLURM_ARRAY_TASK_ID -eq 0 ]; then\n  LR=0.1\nelse\n  LR=0.2\nfi\nsrun torchrun --standalone --nproc-per-node=4 train.py --lr $LR\n",
    "a date": "NOW=$(date +%F)\nOUT=/out/$NOW\ntorchrun --standalone --nproc-per-node=2 train.py --out $OUT --name a-$NOW --log $OUT/log\n",
    "a date of a batch": f"{SLURM}{HEAD}NOW=`date +%s`\nsrun torchrun {C10D} train.py --out $NOW\n",
    "an option if a variable is set": 'RESUME="${RESUME:-latest}"\ntorchrun --standalone --nproc-per-node=2 train.py --lr 1 ${RESUME:+--resume "$RESUME"}\n',
    "a port that is looked for": "while true; do\n  PORT=$((RANDOM % 1000 + 20000))\n  nc -z 127.0.0.1 $PORT || break\ndone\ntorchrun --nproc-per-node=2 --master-port=$PORT train.py\n",
    "modules where unset variables are errors": f"{ONE}set -euo pipefail\nmodule load cuda\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "a directory to be removed": 'NOW=`date +%F`\nif [ -z "$NAME" ]; then\n  OUT=runs/$NOW\nelse\n  OUT=runs/$NAME\nfi\nif [ -d "$OUT" ]; then rm -rf "$OUT"; fi\ntorchrun --standalone --nproc-per-node=2 train.py\n',
    "a line of a file for each task of an array": (
        f'{ONE}#SBATCH --array=0-2\nLINE=$(sed -n "$((SLURM_ARRAY_TASK_ID + 2))p" hosts.txt)\ntorchrun --standalone --nproc-per-node=4 train.py --name "$LINE"\n',
        {},
    ),
    "a container of srun, and a log": f'{SLURM.replace("per-node=1", "per-node=4")}DIR=`pwd`\nDATE=today\nsrun -l --container-image nvcr.io/x --output=$DIR/%x_%j_$DATE.log sh -c "python -u ${{DIR}}/train.py --lr 1"\n',
    "a container": f"{ONE}srun apptainer exec --nv image.sif torchrun --standalone --nproc-per-node=4 train.py\n",
    "a directory of a batch": f"{ONE}cd $SLURM_SUBMIT_DIR/project\ntorchrun --standalone --nproc-per-node=4 train.py\n",
    "accelerate on two nodes": f"{SLURM}export {HEAD}srun bash -c 'accelerate launch --num_processes 8 --num_machines 2 --machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR --main_process_port 29500 train.py'\n",
    "python by its path in srun": f"{SLURM.replace('per-node=1', 'per-node=4')}srun /opt/env/bin/python -u train.py\n",
    "a port of Python": f"{SLURM}{HEAD}PORT=$(python -c 'import socket; print(29500)')\nsrun torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$PORT train.py\n",
    # PBS and Grid Engine
    "pbs": f"{PBS.replace('select=2', 'select=1')}torchrun --standalone --nproc-per-node=4 train.py\n",
    "pbs and mpiexec": f"{PBS}HEAD=$(head -n1 $PBS_NODEFILE)\nmpiexec -n 2 --ppn 1 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py\n",
    "pbs and ranks of mpirun": f"{PBS}mpirun -np 8 --map-by ppr:4:node python train.py\n",
    "pbs and ranks of mpiexec on Cray": f"{PBS}mpiexec -n 8 --ppn 4 --depth=8 --cpu-bind depth --env NCCL_DEBUG=INFO --env=A=1 python train.py\n",
    "pbs and ranks of Hydra": f"{PBS}mpirun -n 8 -ppn 4 -genv NCCL_DEBUG INFO -env A=1 python train.py\n",
    "an option of mpirun with one dash": "mpirun -np 2 -output-filename logs/out python train.py\n",
    "accelerate whose nodes are numbered when they meet": f'{SLURM}export {HEAD}LAUNCH="accelerate launch --num_processes 8 --num_machines 2 --rdzv_backend c10d --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR --main_process_port 29500"\nsrun $LAUNCH train.py\n',
    "a variable that is exported further down": "NAME=$(basename $PWD)\nexport NAME\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "an alert if the training fails": 'python train.py --lr 1\nif [ $? -ne 0 ]; then python prepare.py "failed"; fi\n',
    "an environment that a preparation needs too": f"{ONE}source venv/bin/activate\nprepare_data --all\nsrun python train.py\n",
    "a program before python": f"{ONE.replace('per-node=1', 'per-node=4')}srun ./set_gpu.sh python train.py\n",
    "a container with a variable": f"{ONE}srun apptainer exec --nv --bind /data/of/the/project:/data --bind /scratch/of/the/group:/scratch --bind /software/of/the/group:/software --bind /models:/models --bind /results:/results --env CACHE=/scratch/$USER image.sif torchrun --standalone --nproc-per-node=4 train.py\n",
    "an environment of conda whose name is not known": 'ENV=$(basename $PWD)\nconda run -n "$ENV" torchrun --standalone --nproc-per-node=2 train.py\n',
    "a backslash at the end": "torchrun --standalone --nproc-per-node=2 train.py --lr 0.1 \\\n",
    "files that are sourced and are not here": "source settings_here.sh\n. .env\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "a log in a directory that is not here": "RUN=a\ntorchrun --standalone --nproc-per-node=2 train.py > logs/$RUN/train.log 2>&1\n",
    "a log of a block": "{\n  torchrun --standalone --nproc-per-node=2 train.py\n} > logs/train.log 2> logs/train.err\n",
    "GPUs that are counted": "torchrun --standalone --nproc-per-node=$(nvidia-smi -L | wc -l) train.py\n",
    "a home that the shell expands": 'A=~/a\nB="~/b"\nC=$A/c\nD=${DATA_OF_NOBODY:-~/d}\nexport E=~/e\nexport F=\'~/f\'\npython train.py $A "$A" $B $C $D ~ ~/g \'~/h\' --i=~/i "~"/j\n',
    "a directory in a variable that a shell runs": f'{ONE}CMD="cd project"\nCMD="$CMD && python train.py"\nsrun bash -c "$CMD"\n',
    "a rank of the node from outside": f"torchrun {STATIC} --node-rank=${{NODE_OF_MINE}} train.py\n",
    "a preparation in the background that is waited for": "python prepare.py &\nwait\npython train.py\n",
    "a module of deepspeed": "deepspeed --num_gpus=2 --no_local_rank -m project.train --lr 1\n",
    "a node by its name": f"{ONE}#SBATCH --nodelist=gpu[7-9]\nsrun torchrun --standalone --nproc-per-node=4 train.py\n",
    "a word in pieces": "python train.py data='a:'\\\n'b:'\\\n\"c d\" --x\n",
    "variables that are printed": f"{ONE}env | grep -i nothing_has_this\nexport PATH=$PATH:/opt/of/mine/bin\nsrun torchrun --standalone --nproc-per-node=4 train.py\n",
    "a version of python": f"{ONE}module load python/3.11\nsrun python3.11 train.py\n",
    "mpirun in a container": "singularity exec --nv image.sif mpirun --oversubscribe --host localhost:3 -n 3 python train.py\n",
    "srun in an environment": f"{ONE}poetry run srun torchrun --standalone --nproc-per-node=4 train.py\n",
    "fewer tasks than fit": f"{SLURM.replace('per-node=1', 'per-node=4')}srun --ntasks=4 --ntasks-per-node=4 python train.py\n",
    "a range of nodes in a job of one": f"{ONE}torchrun --nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=localhost:6000 train.py\n",
    "a limit that is higher than that here": "set -e\nulimit -n 1000000\ntorchrun --standalone --nproc-per-node=2 train.py\n",
    "another branch": 'N=$(nvidia-smi -L | wc -l)\nif [ "$N" -eq 900 ]; then\n  python prepare.py\n  export A=1\nelse\n  torchrun --standalone --nproc-per-node=2 train.py\nfi\n',
    "trainings at the same time": "python train.py --seed 1 &\npython train.py --seed 2 &\nwait\n",
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


@pytest.mark.parametrize("line", ["source ~/envs/torch/bin/activate", "source activate myenv", ""])
def test_the_environment_of_the_terminal_changes_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """``python`` and ``activate`` are first on PATH in the one that allranks is in, as ``pip install`` leaves it."""
    active = folder.parent / "active"
    (active / "bin").mkdir(parents=True)
    (active / "bin/activate").write_text(f"export VIRTUAL_ENV={active} PATH={active}/bin:$PATH\n")
    (active / "bin/python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(active / "bin/python"))
    monkeypatch.setenv("VIRTUAL_ENV", str(active))
    monkeypatch.setenv("PATH", f"{active}/bin:{os.environ['PATH']}")
    (folder / "start.sh").write_text(f"{line}\n{TRAIN}")
    code = typed("start.sh")
    said = capfd.readouterr().err
    assert "DIFFERS" not in said
    assert "start.sh: verified: 2 ranks, alike in " in said
    assert code == 0


CHANGES = {
    "an argument": ('args: ["--lr", "0.1"]', 'args: ["--lr", "0.2"]', "arguments of rank 0: --lr 0.1 -> --lr 0.2"),
    "ranks": ("nproc_per_node: 2", "nproc_per_node: 3", "ranks: 2 of 2 (HOST: 0 1) -> 3 of 3 (HOST: 0 1 2)"),
    "a variable": ('A: "1"', 'A: "2"', "variable A: 1 -> 2"),
    "a variable that is missing": ('    A: "1"', '    B: "1"', "variable A: 1 -> nothing"),
    "the script": (
        "script: train.py",
        "script: prepare.py",
        "program of rank 0: script WORK/train.py -> script WORK/prepare.py",
    ),
    "the interpreter": (
        "python: [/opt/env/bin/python]",
        "python: [/opt/b/bin/python]",
        "interpreter of rank 0: /opt/env/bin/python -> /opt/b/bin/python",
    ),
    "the working directory": (
        "script: train.py",
        "script: train.py\nworkdir: sub",
        "working directory of rank 0: WORK -> WORK/sub",
    ),
    "a command before": (
        "prepare.py --to a",
        "prepare.py --to b",
        "another command: WORK/prepare.py --to a -> nothing",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_that_starts_something_else_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    old, new, said = CHANGES[name]
    script = (
        "export A=1\npython prepare.py --to a\n"
        "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py --lr 0.1\n"
    )
    (folder / "start.sh").write_text(script)
    written = write.job_text

    def changed(*given: Any) -> str:
        text = "\n".join(line.partition("  # ")[0] for line in written(*given).splitlines())
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(write, "job_text", changed)
    assert typed("start.sh") == 1
    expected = said.replace("HOST", socket.gethostname()).replace("WORK", str(folder))
    assert f"\n  DIFFERS: {expected}\n" in capfd.readouterr().err


def test_a_job_for_another_number_of_nodes_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "start.sh").write_text(f"{SLURM}{HEAD}srun torchrun {C10D} train.py\n")
    written = write.job_text
    monkeypatch.setattr(write, "job_text", lambda *given: written(*given).replace("nodes: 2", "nodes: 3"))
    assert typed("start.sh") == 1
    said = "DIFFERS: ranks: 8 of 8 (node01: 0 1 2 3, node02: 4 5 6 7) -> 12 of 12 (node01: 0 1 2 3, node02: 4 5 6 7, node03"
    assert said in capfd.readouterr().err


def test_what_is_wanted_is_explained(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "export WANDB_API_KEY=abcdefghijklmnop\nexport NNODES=1\ntorchrun --standalone --nproc-per-node=2 train.py\n"
    )
    (folder / "start.sh").write_text(script)
    assert typed("start.sh") == 0
    said = capfd.readouterr().err
    assert "  wanted: variable WANDB_API_KEY: <secret> -> <secret>\n    its value comes from where you type" in said
    assert "  wanted: variable NNODES: 1 -> nothing\n    left out: NNODES=1: allranks sets what the ranks need" in said
    assert "  wanted: address and port: localhost:29500 -> chosen when it starts\n" in said
    assert "abcdefghijklmnop" not in said


def test_other_ranks_are_explained_by_a_fault_of_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not by the first fault of the script, whatever it is: here a secret, and a process that is killed by its name."""
    head = SLURM.replace("tasks-per-node=1", "tasks-per-node=4")
    script = f"{head}export WANDB_API_KEY=0123456789abcdef\npkill python\n{HEAD}srun torchrun {C10D} train.py\n"
    (folder / "start.sh").write_text(script)
    assert typed("start.sh") == 0
    said = capfd.readouterr().err.splitlines()
    (at,) = (at for at, line in enumerate(said) if line.startswith("  wanted: ranks: 32 of 8 "))
    assert said[at + 1] == "    AR102: srun starts 4 times torchrun on each node, and each of them starts 4 ranks"


def test_each_of_several_scripts_is_compared_with_its_flags(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"{SLURM}{HEAD}srun torchrun {C10D} train.py\n"
    (folder / "small.sbatch").write_text(script)
    (folder / "large.sbatch").write_text(script.replace("nodes=2", "nodes=3"))
    assert typed("small.sbatch", "large.sbatch") == 0
    said = capfd.readouterr().err
    assert "small.sbatch: verified: 8 ranks" in said
    assert "large.sbatch: verified: 12 ranks" in said


def test_what_is_found_is_written_as_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 train.py\n"
    (folder / "start.sh").write_text(f"export NNODES=1\nexport A=1\n{run}")
    assert typed("start.sh", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert "script: train.py" in found["job_files"].pop("job.yaml")
    assert found == {
        "verified": True,
        "job_files": {},
        "scripts": [
            {
                "file": "start.sh",
                "job_file": "job.yaml",
                "verified": True,
                "ranks": 2,
                "equal": [
                    "rank, local rank, world size and host",
                    "working directory",
                    "interpreter",
                    "program",
                    "environment (A)",
                ],
                "differences": [
                    {
                        "what": "address and port",
                        "script": "localhost:29500",
                        "job": "chosen when it starts",
                        "wanted": True,
                        "why": "127.0.0.1, a free port: all ranks are on this machine",
                    },
                    {
                        "what": "variable NNODES",
                        "script": "1",
                        "job": "nothing",
                        "wanted": True,
                        "why": "left out: NNODES=1: allranks sets what the ranks need of it",
                    },
                ],
                "cause": None,
            }
        ],
    }


def test_a_job_that_cannot_be_planned_is_an_error_in_json(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "start.sh").write_text(TRAIN)
    monkeypatch.setattr(write, "job_text", lambda *_: "scrip: train.py\n")
    assert typed("start.sh", "--json") == 1
    found = json.loads(capfd.readouterr().out)
    assert found["verified"] is False
    assert [sorted(each) for each in found["scripts"]] == [["error", "file", "job_file"]]


def test_json_is_of_what_verify_finds(folder: Path) -> None:
    (folder / "start.sh").write_text(TRAIN)
    with pytest.raises(UsageError, match="--json needs --verify"):
        convert.command.main(["start.sh", "--json"], standalone_mode=False)
