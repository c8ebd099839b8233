"""Files that a script sources or runs are read with it, where they lie below its directory; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.lint.engine import lint
from allranks.lint.files import LARGEST
from allranks.lint.reading import View, read_scripts

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=1:00:00\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the scripts, in which the commands are typed."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def view(script: str) -> View:
    Path("job.sbatch").write_text(script)
    return read_scripts("job.sbatch", script.encode())[0]


def found(script: str) -> set[tuple[str, str, int]]:
    """Return code, file and line of what is more than a hint."""
    Path("job.sbatch").write_text(script)
    findings = lint("job.sbatch", script.encode())
    return {(each.rule.code, each.path, each.place.line) for each in findings if each.rule.severity != "hint"}


@pytest.mark.parametrize(
    "line",
    [
        "source ./env.sh",
        ". env.sh",
        'source "$SLURM_SUBMIT_DIR/env.sh"',
        'source "$(dirname "$0")/env.sh"',
        'source "${BASH_SOURCE%/*}/env.sh"',
        'source "${BASH_SOURCE[0]%/*}/env.sh"',
        'HERE=$(dirname "$0")\nsource "$HERE/env.sh"',
        'source "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/env.sh"',
        'source "$(cd -- "$(dirname -- "$0")" >/dev/null 2>&1; pwd -P)/env.sh"',
        'source "$(dirname "$(readlink -f "$0")")/env.sh"',
        'source "$(readlink -f "$(dirname "$0")")/env.sh"',
        'cd "$SLURM_SUBMIT_DIR" || exit 1\nsource env.sh',
        'cd "$(dirname "$0")"\nsource env.sh',
        'cd ..\nsource "$SLURM_SUBMIT_DIR/env.sh"',
        "(cd ..; make)\nsource env.sh",
    ],
)
def test_what_a_sourced_file_sets_is_known_afterwards(here: Path, line: str) -> None:
    (here / "env.sh").write_text("RANKS=4\nexport WORDS='--lr 0.1'\n")
    (launch,) = view(f"{line}\ntorchrun --nproc-per-node=$RANKS train.py $WORDS\n").launches
    assert (launch.nproc, [word.value for word in launch.call.rest]) == (4, ["train.py", "--lr", "0.1"])


@pytest.mark.parametrize(
    "line",
    [
        'ROOT=$(cd "$(dirname "$0")/.." && pwd)\nsource $ROOT/env.sh',
        "source $(dirname $(which python))/env.sh",
        "source $(dirname $(dirname $0))/env.sh",
        "source $(cd /data && pwd)/env.sh",
        "cd sub\nsource ./env.sh",
        "cd sub; cd $PWD; source $PWD/env.sh",
        "mkdir -p sub && cd sub\nsource env.sh",
        'cd "$DATA"; bash -c "source env.sh"',
        "cd; bash env.sh",
    ],
)
def test_a_file_of_another_directory_is_not_taken_for_the_one_here(here: Path, line: str) -> None:
    (here / "env.sh").write_text("torchrun --standalone other.py\n")
    assert view(f"{line}\n").launches == []


def test_an_environment_of_python_is_not_read(here: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "venv"], check=True)
    conda = here / "miniconda3" / "etc" / "profile.d"
    conda.mkdir(parents=True)
    (here / "miniconda3" / "conda-meta").mkdir()
    (conda / "conda.sh").write_text("export CONDA_EXE=/opt/conda/bin/conda\n")
    script = view("source venv/bin/activate\nsource miniconda3/etc/profile.d/conda.sh\n").script
    assert ([file.path for file in script.text.files], script.assignments) == (["job.sbatch"], [])


def test_a_function_of_a_sourced_file_has_its_faults_there(here: Path) -> None:
    (here / "common.sh").write_text('launch() {\n  srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID "$@"\n}\n')
    assert ("AR101", "common.sh", 2) in found(f"{HEAD}. ./common.sh\nlaunch train.py\n")


def test_a_fault_is_told_by_file_and_line_and_once(here: Path, allranks: Any) -> None:
    (allranks.folder / "env.sh").write_text("# ours\nexport WANDB_API_KEY=1234567890abcdef1234567890abcdef12345678\n")
    (allranks.folder / "job.sh").write_text("source env.sh\nsource env.sh\ntorchrun --standalone train.py\n")
    done = allranks("lint", ".")
    assert [line.split(" ")[:2] for line in done.stdout.splitlines() if "AR901" in line and "see:" not in line] == [
        ["env.sh:2:8:", "AR901"]
    ]


def test_a_comment_in_a_sourced_file_leaves_a_finding_out(here: Path) -> None:
    (here / "env.sh").write_text("export NCCL_DEBUG=INFOO\n")
    assert found(f"{HEAD}source env.sh\n") == {("AR505", "env.sh", 1)}
    (here / "env.sh").write_text("export NCCL_DEBUG=INFOO  # allranks: ignore\n")
    assert found(f"{HEAD}source env.sh\n") == set()


@pytest.mark.parametrize(
    "starter", ["srun ./node.sh 4", "srun bash node.sh 4", "bash ./node.sh 4", "srun bash -x node.sh 4"]
)
def test_a_script_that_is_run_is_read_with_its_arguments(here: Path, starter: str) -> None:
    (here / "node.sh").write_text('torchrun --nproc-per-node=$1 --node-rank=$SLURM_NODEID train.py "$@"\n')
    (launch,) = view(f"{HEAD}{starter}\n").launches
    assert (launch.nproc, [word.value for word in launch.call.rest]) == (4, ["train.py", "4"])


def test_a_node_rank_that_the_batch_shell_gives_to_a_script_is_found(here: Path) -> None:
    (here / "node.sh").write_text("torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$1 --master-addr=n1 train.py\n")
    assert "AR101" in {code for code, _, _ in found(f"{HEAD}srun bash node.sh $SLURM_NODEID\n")}
    (here / "node.sh").write_text(
        "torchrun --nnodes=2 --nproc-per-node=4 --node-rank=$SLURM_NODEID --master-addr=n1 train.py\n"
    )
    assert "AR101" not in {code for code, _, _ in found(f"{HEAD}srun bash node.sh\n")}


def test_a_script_gets_exported_variables_and_keeps_its_own(here: Path) -> None:
    (here / "node.sh").write_text("LATER=3\ntorchrun --nproc-per-node=$EXPORTED train.py $OWN\n")
    script = "export EXPORTED=2\nOWN=1\nbash node.sh\ntorchrun --nproc-per-node=4 fit.py $LATER\n"
    there, here_ = view(script).launches
    assert (there.nproc, there.call.rest[1].value) == (2, None)
    assert here_.call.rest[1].value is None


@pytest.mark.parametrize(
    ("node", "start", "words"),
    [
        ('torchrun train.py "$@"', "bash node.sh", ["train.py"]),
        ('torchrun train.py "$@"', "bash node.sh 3 4", ["train.py", "3", "4"]),
        ("shift\ntorchrun train.py $1", "bash node.sh 3 4", ["train.py", "4"]),
        ("shift 2\ntorchrun train.py $1", "bash node.sh 3 4 5", ["train.py", None]),
        ("set -- --lr 1\ntorchrun train.py $1", "bash node.sh 3", ["train.py", None]),
        ("while [ $1 ]; do torchrun train.py $1; shift; done", "bash node.sh 3 4", ["train.py", None]),
        ("run() { torchrun train.py $1; }\nrun 7", "bash node.sh 3", ["train.py", None]),
        ("bash -c 'torchrun train.py $1' - 7", "bash node.sh 3", ["train.py", None]),
        ("torchrun train.py $N", "export N=4\nN=2 srun bash node.sh", ["train.py", "2"]),
        ("torchrun train.py $N", "export N=4\nsrun env N=2 bash node.sh", ["train.py", "2"]),
        ("torchrun train.py $N", "export N=4\nN=2 pbsdsh bash node.sh", ["train.py", None]),
        ("N=2 bash -c 'torchrun train.py $N'\nN=3", "export N=4\nbash node.sh", ["train.py", "2"]),
    ],
)
def test_a_script_gets_the_arguments_and_variables_of_its_call(
    here: Path, node: str, start: str, words: list[str | None]
) -> None:
    (here / "node.sh").write_text(f"{node}\n")
    (launch,) = view(f"{start}\n").launches
    assert [word.value for word in launch.call.rest] == words


JOB = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=1:00:00\nsrun torchrun --nnodes=$1 "


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("sbatch train.sbatch 2", set()),
        ("sbatch train.sbatch 4", {("AR307", "train.sbatch", 3)}),
        ("sbatch --nodes=4 train.sbatch 4", set()),
        ("sbatch -N 4 train.sbatch 2", {("AR307", "train.sbatch", 3)}),
        ("for n in 2 4; do sbatch --nodes=$n train.sbatch 4; done", set()),
        ("sbatch --export=NONE train.sbatch 4", {("AR307", "train.sbatch", 3), ("AR424", "job.sbatch", 1)}),
    ],
)
def test_a_script_that_is_submitted_is_read_with_what_it_is_given(
    here: Path, command: str, codes: set[tuple[str, str, int]]
) -> None:
    rest = '--nproc-per-node=4 --rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint="$MASTER:29511" train.py'
    (here / "train.sbatch").write_text(f"{JOB}{rest}\n")
    assert found(f"{command}\n") == codes


def test_a_job_that_submits_itself_is_read_once(here: Path) -> None:
    (here / "next.sh").write_text("#!/bin/bash\n#SBATCH --time=24h\nsrun python train.py\nsbatch job.sbatch\n")
    script = f"{HEAD}srun python train.py\nsbatch $0\nsbatch job.sbatch\nsbatch next.sh\nsbatch next.sh\n"
    assert found(script) == {("AR428", "next.sh", 2)}
    assert [each.script.path for each in read_scripts("job.sbatch", script.encode())] == ["job.sbatch", "next.sh"]


def test_a_script_for_pbs_that_is_submitted_is_read(here: Path) -> None:
    (here / "train.pbs").write_text("#!/bin/bash\n#PBS -l select=1 -l select=2\ntrue\n")
    assert found("qsub -N one -v A=1 train.pbs\n") == {("AR413", "train.pbs", 2)}
    assert found("qsub -l select=2 train.pbs\n") == set()  # Which one counts is not in the script.


def test_a_condition_around_a_script_is_none_in_it(here: Path) -> None:
    (here / "node.sh").write_text("torchrun train.py\n")
    (launch,) = view("if true; then bash node.sh; fi\n").launches
    assert not launch.command.context.is_conditional


def test_what_pbsdsh_starts_has_no_variables_of_the_script(here: Path) -> None:
    (here / "node.sh").write_text("torchrun --nnodes=2 --node-rank=$PBS_NODENUM --master-addr=$MASTER_ADDR train.py\n")
    script = (
        "#!/bin/bash\n#PBS -l select=2:ncpus=8:ngpus=4\nexport MASTER_ADDR=n1\npbsdsh -- bash $PBS_O_WORKDIR/node.sh\n"
    )
    assert ("AR614", "node.sh", 1) in found(script)


def test_a_repair_changes_the_named_file_only(here: Path, allranks: Any) -> None:
    lines = "while read host; do\n  ssh $host 'torchrun --standalone train.py'\ndone < hosts\n"
    (allranks.folder / "loop.sh").write_text(lines)
    (allranks.folder / "job.sh").write_text(f"source ./loop.sh\n{lines}")
    allranks("lint", "--fix", "job.sh")
    assert (allranks.folder / "loop.sh").read_text() == lines
    assert (allranks.folder / "job.sh").read_text() == "source ./loop.sh\n" + lines.replace("ssh $host", "ssh -n $host")


def test_a_fault_of_a_file_that_another_sources_is_repaired_and_gone(allranks: Any) -> None:
    (allranks.folder / "a.sh").write_text("source ./z.sh\ntorchrun --standalone train.py\n")
    (allranks.folder / "z.sh").write_bytes(b"export RANKS=4\r\n")
    done = allranks("lint", ".")
    assert (done.rc, done.stdout.count("AR210 fatal")) == (1, 1)
    assert "next: allranks lint --fix repairs 1 of them" in done.stderr
    done = allranks("lint", "--fix", ".")
    assert (done.rc, (allranks.folder / "z.sh").read_bytes()) == (0, b"export RANKS=4\n")
    assert "AR210" not in done.stdout


def test_windows_line_ends_are_found_in_each_file(here: Path) -> None:
    for name in ("a.sh", "b.sh"):
        (here / name).write_bytes(b"export A=1\nexport B=1\r\n")
    assert {("AR210", "a.sh", 2), ("AR210", "b.sh", 2)} <= found("source a.sh\nsource b.sh\n")


@pytest.mark.parametrize("line", ["source env.sh", "if true; then\n  bash env.sh\nfi"])
def test_a_syntax_error_in_a_sourced_file_is_found_where_that_is_read(here: Path, line: str) -> None:
    (here / "env.sh").write_text("if true; then\n")
    script = f"{line}\n"
    (here / "job.sbatch").write_text(script)
    assert [(each.rule.code, each.place.line, each.what) for each in lint("job.sbatch", script.encode())] == [
        ("AR217", script.count("bash") + 1, "bash cannot read env.sh: line 2: syntax error: unexpected end of file")
    ]


def test_a_file_for_another_shell_has_no_syntax_error_of_bash(here: Path) -> None:
    (here / "env.zsh").write_text("if true; then\n")
    (here / "w.sh").write_text("#!/usr/bin/env python\nx = 1\n")
    assert found('[ -n "$ZSH_VERSION" ] && source env.zsh\nbash w.sh\n./w.sh\n') == set()


def test_a_misspelled_directive_of_a_sourced_file_is_a_comment(here: Path) -> None:
    (here / "env.sh").write_text("#SBTACH --nodes=4\nexport A=1\n")
    assert found(f"{HEAD}source env.sh\n") == set()


def test_a_value_from_a_file_of_the_other_machine_may_be_there(here: Path) -> None:
    torchrun = "torchrun --nnodes=2 --master-addr"
    bad = f"MASTER_ADDR=n1\nHOSTNAME=n1\nssh n2 'BEFORE; {torchrun} $MASTER_ADDR train.py'\n"
    (here / "own.sh").write_text("export A=1\n")
    assert "AR614" in {code for code, _, _ in found(bad.replace("BEFORE", "true"))}
    for line in ("source ./own.sh", "source ~/venv/bin/activate", 'eval "$(conda shell.bash hook)"'):
        assert "AR614" in {code for code, _, _ in found(bad.replace("BEFORE", line))}
    for line in ("source /shared/env.sh", ". /shared/env.sh", 'eval "$(setup)"'):
        assert "AR614" not in {code for code, _, _ in found(bad.replace("BEFORE", line))}
    assert "AR614" not in {code for code, _, _ in found(bad.replace("$MASTER_ADDR", "$HOSTNAME"))}


def test_nothing_outside_the_directory_is_read(here: Path) -> None:
    outside = here.parent / "outside.sh"
    outside.write_text("RANKS=4\n")
    (here / "link.sh").symlink_to(outside)
    for name in ("../outside.sh", str(outside), "link.sh", "/dev/zero", "/dev/stdin"):
        assert [file.path for file in view(f"source {name}\n").script.text.files] == ["job.sbatch"]


def test_what_is_no_script_is_not_read(here: Path) -> None:
    os.mkfifo(here / "pipe.sh")
    (here / "large.sh").write_bytes(b"#\n" * LARGEST)
    (here / "binary.sh").write_bytes(b"RANKS=4\n\0")
    (here / "broken.sh").write_text("RANKS=4\nif true; then\n")
    (here / "folder.sh").mkdir()
    for name in ("pipe.sh", "large.sh", "binary.sh", "broken.sh", "folder.sh", "absent.sh", "$FILE", "a\\\nb.sh"):
        assert [file.path for file in view(f"source {name}\n").script.text.files] == ["job.sbatch"]


def test_files_that_source_each_other_end(here: Path) -> None:
    (here / "a.sh").write_text("source ./b.sh\nexport A=1\n")
    (here / "sub").mkdir()
    (here / "b.sh").write_text("source ./a.sh\nsource ./b.sh\nbash sub/../job.sbatch\nexport B=1\n")
    script = view("source a.sh\n").script
    assert [file.path for file in script.text.files] == ["job.sbatch", "a.sh", "b.sh"]
    assert [each.name for each in script.assignments] == ["B", "A"]


def test_a_script_reads_twenty_others_at_most(here: Path) -> None:
    for number in range(40):
        (here / f"f{number}.sh").write_text(f"source f{(number + 1) % 40}.sh\nsource f{(number + 7) % 40}.sh\n")
    assert len(view("".join(f"source f{number}.sh\n" for number in range(40))).script.text.files) == 21


def test_a_script_from_stdin_reads_no_other(here: Path) -> None:
    (here / "env.sh").write_text("export WANDB_API_KEY=1234567890abcdef1234567890abcdef12345678\n")
    text = "source env.sh\ntorchrun --standalone train.py\n"
    assert {code for code, _, _ in found(text)} == {"AR901"}
    assert [each.rule.code for each in lint("stdin", text.encode()) if each.rule.severity != "hint"] == []
