"""The batch scripts for Grid Engine, as they have been read and found good; see ``test_golden_scripts.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of, own_lines
from golden_plans import golden_name, plan_of

GOLDEN = golden_of("grid_engine")
BESIDE = ("node.json", "node.sh", "supervisor.json")
FILES = {"standalone": ["script.sge"], "inside": ["script.sh", *BESIDE]}
TWO_NODES = """\
script: train.py
cluster: grid
resources: {nodes: 2, gpus_per_node: 4, cpus_per_node: 4, time: 48:00:00}
scheduler: {parallel_environment: mpi, resources: [gpu=1]}
"""
JOBS = {
    "cpu": "script: train.py\ncluster: grid\nlaunch: {nproc_per_node: 2}\n",
    "2x4": TWO_NODES,
    "direct": TWO_NODES + "args: [--epochs, 3, 'a b']\nlaunch: {launcher: direct}\n",
    "inside": "script: train.py\ncluster: grid\nscheduler: {partition: gpu.q}\n",
    "standalone": TWO_NODES,
    "spaces": TWO_NODES + "environment: {variables: {HF_TOKEN: 0123456789abcdef}}\n",
    "everything": """\
script: train.py
cluster: grid
resources: {nodes: 4, cpus_per_node: 8, memory: 64GB, time: 2-00:00}
launch: {nproc_per_node: 4, max_restarts: 2, interface: ib0}
notify:
  mail: me@example.org
scheduler:
  parallel_environment: mpi
  partition: gpu.q
  account: my account
  project: lab
  constraint: arch=lx-amd64
  exclude: ['gpu[03-04]']
  reservation: 12
  exclusive: true
  array: 1-8%2
  output: "logs/out #1.log"
  error: logs/err.log
  directives: ["-p -100", "#$ -js 3"]
environment:
  modules: [cuda/12.4]
  setup: ulimit -n 65536
retry: {requeue: false, warn_before: 600}
runs: {group_readable: true}
""",
}


@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_plan(tmp_path: Path, name: str):
    (tmp_path / "logs").mkdir()
    (tmp_path / "hosts").write_text("node1 4 main.q@node1 UNDEFINED\nnode2 4 main.q@node2 UNDEFINED\n")
    spool = {"SGE_JOB_SPOOL_DIR": "/spool/node1/active_jobs/7.1", "JOB_ID": "7", "PE_HOSTFILE": f"{tmp_path}/hosts"}
    environ = {"PATH": "", **(spool if name == "inside" else {})}
    runs = "my run's" if name == "spaces" else "runs"
    files = plan_of(tmp_path, JOBS[name], {}, environ, standalone=name == "standalone", runs=runs)
    assert list(files) == FILES.get(name, ["script.sge", *BESIDE])
    for path, text in files.items():
        GOLDEN.compare(golden_name(name, path), text)


def test_each_golden_file_has_its_job():
    assert {name.partition(".")[0] for name in GOLDEN.names()} == set(JOBS)


@pytest.mark.parametrize("name", GOLDEN.names(".sge", ".sh"))
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


@pytest.mark.parametrize("name", sorted(JOBS))
def test_a_script_is_read_in_ten_seconds(name: str):
    script = f"{name}.sh" if name == "inside" else f"{name}.sge"
    assert len(own_lines(GOLDEN.read(script), "#$")) <= 25
    if name != "standalone":
        assert len(own_lines(GOLDEN.read(f"{name}.node.sh"))) <= 25


def test_no_secret_is_in_a_golden_file():
    assert not [name for name in GOLDEN.names() if "0123456789abcdef" in GOLDEN.read(name)]
