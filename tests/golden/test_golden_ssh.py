"""The scripts that run on machines over SSH, as they have been read and found good; see ``test_golden_scripts.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of
from golden_plans import plan_of

GOLDEN = golden_of("ssh")
JOBS = {
    "two": """\
script: train.py
cluster: racks
resources: {hosts: 'gpu[1-2]', gpus_per_node: 8}
launch: {master_addr: gpu1, master_port: 29400}
""",
    "all": """\
module: my.package
args: [--name, "a b"]
cluster: racks
resources: {hosts: ["ada@gpu7:2222", "[2001:db8::7]:22"]}
launch: {nproc_per_node: 2, backend: gloo, master_addr: 'gw; reboot', master_port: 29400, stop_timeout: 5}
environment:
  variables: {WANDB_API_KEY: 0123456789abcdef, NCCL_IB_TIMEOUT: 22}
  modules: [cuda/12.4]
  venv: .venv
  setup: [make data]
  node_setup: [ulimit -n 65536]
  container: [apptainer, exec, --nv, my image.sif]
runs: {group_readable: true}
""",
    "apart": """\
script: train.py
cluster: racks
resources: {hosts: 'gpu[1-2]', gpus_per_node: 8}
launch: {master_addr: gpu1, master_port: 29400}
environment: {venv: .venv}
sync: {method: rsync, folder: ~/project}
""",
}


@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_plan(tmp_path: Path, name: str):
    files = plan_of(tmp_path, JOBS[name], {}, {"OMP_NUM_THREADS": "3"})
    assert [*files] == [*(["setup.sh"] if name == "all" else []), "start.sh", "end.sh", "node.sh", "node.json"]
    for path, text in files.items():
        GOLDEN.compare(f"{name}-{path}", text)


def test_each_golden_file_has_its_job():
    assert {name.partition("-")[0] for name in GOLDEN.names()} == set(JOBS)


@pytest.mark.parametrize("name", GOLDEN.names(".sh"))
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


def test_no_secret_is_in_a_golden_file():
    assert not [name for name in GOLDEN.names() if "0123456789abcdef" in GOLDEN.read(name)]
