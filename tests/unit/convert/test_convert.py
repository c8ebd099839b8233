"""``allranks convert``: what scripts of all kinds become, and what it says of them.

``golden.txt`` has the answers; ``make golden`` writes them again: read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.cli import convert
from allranks.errors import UsageError
from allranks.job.load import load_job
from allranks.lint.engine import lint

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.txt"
SCRIPTS = sorted(path.name for path in (HERE / "scripts").iterdir())
#: What the scripts name, so that their jobs can be planned.
FILES = ("train.py", "fit.py", "finetune.py", "pretrain.py")
_TITLE = "== "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with what the scripts name, in which the commands are typed."""
    (tmp_path / "project").mkdir()
    for name in FILES:
        (tmp_path / name).touch()
        (tmp_path / "project" / name).touch()
    (tmp_path / "hosts.txt").write_text("gpu1\ngpu2\ngpu3\ngpu4\n")
    for name in SCRIPTS:
        (tmp_path / name).write_bytes((HERE / "scripts" / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def typed(*words: str) -> int:
    """Type the command, and return its exit code."""
    code = convert.command.main([*words], standalone_mode=False)
    assert isinstance(code, int)
    return code


def blocks() -> dict[str, str]:
    parts = GOLDEN.read_text().split(_TITLE)[1:] if GOLDEN.exists() else []
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    code = typed(name)
    said = capfd.readouterr()
    text = f"{said.out}exit {code}\n{said.err}\n".replace(str(folder), "$PWD")
    if os.environ.get("ALLRANKS_UPDATE_GOLDEN"):
        found = blocks() | {name: text}
        GOLDEN.write_text("".join(f"{_TITLE}{title}\n{found[title]}" for title in sorted(found) if title in SCRIPTS))
    assert text == blocks()[name]


def test_scripts_that_differ_in_numbers_become_one_job_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (folder / "srun_torchrun.sbatch").read_text()
    (folder / "large.sbatch").write_text(text.replace("nodes=4", "nodes=8").replace("48:00", "12:00"))
    assert typed("srun_torchrun.sbatch", "large.sbatch", "-o", "jobs") == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert "large.sbatch: allranks run job.yaml --time 12:00:00 --nodes 8\n" in said.err
    assert sorted(path.name for path in (folder / "jobs").iterdir()) == ["clusters.yaml", "job.yaml"]
    assert (folder / "jobs" / "clusters.yaml").read_text() == "slurm:\n  kind: slurm\n"
    loaded = load_job(
        Path("jobs/job.yaml"),
        flags={"resources.nodes": "8"},
        environ={"HOME": str(folder), "WANDB_API_KEY": "x" * 20},
        cwd=folder,
    )
    assert (loaded.job.resources.nodes, loaded.job.workdir) == ((8, 8), "..")
    assert loaded.cluster.kind == "slurm"


def test_scripts_of_different_trainings_need_a_directory(folder: Path) -> None:
    with pytest.raises(UsageError, match="need 2 job files") as raised:
        typed("torque.pbs", "container.sbatch")
    assert raised.value.fix == "-o DIR writes all of them"
    assert typed("torque.pbs", "container.sbatch", "-o", "jobs") == 0
    assert {path.name for path in (folder / "jobs").iterdir()} == {"torque.yaml", "container.yaml", "clusters.yaml"}
    assert '  venv: "../venv"  # torque.pbs:7' in (folder / "jobs" / "torque.yaml").read_text()


def test_nothing_is_overwritten_without_force(folder: Path) -> None:
    (folder / "job.yaml").write_text("mine")
    (folder / "clusters.yaml").write_text("slurm: {kind: slurm, resources: {cpus_per_node: 8}}\n")
    with pytest.raises(UsageError, match=r"job\.yaml exists already") as raised:
        typed("container.sbatch", "-o", ".")
    assert (folder / "job.yaml").read_text() == "mine"
    assert raised.value.fix == "--force overwrites"
    assert typed("container.sbatch", "-o", ".", "--force") == 0
    assert (folder / "job.yaml").read_text().startswith("# Written by allranks convert")
    assert "cpus_per_node" in (folder / "clusters.yaml").read_text()


def test_a_job_that_cannot_be_planned_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").unlink()
    assert typed("container.sbatch") == 1
    assert "job.yaml does not work yet: there is no script train.py" in capfd.readouterr().err


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch", "deepspeed"])
def test_a_launcher_by_its_path_names_the_python_beside_it(
    folder: Path, capfd: pytest.CaptureFixture[str], launcher: str
) -> None:
    (folder / "run.sh").write_text(f"/opt/env/bin/{launcher} train.py\n")
    typed("run.sh")
    assert "  python: [/opt/env/bin/python]  # run.sh:1 " in capfd.readouterr().out
    (folder / "run.sh").write_text(f"~/.local/bin/{launcher} train.py\n")
    typed("run.sh")
    assert "python:" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "taken", "added"),
    [("mkdir out", "mkdir -p out", "-p"), ("ulimit -n 65536", "ulimit -n 65536 || true", "|| true")],
)
def test_a_line_that_may_fail_ends_no_job(
    folder: Path, capfd: pytest.CaptureFixture[str], line: str, taken: str, added: str
) -> None:
    job, said = job_of(folder, capfd, f"#!/bin/bash\n#SBATCH --nodes=1\n{line}\nsrun python train.py\n")
    assert f'    - "{taken}"' in job
    assert f":3: {taken}: with {added}, since a line of the set-up that fails ends the job\n" in said


