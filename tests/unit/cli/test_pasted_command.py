"""A launcher's command line that is pasted after ``allranks run``: one answer, which is our command for it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from allranks.cli.main import cli
from allranks.errors import UsageError


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        (
            "torchrun --standalone --nproc-per-node 2 train.py --epochs 1",
            "torchrun is a launcher",
            "train.py --nproc-per-node 2 -- --epochs 1",
        ),
        (
            "--debug -- torchrun --nproc_per_node=gpu -m pkg.train 'a b'",
            "torchrun is a launcher",
            "-m pkg.train --debug -- 'a b'",
        ),
        (
            "--nodes 1 --no_warm /opt/venv/bin/python -u train.py --lr 1 -- x",
            "python is an interpreter",
            "train.py --nodes 1 --no_warm --python /opt/venv/bin/python -- --lr 1 -- x",
        ),
        (
            "python3 -m torch.distributed.run --nnodes 2:4 --nproc-per-node 2 train.py",
            "python3 -m torch.distributed.run is a launcher",
            "train.py --nodes 2:4 --nproc-per-node 2",
        ),
        (
            "srun -N 2 -p gpu --ntasks-per-node 4 python train.py",
            "srun is a launcher",
            "train.py --on slurm --partition gpu --nodes 2 --nproc-per-node 4",
        ),
        (
            "mpirun -np 4 -x LEVEL=2 -x API_TOKEN=hidden python train.py",
            "mpirun is a launcher",
            "train.py --env LEVEL=2 --env API_TOKEN --nproc-per-node 4",
        ),
        (
            "accelerate launch --num_processes 2 train.py -a",
            "accelerate launch is a launcher",
            "train.py --nproc-per-node 2 -- -a",
        ),
        ("deepspeed --num_gpus 2 train.py", "deepspeed is a launcher", "train.py --nproc-per-node 2"),
        (
            "--no-warm A='x y' torchrun train.py",
            "torchrun is a launcher",
            "train.py --no-warm --nproc-per-node 1 --env 'A=x y'",
        ),
        ("--env A=1 torchrun train.py", "torchrun is a launcher", "train.py --env A=1 --nproc-per-node 1"),
        ("torchrun --unknown 3 train.py", "torchrun is a launcher", "train.py --nproc-per-node N -- ..."),
        ("torchrun", "torchrun is a launcher", "train.py --nproc-per-node N -- ..."),
        ("python -c 'print(1)'", "python is an interpreter", "train.py --nproc-per-node N -- ..."),
    ],
)
def test_a_pasted_line_is_answered_by_our_command_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, what: str, fix: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        cli.main(["run", *shlex.split(line)], prog_name="allranks", standalone_mode=False)
    assert (caught.value.what, caught.value.fix) == (f"{what}, not a script", f"allranks run {fix}")


@pytest.mark.parametrize("words", [["--launcher", "torchrun", "gone.py"], ["torchrun"], ["gone.py", "--", "python"]])
def test_a_launchers_name_may_be_a_value_a_script_or_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchrun").write_text("x = (\n")
    with pytest.raises(UsageError, match=r"there is no script gone\.py|torchrun:1 is not valid"):
        cli.main(["plan", *words], prog_name="allranks", standalone_mode=False)
