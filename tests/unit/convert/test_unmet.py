"""What a script that is verified is run without: its arguments, variables and files."""

# ruff: noqa: E501 - scripts as they are written

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verifying import NAMESPACES, ONE, typed

from allranks.cli import convert

pytestmark = NAMESPACES


OWN = {
    "by number": (
        'if [ $# -lt 2 ]; then exit 1; fi\nLR=$1\nexport NAME=$2\ntorchrun --standalone --nproc-per-node=2 train.py --lr $LR --name "$2" --seed ${3:-7}\n',
        ["0.1", "a b", "9"],
    ),
    "all but the first ones": (
        "CFG=$1\nGPUS=$2\ntorchrun --standalone --nproc-per-node=$GPUS train.py $CFG ${@:3}\n",
        ["c.py", "2", "--x", "3"],
    ),
    "all after a shift": (
        'GPUS=$1\nshift\ntorchrun --standalone --nproc-per-node=$GPUS train.py "$1" "$@"\n',
        ["2", "--x", "3"],
    ),
    "of a batch": (f'{ONE}srun torchrun --standalone --nproc-per-node=$1 train.py "$@"\n', ["4", "--x"]),
}


@pytest.mark.parametrize("name", OWN)
def test_arguments_of_the_script_are_given_behind_hyphens(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    script, arguments = OWN[name]
    (folder / "start.sh").write_text(script)
    code = convert.command.main(["start.sh", "--verify", "--", *arguments], standalone_mode=False)
    said = capfd.readouterr().err
    assert "start.sh: verified: " in said, said
    assert "rank, local rank, world size and host" in said
    assert "arguments" in said.partition("start.sh: verified: ")[2].partition("\n")[0]
    assert "not taken over" not in said
    assert "was read without" not in said
    assert code == 0


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        (
            "if [ $# -lt 2 ]; then exit 1; fi\nLR=$1\ntorchrun --standalone train.py --lr $LR --name $2 --seed ${3:-7}\n",
            2,
        ),
        ("CFG=${1:?which one}\ntorchrun --standalone train.py $CFG\n", 1),
        ("A=$1\nshift\ntorchrun --standalone train.py $A $1\n", 2),
        ("run() { python train.py $1; }\nrun a\ntorchrun --standalone train.py ${1:-a}\n", 0),
    ],
)
def test_arguments_that_the_script_is_run_without_are_named(
    folder: Path, capfd: pytest.CaptureFixture[str], script: str, missing: int
) -> None:
    (folder / "start.sh").write_text(script)
    typed("start.sh")
    found = capfd.readouterr().err.splitlines()
    notes = [line for line in found if "was read without" in line or line.startswith("  fix: ")]
    values = " ".join(f"VALUE{number}" for number in range(1, missing + 1))
    names = " and ".join(f"${number}" for number in range(1, missing + 1))
    assert (
        notes
        == [
            f"note: start.sh was read without its arguments {names}",
            f"  fix: allranks convert start.sh --verify -- {values}",
        ][: 2 * bool(missing)]
    )