def test_a_limit_ends_the_job_where_it_ended_the_script(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, _ = job_of(folder, capfd, "#!/bin/bash\n#SBATCH --nodes=1\nset -e\nulimit -n 65536\nsrun python train.py\n")
    assert '    - "ulimit -n 65536"' in job


@pytest.mark.parametrize("wrapper", ["./set_gpu.sh", "bash set_gpu.sh", "/opt/profiler"])
def test_a_program_before_python_is_named(folder: Path, capfd: pytest.CaptureFixture[str], wrapper: str) -> None:
    (folder / "job.pbs").write_text(f"#!/bin/bash\n#PBS -l select=2\nmpiexec -n 8 --ppn 4 {wrapper} python train.py\n")
    assert typed("job.pbs") == 0
    said = capfd.readouterr()
    assert "script: train.py  # job.pbs:3\n" in said.out
    assert f"job.pbs:3: {wrapper}: it stood before the launcher\n" in said.err


@pytest.mark.parametrize("time", ["24h", "12H", "1.5h", "2 d"])
def test_a_time_that_sbatch_refuses_is_taken_as_it_is_meant(
    folder: Path, capfd: pytest.CaptureFixture[str], time: str
) -> None:
    script = f"#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=1 --time='{time}'\ntorchrun train.py\n"
    (folder / "day.sbatch").write_text(script)
    assert typed("day.sbatch") == 0
    assert f'  time: "{time}"  # day.sbatch:2 --time={time}\n' in capfd.readouterr().out


def test_a_time_that_pbs_does_not_read_is_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "day.pbs").write_text("#!/bin/bash\n#PBS -l select=1:ngpus=1,walltime=1-02:00:00\ntorchrun train.py\n")
    assert typed("day.pbs") == 0
    assert '  resources:\n    - "walltime=1-02:00:00"  # day.pbs:2\n' in capfd.readouterr().out


def test_a_fault_that_a_job_file_does_not_have_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "day.sbatch").write_text("#!/bin/bash\n#SBATCH -N 1 --gpus-per-node=1 -t 24h\ntorchrun train.py\n")
    assert typed("day.sbatch") == 0
    said = capfd.readouterr()
    assert "  day.sbatch:2: AR428: sbatch refuses --time=24h: invalid time specification\n" in said.err


def test_a_script_that_a_script_writes_and_submits(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "submit.sh").write_text(
        "for n in 1 2; do\nsbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=$n --gpus-per-node=4 --time=1:00\n"
        "srun torchrun --nnodes=$n --nproc-per-node=4 train.py\nEOF\ndone\n"
    )
    assert typed("submit.sh") == 0
    said = capfd.readouterr()
    assert "gpus_per_node: 4  # submit.sh:4 --gpus-per-node=4\n" in said.out
    assert "# submit.sh:5: --nnodes=$n: the number of nodes is not in the script: --nodes N\n" in said.out


