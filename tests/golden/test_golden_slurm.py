"""The batch scripts for Slurm, as they have been read and found good; see ``test_golden_scripts.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of, own_lines
from golden_plans import golden_name, plan_of

GOLDEN = golden_of("slurm")
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "a100:4"}
BESIDE = ("node.json", "node.sh", "supervisor.json")
FILES = {"standalone": ["script.sbatch"], "inside": ["script.sh", *BESIDE]}
FOUR_GPUS = "script: train.py\ncluster: lab\nresources: {gpus_per_node: 4, cpus_per_node: 32, time: 48:00:00}\n"
JOBS = {
    "1x4": FOUR_GPUS,
    "2x4": FOUR_GPUS.replace("{", "{nodes: 2, "),
    "2x8": FOUR_GPUS.replace("{", "{nodes: 2, ").replace("node: 4", "node: 8, gpu_type: h100"),
    "4x8": FOUR_GPUS.replace("{", "{nodes: 4, ").replace("node: 4", "node: 8") + "scheduler: {gpu_request: gres}\n",
    "elastic": FOUR_GPUS.replace("{", "{nodes: 2:4, ") + "retry: {max_attempts: 5}\n",
    "direct": FOUR_GPUS.replace("{", "{nodes: 2, ") + "args: [--epochs, 3, 'a b']\nlaunch: {launcher: direct}\n",
    "direct-uneven": """\
module: my.train
cluster: lab
resources: {nodes: 2}
launch: {launcher: direct, nproc_per_node: 4, backend: gloo, master_addr: gw, master_port: 29400}
scheduler: {directives: [--ntasks=6]}
""",
    "cpu": "script: train.py\ncluster: lab\nlaunch: {nproc_per_node: 2}\n",
    "standalone": "script: train.py\ncluster: lab\n",
    "inside": "script: train.py\ncluster: lab\nscheduler: {partition: gpu}\n",
    "everything": """\
script: train.py
args: [--name, 'a b', --expr, '$(touch pwned) `x` "y" it''s']
cluster: lab
debug: true
resources:
  nodes: 3
  gpus_per_node: 4
  gpu_type: a100
  cpus_per_node: 48
  memory: 200GB
  time: 2-00:00
launch:
  launcher_args: [--mpi=none, '--comment=a b']
  max_restarts: 2
  interface: ib0
notify:
  mail: me@example.org
scheduler:
  partition: gpu
  account: my project
  qos: high
  constraint: a100&nvlink
  include: [gpu01, 'gpu[03-05]']
  exclude: gpu02
  reservation: maintenance
  exclusive: true
  array: 0-7%2
  output: "logs/%A_%a #1.out"
  error: logs/%A_%a.err
  directives: ["--nice=100", "#SBATCH --licenses=a@b:1"]
environment:
  variables: {WANDB_API_KEY: 0123456789abcdef, NCCL_IB_TIMEOUT: 22}
  modules: [cuda/12.4]
  conda: my env
  setup: |
    ulimit -n 65536
    export DATA=/scratch/$USER
  node_setup: |
    cat >/tmp/config <<EOF
      key: "$USER"
    EOF
  container: [apptainer, exec, --nv, my image.sif]
retry: {requeue: false, warn_before: 600}
runs: {group_readable: true}
""",
}


@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_plan(tmp_path: Path, name: str):
    (tmp_path / "logs").mkdir()
    environ = ALLOCATION if name == "inside" else {}
    files = plan_of(tmp_path, JOBS[name], {}, environ, standalone=name == "standalone")
    assert list(files) == FILES.get(name, ["script.sbatch", *BESIDE])
    for path, text in files.items():
        GOLDEN.compare(golden_name(name, path), text)


def test_each_golden_file_has_its_job():
    assert {name.partition(".")[0] for name in GOLDEN.names()} == set(JOBS)


@pytest.mark.parametrize("name", GOLDEN.names(".sbatch", ".sh"))
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


@pytest.mark.parametrize("name", sorted(set(JOBS) - {"everything"}))
def test_a_script_is_read_in_ten_seconds(name: str):
    script = f"{name}.sh" if name == "inside" else f"{name}.sbatch"
    assert len(own_lines(GOLDEN.read(script), "#SBATCH")) <= 25
    if name != "standalone":
        assert len(own_lines(GOLDEN.read(f"{name}.node.sh"))) <= 25


@pytest.mark.skipif(not SHELLCHECK, reason="there is no shellcheck")
@pytest.mark.parametrize("name", GOLDEN.names(".sbatch", ".sh"))
def test_shellcheck_finds_nothing(name: str):
    done = subprocess.run(
        [str(SHELLCHECK), "--shell=bash", "--severity=style", "--exclude=SC1090,SC1091,SC2016", "-"],
        input=GOLDEN.read(name),
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_no_secret_is_in_a_golden_file():
    assert not [name for name in GOLDEN.names() if "0123456789abcdef" in GOLDEN.read(name)]
