"""What starts ranks with torch's own launchers, read and found good; see ``test_golden_scripts.py``."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from golden_files import assert_bash, golden_of
from golden_plans import plan_of

from allranks.job.load import load_job
from allranks.plan.torch_launcher import NodePlace, line_of

GOLDEN = golden_of("launchers")
EVERYTHING = """\
environment:
  variables: {WANDB_API_KEY: 0123456789abcdef, NASTY: "it's $(touch pwned)", CUDA_VISIBLE_DEVICES: ""}
  modules: [cuda/10.2, 'gcc 9']
  venv: my venv
  node_setup: [ulimit -n 65536 || true, 'export DATA="$HOME/a b"']
  container: [apptainer, exec, --nv, my image.sif]
  python: [python, -O]
runs: {group_readable: true}
"""
JOBS = {
    "legacy": "script: train.py\nlaunch: {launcher: legacy, nproc_per_node: 2, backend: gloo}\n",
    "torchrun": "script: train.py\nlaunch: {agent: false, nproc_per_node: 2, backend: gloo, max_restarts: 3}\n",
    "module": f"""\
module: my.package
args: [--name, "it's a b", '$(touch pwned)']
launch: {{launcher: legacy, launcher_args: [--use-env, '--log_dir=a b'], nproc_per_node: 2, backend: gloo,
          stop_timeout: 5, master_port: 29400}}
{EVERYTHING}""",
    "binary": """\
binary: ./program
launch: {agent: false, nproc_per_node: 2, backend: gloo}
""",
    "over-ssh": f"""\
script: train.py
cluster: racks
resources: {{hosts: 'gpu[1-2]'}}
launch: {{launcher: legacy, nproc_per_node: 2, master_addr: 'gw; reboot', master_port: 29400}}
{EVERYTHING}""",
}


def _name(path: str) -> str:
    return path.removeprefix("node-000").removeprefix("node")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the golden files are those of a machine without GPUs")
@pytest.mark.skipif(sys.platform != "linux", reason="the golden files are those of Linux, whose loopback is lo")
@pytest.mark.parametrize("name", JOBS)
def test_script_of_a_node(tmp_path: Path, name: str):
    files = plan_of(tmp_path, JOBS[name], {"resources.cpus_per_node": "8"}, {})
    scripts = {path: text for path, text in files.items() if path.startswith("node")}
    ((path, text),) = scripts.items()
    GOLDEN.compare(f"{name}{_name(path)}", _without_port(text, name))


def _without_port(text: str, name: str) -> str:
    """Replace the port, which is another one each time."""
    if name in ("module", "over-ssh"):
        return text
    before, _, after = text.partition("ALLRANKS_RDZV_PORT=")
    return f"{before}ALLRANKS_RDZV_PORT=PORT\n{after.partition(chr(10))[2]}"


@pytest.mark.parametrize("name", JOBS)
def test_line_for_a_node(tmp_path: Path, name: str):
    plan_of(tmp_path, JOBS[name], {}, {})
    loaded = load_job(tmp_path / "job.yaml", flags={}, environ={}, cwd=tmp_path)
    place = NodePlace(nodes="2", node="1", ranks="2", master_addr=shlex.quote("gw; reboot"), master_port="29400")
    line = line_of(loaded.job, loaded.folder, place)
    places = {str(tmp_path): "/project", shlex.quote(sys.executable): "PYTHON"}
    for here, there in places.items():
        line = line.replace(here, there)
    GOLDEN.compare(f"{name}.line", line + "\n")


def test_each_golden_file_has_its_job():
    assert {Path(name).stem for name in GOLDEN.names()} == {*JOBS}


@pytest.mark.parametrize("name", GOLDEN.names())
def test_golden_script_is_bash(name: str):
    assert_bash(GOLDEN.read(name))


def test_no_secret_is_in_a_golden_file():
    assert not [name for name in GOLDEN.names() if "0123456789abcdef" in GOLDEN.read(name)]


def test_a_line_leaves_the_shell_as_it_was(tmp_path: Path):
    folder = tmp_path / "it's a directory"
    folder.mkdir()
    (folder / "run").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$A" "$TOKEN" "$@"\n')
    (folder / "run").chmod(0o755)
    (folder / "train.py").write_text("")
    variables = 'variables: {A: "x\'y", TOKEN: secret}'
    (folder / "job.yaml").write_text(
        f"script: train.py\nlaunch: {{agent: false}}\nenvironment: {{python: ./run, {variables}}}\n"
    )
    loaded = load_job(folder / "job.yaml", flags={}, environ={}, cwd=folder)
    line = line_of(loaded.job, folder, NodePlace(nodes="2", node="1", ranks="4", master_addr="gpu1", master_port="1"))
    shell = [f"{line}\necho ${{A-none}} $PWD"]
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", *shell], cwd="/", env={**env, "TOKEN": "t"}, capture_output=True, text=True)
    place = ["--nproc_per_node=4", "--nnodes=2", "--node_rank=1", "--master_addr=gpu1", "--master_port=1"]
    words = ["-m", "torch.distributed.run", *place, "--max_restarts=0", str(folder / "train.py")]
    assert done.stdout.splitlines() == [str(folder), "x'y", "t", *words, "none /"]
    refused = subprocess.run(["bash", "-c", line], cwd="/", env=env, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "TOKEN: set it before" in refused.stderr