def job_of(folder: Path, capfd: pytest.CaptureFixture[str], script: str, **files: str) -> tuple[str, str]:
    """Return the job file that a script and the files beside it become, without comments, and what is said of it."""
    for name, text in {"start_sh": script, **files}.items():
        (folder / name.replace("_", ".")).write_text(text)
    typed("start.sh")
    said = capfd.readouterr()
    lines = [line.partition("  # ")[0] for line in said.out.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(line for line in lines if line), said.err


def test_a_file_that_is_sourced_is_taken_over(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    env = "module load cuda/12.4\nconda activate mine\nexport DATA=/data  # shared\nRANKS=4\n"
    script = "source ./env.sh\ntorchrun --standalone --nproc-per-node=$RANKS train.py --data $DATA\n"
    job, said = job_of(folder, capfd, script, env_sh=env)
    assert job == (
        'script: train.py\nargs: ["--data", /data]\nlaunch:\n  nproc_per_node: 4\nenvironment:\n'
        "  modules: [cuda/12.4]\n  conda: mine\n  variables:\n    DATA: /data"
    )
    assert "  env.sh:1: environment.modules: module load cuda/12.4\n" in said
    assert "  env.sh:4: RANKS=4: its value stands where it is used\n" in said


def test_a_file_that_is_sourced_from_elsewhere_is_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, _ = job_of(folder, capfd, "source /opt/site/env.sh\ntorchrun --standalone --nproc-per-node=2 train.py\n")
    assert '  setup:\n    - "source /opt/site/env.sh"' in job


def test_a_script_that_nodes_run_is_taken_over(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4 --ntasks-per-node=1\nexport HEAD=$(hostname)\n"
        "srun bash node.sh $HEAD 4\n"
    )
    node = (
        "cd project\nif [ -d /scratch ]; then export TMPDIR=/scratch; fi\nsource venv/bin/activate\nulimit -n 4096\n"
        "torchrun --nnodes=2 --nproc-per-node=$2 --node-rank=$SLURM_NODEID --master-addr=$1 "
        "--master-port=29500 train.py\n"
    )
    job, _ = job_of(folder, capfd, script, node_sh=node)
    assert job == (
        "name: start\nscript: train.py\nworkdir: project\ncluster: slurm\nresources:\n  nodes: 2\n  gpus_per_node: 4\n"
        "environment:\n  venv: project/venv\n  node_setup:\n"
        '    - "if [ -d /scratch ]; then export TMPDIR=/scratch; fi"\n    - "ulimit -n 4096 || true"'
    )


@pytest.mark.parametrize("last", ["srun bash run.sh", "source ./run.sh", "cd . && source ./run.sh"])
def test_each_script_on_the_way_to_the_training_is_taken_over(
    folder: Path, capfd: pytest.CaptureFixture[str], last: str
) -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4\nbash outer.sh\n"
    outer = f"module load cuda/12.4\nsource venv/bin/activate\nexport DATA=/data\n{last}\n"
    run = "export NCCL_DEBUG=WARN\ntorchrun --nnodes=2 --nproc-per-node=4 train.py\n"
    job, _ = job_of(folder, capfd, script, outer_sh=outer, run_sh=run)
    assert job == (
        "name: start\nscript: train.py\ncluster: slurm\nresources:\n  nodes: 2\n  gpus_per_node: 4\nenvironment:\n"
        "  modules: [cuda/12.4]\n  venv: venv\n  variables:\n    DATA: /data\n    NCCL_DEBUG: WARN"
    )


def test_what_stands_beside_a_training_in_the_background_is_taken_over(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "for host in gpu1 gpu2; do\n  ssh -n $host 'pkill -f train.py'\n"
        "  ssh -n $host 'cd ~/project; source venv/bin/activate; export NCCL_DEBUG=WARN; nohup torchrun --nnodes=2 "
        "--nproc-per-node=8 train.py > log 2>&1 &'\ndone\n"
    )
    job, said = job_of(folder, capfd, script)
    assert 'workdir: "~/project"' in job
    assert '  venv: "~/project/venv"\n  variables:\n    NCCL_DEBUG: WARN' in job
    assert "not taken over" not in said


def test_scripts_of_nodes_that_are_started_by_hand_become_one_job_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        (folder / f"node{rank}.sh").write_text(
            f"torchrun --nnodes=2 --nproc-per-node=8 --node-rank={rank} --master-addr=gpu1 "
            "--master-port=29500 train.py\n"
        )
    assert typed("node0.sh", "node1.sh") == 0
    said = capfd.readouterr()
    assert said.out.splitlines()[1:3] == [
        "# node0.sh: allranks node job.yaml --node-rank 0 --master-addr gpu1 --master-port 29500",
        "# node1.sh: allranks node job.yaml --node-rank 1 --master-addr gpu1 --master-port 29500",
    ]
    assert "not taken over" not in said.err
    assert typed("node0.sh", "node1.sh", "-o", ".") == 0
    line = "next: allranks node job.yaml --node-rank 0 --master-addr gpu1 --master-port 29500\n"
    assert capfd.readouterr().err.endswith(line)


def test_a_script_that_is_run_by_its_name_is_no_part_of_the_launcher(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job, said = job_of(folder, capfd, "./run.sh --lr 0.1\n", run_sh='torchrun --standalone train.py "$@"\n')
    assert "stood before the launcher" not in said
    assert job == 'script: train.py\nargs: ["--lr", "0.1"]\nlaunch:\n  nproc_per_node: 1'


@pytest.mark.parametrize("address", ["gpu-01", "None1", "fe80::1%eth0"])
def test_any_address_of_the_first_node_is_kept(folder: Path, capfd: pytest.CaptureFixture[str], address: str) -> None:
    (folder / "start.sh").write_text(f"torchrun --nnodes=2 --master_addr={address} --node_rank=1 train.py\n")
    assert typed("start.sh") == 0
    line = f"# start.sh: allranks node job.yaml --master-addr {address} --node-rank 1"
    assert capfd.readouterr().out.splitlines()[1] == line


@pytest.mark.parametrize(
    ("lines", "workdir"),
    [
        ("cd project", '"~/project"'),
        ("cd $PBS_O_WORKDIR\ncd project", "project"),
        ("cd $PBS_O_WORKDIR/project", "project"),
        ("cd /", "/"),
    ],
)
def test_a_directory_of_pbs_is_one_below_home(
    folder: Path, capfd: pytest.CaptureFixture[str], lines: str, workdir: str
) -> None:
    job, _ = job_of(folder, capfd, f"#!/bin/bash\n#PBS -l select=1:ngpus=4\n{lines}\ntorchrun --standalone train.py\n")
    assert f"workdir: {workdir}" in job.splitlines()


def test_an_address_without_a_node_rank_is_no_line_of_a_node(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text("torchrun --nnodes=2 --master_addr=gpu1 --master_port=29500 train.py\n")
    typed("start.sh")
    assert "allranks node job.yaml" not in capfd.readouterr().out


def test_each_line_of_accelerate_s_file_is_taken_over_or_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    needless = (
        "compute_environment: LOCAL_MACHINE\r\ndebug: false\r\ndistributed_type: MULTI_GPU\r\ndowncast_bf16: 'no'\r\n"
        "machine_rank: 0\r\nmain_process_ip:\r\nmain_training_function: main\r\nmixed_precision: 'no'\r\n"
        "num_machines: 1\r\nnum_processes: 2\r\nrdzv_backend: static\r\nsame_network: true\r\ntpu_env: []\r\n"
        "fsdp_config: {}\r\n"
    )
    script = "accelerate launch --config_file cfg.yaml train.py\n"
    job, said = job_of(folder, capfd, script, cfg_yaml=f"{needless}gpu_ids: all\r\nuse_cpu: false\r\n")
    assert job == "script: train.py\nlaunch:\n  nproc_per_node: 2"
    assert "not taken over" not in said
    others = "gpu_ids: '0,1'\r\nuse_cpu: true\r\ndynamo_backend: INDUCTOR\r\n"
    job, said = job_of(folder, capfd, script, cfg_yaml=needless + others)
    assert job.endswith('environment:\n  variables:\n    CUDA_VISIBLE_DEVICES: "0,1"')
    assert "  start.sh:1: dynamo_backend: INDUCTOR of --config_file: give it to Accelerator() in the script\n" in said
    assert "  start.sh:1: use_cpu: true of --config_file: give it to Accelerator() in the script\n" in said


def test_the_file_of_accelerate_s_launcher_is_read(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = (
        "distributed_type: FSDP  # ours\nfsdp_config:\n  fsdp_version: 2\nmixed_precision: 'bf16'\nnum_machines: 2\n"
        "num_processes: 8\ndowncast_bf16: 'no'\n"
    )
    job, said = job_of(folder, capfd, "accelerate launch --config_file cfg.yaml train.py\n", cfg_yaml=config)
    assert "resources:\n  nodes: 2\nlaunch:\n  nproc_per_node: 4\n" in job
    assert "  variables:\n    ACCELERATE_MIXED_PRECISION: bf16" in job
    assert "  start.sh:1: distributed_type: FSDP of --config_file: give it to Accelerator() in the script\n" in said
    assert "  start.sh:1: fsdp_config: of --config_file: give it to Accelerator() in the script\n" in said
    assert said.count("--config_file: give it to") == 2
    options = "--config_file cfg.yaml --mixed_precision fp16 --num_processes 6"
    job, _ = job_of(folder, capfd, f"accelerate launch {options} train.py\n")
    assert "resources:\n  nodes: 2\nlaunch:\n  nproc_per_node: 3\n" in job
    assert "ACCELERATE_MIXED_PRECISION: fp16" in job


def test_a_script_that_takes_the_training_as_its_arguments_names_none(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job, said = job_of(folder, capfd, 'torchrun --standalone --nproc-per-node=2 "$@"\n')
    assert job == "launch:\n  nproc_per_node: 2"
    assert "  start.sh:1: $@: the script's own arguments: add them to args\n" in said
    assert "job.yaml does not work yet: the job has no script, module or binary" in said


@pytest.mark.parametrize("rank", ["$1", "$RANK", "${NODE:-0}"])
def test_the_node_rank_of_each_machine_is_typed(folder: Path, capfd: pytest.CaptureFixture[str], rank: str) -> None:
    script = f"torchrun --nnodes=2 --nproc-per-node=4 --node-rank={rank} --master-addr=gpu1 train.py\n"
    job, said = job_of(folder, capfd, script)
    assert job == "script: train.py\nresources:\n  nodes: 2\nlaunch:\n  nproc_per_node: 4"
    shown = rank.replace("{NODE:-0}", "NODE")
    assert f"  start.sh:1: --node-rank={shown} is N of allranks node … --node-rank N on each machine\n" in said
    assert "does not work yet" not in said


def test_a_range_of_nodes_in_a_job_of_one_node_is_that_node(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = "torchrun --nnodes=1:2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=localhost:6000 train.py"
    job, _ = job_of(folder, capfd, f"#!/bin/bash\n#SBATCH --gres=gpu:4\n#SBATCH --time=1:00:00\n{run}\n")
    assert "  nodes: " not in job


def test_arguments_of_a_function_that_are_not_known_are_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text('train() { torchrun --standalone train.py "$@"; }\n"$1" train --lr 0.1\n')
    assert typed("start.sh") == 1
    assert "  start.sh:1: $@: train's arguments: add them to args\n" in capfd.readouterr().err


def test_a_default_is_named_and_a_secret_is_not_shown(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        "export API_KEY=${API_KEY:-abcdefgh}\nLR=${LR:-0.1}\ntorchrun --standalone train.py --lr $LR\n"
    )
    assert typed("start.sh") == 0
    said = capfd.readouterr()
    assert 'args: ["--lr", "0.1"]' in said.out
    assert "  start.sh:2: LR is 0.1, its default: the job does not read it from your shell\n" in said.err
    assert "  start.sh:1: API_KEY is <secret>, its default: the job does not read it from your shell\n" in said.err
    assert "abcdefgh" not in said.out


@pytest.mark.parametrize("value", ["abc123", "hf_0123456789abcdef0123"])
def test_a_secret_is_a_fault_if_lint_finds_it_and_is_to_be_exported(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    script = f"export HF_TOKEN={value}\ntorchrun --standalone train.py\n"
    (folder / "start.sh").write_text(script)
    found = [finding.rule.code for finding in lint("start.sh", script.encode())]
    assert typed("start.sh", "-o", "jobs") == 0
    said = capfd.readouterr().err
    assert "  start.sh:1: the value of HF_TOKEN is not taken over: it comes from where you type allranks run\n" in said
    assert ("AR901" in said) is ("AR901" in found) is (value != "abc123")
    assert "AR901 is still there" not in said
    assert said.endswith("next: export HF_TOKEN=...\nnext: allranks plan jobs/job.yaml\n")
    monkeypatch.setenv("HF_TOKEN", "x" * 20)
    assert typed("start.sh", "-o", "jobs", "--force") == 0
    assert "next: export" not in capfd.readouterr().err


def test_a_second_call_of_a_function_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        'train() { torchrun --standalone train.py --lr "$@"; }\ntrain 0.1\ntrain 0.1\ntrain 0.2\n'
    )
    assert typed("start.sh") == 0
    said = capfd.readouterr()
    assert 'args: ["--lr", "0.1"]' in said.out
    assert [line for line in said.err.splitlines() if "another training" in line] == [
        "  start.sh:4: another training: train 0.2"
    ]


def test_a_job_is_requeued_where_the_ranks_say_so(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1 --signal=B:USR1@90\nsrun python train.py\n")
    assert typed("train.sbatch") == 0
    said = "--signal=B:USR1@90: the ranks get SIGUSR1 to save, and the job is requeued if they then exit with 75"
    assert (
        f"\nchanged (it was a fault, or has another form here):\n  train.sbatch:2: {said}\n" in capfd.readouterr().err
    )


def test_directives_that_the_scheduler_ignores_are_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        '#!/bin/bash\nif [ -n "$BIG" ]; then\n#SBATCH --array=0-7\n  N=2\nelse\n  N=1\n#SBATCH --array=0-3\nfi\n'
        "cat <<EOF\n#SBATCH --array=0-9\nEOF\n#SBATCH --gpus-per-node=2\nsrun torchrun --standalone train.py\n"
    )
    job, said = job_of(folder, capfd, script)
    what = "after the first command, where the scheduler ignores it: write what is meant into this file"
    assert [line.strip() for line in said.splitlines() if "the scheduler ignores it" in line] == [
        f"start.sh:3: #SBATCH --array=0-7: under a condition, {what}",
        f"start.sh:7: #SBATCH --array=0-3: under a condition, {what}",
        f"start.sh:12: --gpus-per-node=2: {what} (AR401)",
    ]
    assert "cluster: slurm" in job
    assert "array" not in job.partition("# Not taken over")[0]


def test_what_may_differ_from_rank_to_rank_is_not_computed_by_each(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = (
        "#!/bin/bash\n#SBATCH --array=0-3 --nodes=1 --time=1:00:00\nNAME=$SLURM_ARRAY_TASK_ID-$(mktemp)\n"
        "srun torchrun --standalone train.py --name $NAME\n"
    )
    (folder / "start.sh").write_text(script)
    assert typed("start.sh") == 1
    assert "  start.sh:4: $(mktemp): its value is not in the script; write it into args\n" in capfd.readouterr().err


def test_what_removes_a_directory_is_kept_with_what_names_it_or_not_at_all(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the lines that set its variables, this would remove all of ``runs``."""
    script = 'if [ -z "$1" ]; then\n  OUT=a\nelse\n  OUT=$1\nfi\nrm -rf "runs/$OUT"\ntorchrun --standalone train.py\n'
    job, said = job_of(folder, capfd, script)
    what = 'start.sh:6: rm -rf "runs/$OUT": it reads $1 of the script: give the value behind --'
    assert f"  {what}\n" in said
    assert "setup" not in job
    job, said = job_of(folder, capfd, script.replace("$1", "$NAME"))
    setup = '  setup:\n    - |\n      if [ -z "$NAME" ]; then\n        OUT=a\n      else\n        OUT=$NAME\n      fi\n'
    assert job.endswith(f'environment:\n{setup}    - "rm -rf \\"runs/$OUT\\""')
    assert "not taken over" not in said


def test_the_place_of_a_batch_script_is_no_place_of_a_job(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = ('export A="$(dirname $0)/..":$A\n', 'B="$(dirname $0)/..":$B ', "")
    script = "#!/bin/bash\n#SBATCH --nodes=1 --time=1:00:00\n{}{}torchrun --standalone train.py\n"
    job, said = job_of(folder, capfd, script.format(*lines))
    what = "in a job $0 is the scheduler's copy of the script, in a directory of its own: write the one that is meant"
    assert [line for line in said.splitlines() if "in a job $0" in line] == [
        f'  start.sh:3: export A="$(dirname $0)/..":$A: {what}',
        f'  start.sh:4: B="$(dirname $0)/..":$B: {what}',
    ]
    assert "environment" not in job