CAUSES = {
    "an argument": (
        'if [ -z "$1" ]; then echo usage; exit 1; fi\npython train.py $1\n',
        "the script starts no rank without its arguments $1",
        "",
    ),
    "an argument that is the program": (
        "python $1/train.py\n",
        "the script was run without its arguments $1",
        "",
    ),
    "a variable that the script asks for": (
        "echo $OTHER_OF_NOBODY\n: ${DATA_OF_NOBODY:?where is it}\npython train.py\n",
        "the script ended before its training: its last output is start.sh: line 2: DATA_OF_NOBODY: where is it; it reads "
        "DATA_OF_NOBODY, which is set neither in it nor here",
        "DATA_OF_NOBODY=VALUE allranks convert start.sh --verify",
    ),
    "a variable that is not bound": (
        "set -u\ntorchrun --standalone --nproc-per-node=$COUNT_OF_NOBODY train.py\n",
        "the script ended before its training: its last output is start.sh: line 2: COUNT_OF_NOBODY: unbound variable; it "
        "reads COUNT_OF_NOBODY, which is set neither in it nor here",
        "COUNT_OF_NOBODY=VALUE allranks convert start.sh --verify",
    ),
    "a file of accelerate": (
        "python prepare.py\naccelerate launch --config_file conf/a.yaml train.py\n",
        "the script needs the file WORK/conf/a.yaml, which is not here",
        "put it there, and convert start.sh again",
    ),
    "a file of accelerate, with the errors sent elsewhere": (
        "nohup accelerate launch --config_file conf/a.yaml train.py > log.txt 2>&1 &\n",
        "the script needs the file of accelerate --config_file conf/a.yaml, which is not here",
        "put it there, and convert start.sh again",
    ),
    "another branch": (
        'if [ "${HOW:-}" = "" ]; then\n  python prepare.py\nelse\n  echo $HOW\n  torchrun --standalone train.py\nfi\n',
        "here the script starts WORK/prepare.py, and not the training, which is under a condition",
        "",
    ),
    "a place holder": (
        "A=1\nDATA=<the path>\necho $A\ntorchrun --standalone train.py\n",
        "bash cannot read the script: line 2: syntax error near unexpected token `newline'",
        "bash -n start.sh shows more",
    ),
    "the allocation that it is run in": (
        "srun -n 2 -c$SLURM_CPUS_PER_TASK -o log.txt python train.py\n",
        "the script reads SLURM_CPUS_PER_TASK, which only jobs of a scheduler have, and is none",
        "",
    ),
    "a script": (
        "mpirun -np 2 bash steps/wrap.sh python train.py\n",
        "the script runs WORK/steps/wrap.sh, which is not here",
        "put it there, and convert start.sh again",
    ),
    "what set -x does not hide": (
        "set -x\necho 'no data'\nexit 1\ntorchrun --standalone train.py\n",
        "the script ended before its training: its last output is no data",
        "",
    ),
    "a variable of Slurm": (
        f"{ONE}set -e\nN=$(expr 2 \\* $SLURM_NTASKS_PER_GPU)\ntorchrun --standalone --nproc-per-node=$N train.py\n",
        "the script ended before its training: its last output is expr: syntax error: missing argument after '*'; it reads "
        "SLURM_NTASKS_PER_GPU, which is set neither in it nor here",
        "",
    ),
    "a line of the set-up": (
        "echo made && rm made_by_hand.txt\ntorchrun --standalone --nproc-per-node=2 train.py\n",
        "a line of the set-up fails in the sandbox, and the script went on: rm made_by_hand.txt (exit code 1)",
        "",
    ),
    "something else": (
        "echo 'no data'\nexit 1\ntorchrun --standalone train.py\n",
        "the script ended before its training: its last output is no data",
        "",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_why_a_script_starts_no_rank_is_named(folder: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    script, cause, fix = CAUSES[name]
    (folder / "$1").mkdir()
    (folder / "$1/train.py").touch()
    (folder / "start.sh").write_text(script)
    assert typed("start.sh", "--json") == 1
    said = capfd.readouterr()
    cause = cause.replace("WORK", str(folder))
    assert f"start.sh: not verified: {cause}\n" in said.err
    assert [each["cause"] for each in json.loads(said.out)["scripts"]] == [cause]
    assert not fix or f"\n  fix: {fix}\n" in said.err


def test_what_runs_beside_the_training_is_no_line_of_the_setup(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text("python prepare.py --serve &\npython train.py\n")
    assert typed("start.sh") == 0
    said = capfd.readouterr()
    assert "setup" not in said.out
    what = "not taken over: python prepare.py --serve: it runs beside the training: start it by hand"
    assert f"  wanted: another command: {folder}/prepare.py --serve -> nothing\n    {what}\n" in said.err


def test_a_variable_of_a_loop_before_a_launcher_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        "for seed in 1 2; do\n  SEED=$seed torchrun --standalone --nproc-per-node=2 train.py\ndone\n"
    )
    assert typed("start.sh") == 1
    said = capfd.readouterr()
    assert "SEED=$seed" not in said.out.partition("# Not taken over")[0]
    what = "SEED=$seed: its value is not in the script; write it into environment.variables"
    assert f"start.sh:2: {what}\n" in said.out + said.err


def test_a_default_that_is_not_known_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "start.sh").write_text(
        "TO=${OUT_OF_NOBODY:-$(mktemp)/a}\n: ${DIR_OF_NOBODY:=$PWD/b}\npython train.py --to $TO --dir $DIR_OF_NOBODY\n"
    )
    assert typed("start.sh") == 1
    said = capfd.readouterr().err
    assert "start.sh:3: $OUT_OF_NOBODY: its default is not known here; write its value into args\n" in said
    assert "start.sh:3: $DIR_OF_NOBODY: its value is not in the script; write it into args\n" in said
    assert "DIFFERS" not in said


def test_a_launcher_below_a_directory_that_is_not_known_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "start.sh").write_text("$(dirname $(mktemp))/bin/torchrun --standalone --nproc-per-node=2 train.py\n")
    typed("start.sh")
    assert "/bin/torchrun: environment.python expands no variables\n" in capfd.readouterr().err
