"""The files of a plan, as they have been read and found good.

``ALLRANKS_UPDATE_GOLDEN=1 pytest tests/golden`` updates them; read the difference before you commit it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of
from golden_plans import plan_of

GOLDEN = golden_of("scripts")
JOBS = {
    "plain": "script: train.py\n",
    "arguments": "script: train.py\nargs: [--epochs, 3, --name, 'a b', --expr, '$(touch pwned) `x` \"y\" it''s']\n",
    "module": "module: my.package\nargs: --lr 0.1\n",
    "binary": "binary: ./program\nargs: [--fast]\n",
    "variables": """\
script: train.py
environment:
  variables:
    NCCL_IB_TIMEOUT: 22
    EMPTY: ""
    NASTY: "$(touch pwned)\\n'; touch pwned; \\"`touch pwned`"
    OMP_NUM_THREADS: 3
""",
    "secrets": """\
script: train.py
environment:
  variables: {WANDB_API_KEY: 0123456789abcdef, HF_TOKEN: hf_secret_of_mine, WANDB_PROJECT: mnist}
""",
    "modules": "script: train.py\nenvironment:\n  modules: [cuda/12.4, 'gcc 13']\n",
    "conda": "script: train.py\nenvironment:\n  conda: my env\n",
    "venv": "script: train.py\nenvironment:\n  venv: .venv/\n",
    "setup": """\
script: train.py
environment:
  setup: |
    ulimit -n 65536
    export DATA=/scratch/$USER
  node_setup:
    - nvidia-smi || true
""",
    "container": "script: train.py\nenvironment:\n  container: apptainer exec --nv 'my image.sif'\n",
    "python": "script: train.py\nenvironment:\n  python: [python3.12, -O, -X, 'dev']\n",
    "debug": "script: train.py\ndebug: true\n",
    "network": """\
script: train.py
launch: {interface: 'eth0;reboot', master_addr: node01, master_port: 29400, nproc_per_node: 2, backend: gloo}
""",
    "restarts": """\
script: train.py
launch: {max_restarts: 3, restart_delay: 2.5, stop_timeout: 10, warm: false}
runs: {group_readable: true}
""",
    "no_gpus": "script: train.py\nresources: {gpus_per_node: 0}\n",
}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the golden files are those of a machine without GPUs")
@pytest.mark.skipif(sys.platform != "linux", reason="the golden files are those of Linux, whose loopback is lo")
@pytest.mark.parametrize("name", JOBS)
def test_files_of_a_plan(tmp_path: Path, name: str):
    # The number of CPUs is this machine's own; the reasons then say that of the job.
    files = plan_of(tmp_path, JOBS[name], {"resources.cpus_per_node": "8"}, {})
    assert list(files) == ["node-000.sh", "node-000.json"]
    for path, text in files.items():
        GOLDEN.compare(f"{name}{Path(path).suffix}", text)


def test_each_golden_file_has_its_job():
    assert {Path(name).stem for name in GOLDEN.names()} == set(JOBS)


@pytest.mark.parametrize("name", GOLDEN.names(".sh"))
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


def test_no_secret_is_in_a_golden_file():
    for name in GOLDEN.names():
        text = GOLDEN.read(name)
        assert "0123456789abcdef" not in text
        assert "hf_secret_of_mine" not in text
