"""The batch scripts for PBS, as they have been read and found good; see ``test_golden_scripts.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of, own_lines
from golden_plans import golden_name, plan_of

from allranks.agent.pbs_job import STARTERS

GOLDEN = golden_of("pbs")
BESIDE = ("node.json", "node.sh", "supervisor.json")
FILES = {"standalone": ["script.pbs"], "inside": ["script.sh", *BESIDE]}
FOUR_GPUS = "script: train.py\ncluster: hall\nresources: {gpus_per_node: 4, cpus_per_node: 32, time: 48:00:00}\n"
TWO_NODES = FOUR_GPUS.replace("{", "{nodes: 2, ")
EVERYTHING = """\
script: train.py
args: [--name, 'a b', --expr, '$(touch pwned) `x` "y" it''s']
cluster: hall
debug: true
resources:
  nodes: 4
  gpus_per_node: 4
  cpus_per_node: 48
  memory: 200GB
  time: 2-00:00
launch:
  launcher_args: [-v, 'a b']
  max_restarts: 2
  interface: ib0
notify:
  mail: me@example.org
scheduler:
  partition: gpu
  account: my account
  FLAVOUR
  constraint: CONSTRAINT
  include: [gpu01, 'gpu[03-04]']
  resources: ['filesystems=home:eagle', software=matlab]
  exclusive: true
  array: 0-7%2
  output: "logs/out #1.log"
  error: logs/err.log
  start_with: STARTER
  directives: ["-p 100", "#PBS -l walltime=01:00:00", "-W umask=027"]
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
"""
JOBS = {
    "1x4": FOUR_GPUS,
    "2x4": TWO_NODES,
    "4x8": TWO_NODES.replace("nodes: 2", "nodes: 4").replace("per_node: 4", "per_node: 8"),
    "cpu": "script: train.py\ncluster: hall\nlaunch: {nproc_per_node: 2}\n",
    "direct": TWO_NODES + "args: [--epochs, 3, 'a b']\nlaunch: {launcher: direct}\n",
    "direct-inside": """\
module: my.train
cluster: hall
launch: {launcher: direct, nproc_per_node: 2, backend: gloo, master_addr: gw, master_port: 29400}
""",
    "inside": "script: train.py\ncluster: hall\nscheduler: {partition: gpu}\n",
    "standalone": TWO_NODES,
    "array": "script: train.py\ncluster: hall\nresources: {nodes: 2}\nscheduler: {array: 0-9}\n",
    "spaces": TWO_NODES + "environment: {variables: {HF_TOKEN: 0123456789abcdef}}\n",
    "torque-1x4": FOUR_GPUS + "scheduler: {flavour: torque}\n",
    "everything": EVERYTHING.replace("FLAVOUR", "project: my project")
    .replace("CONSTRAINT", "gpu_model=a100")
    .replace("STARTER", "ssh"),
    "torque-everything": EVERYTHING.replace("FLAVOUR", "flavour: torque\n  qos: high\n  reservation: maintenance")
    .replace("CONSTRAINT", "bigmem:ib")
    .replace("STARTER", "mpiexec"),
    **{f"start-{starter}": f"{TWO_NODES}scheduler: {{start_with: {starter}}}\n" for starter in STARTERS},
}


@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_plan(tmp_path: Path, name: str):
    (tmp_path / "logs").mkdir()
    (tmp_path / "hosts").write_text("node1\nnode1\nnode2\n")
    inside = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "hosts")} if "inside" in name else {}
    runs = "my run's" if name == "spaces" else "runs"
    environ = {"PATH": "", **inside}  # Which PBS is here, if one is, does not matter.
    files = plan_of(tmp_path, JOBS[name], {}, environ, standalone=name == "standalone", runs=runs)
    assert list(files) == (FILES["inside"] if inside else FILES.get(name, ["script.pbs", *BESIDE]))
    for path, text in files.items():
        GOLDEN.compare(golden_name(name, path), text)


def test_each_golden_file_has_its_job():
    assert {name.partition(".")[0] for name in GOLDEN.names()} == set(JOBS)


@pytest.mark.parametrize("name", GOLDEN.names(".pbs", ".sh"))
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


@pytest.mark.parametrize("name", sorted(name for name in JOBS if "everything" not in name))
def test_a_script_is_read_in_ten_seconds(name: str):
    script = f"{name}.sh" if "inside" in name else f"{name}.pbs"
    assert len(own_lines(GOLDEN.read(script), "#PBS")) <= 25
    if name != "standalone":
        assert len(own_lines(GOLDEN.read(f"{name}.node.sh"))) <= 25


def test_no_secret_is_in_a_golden_file():
    assert not [name for name in GOLDEN.names() if "0123456789abcdef" in GOLDEN.read(name)]
