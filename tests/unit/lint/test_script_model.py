"""What the model knows of a script: values that are followed, and the shell that expands each variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.lint.engine import lint
from allranks.lint.reading import View, read_scripts

HEAD = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\n"
)


def view_of(script: str) -> View:
    return read_scripts("job.sh", script.encode())[0]


def codes(script: str) -> list[str]:
    return [finding.rule.code for finding in lint("job.sh", script.encode()) if finding.rule.severity != "hint"]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("N=4\n", "--nproc-per-node=$N"),
        ("N=2\nM=$((N * 2))\n", "--nproc-per-node=$M"),
        ("ARGS='--nproc-per-node=4'\n", "$ARGS"),
        ("ARGS=(--nproc-per-node 4)\n", '"${ARGS[@]}"'),
        ("ARGS=(--standalone)\nARGS+=(--nproc-per-node=4)\n", '"${ARGS[@]}"'),
        ("if true; then N=4; else N=4; fi\n", "--nproc-per-node=$N"),
        ("", "--nproc-per-node=$SLURM_GPUS_ON_NODE"),
        ("", "\\\n  --nproc-per-node=4"),
    ],
)
def test_a_value_is_followed_to_where_it_is_used(before: str, words: str) -> None:
    (launch,) = view_of(f"{HEAD}{before}torchrun {words} train.py\n").launches
    assert launch.nproc == 4
    assert launch.program is not None
    assert launch.program.value == "train.py"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A/$B/c", "a/b/c"),
        ("$A/$B.py", "a/b.py"),
        ("x$A-$B-c", "xa-b-c"),
        ("${A}/$B/c/$A/d", "a/b/c/a/d"),
        ("$A:$B:c", "a:b:c"),
        ('"$A"/$B/c', "a/b/c"),
        ("$A/$B$A,c", "a/ba,c"),
        ("$A+$B+c", "a+b+c"),
    ],
)
def test_all_variables_of_a_word_are_known(word: str, value: str) -> None:
    script = view_of(f'A=a\nB=b\nD={word}\necho {word} "$D" end\n').script
    (command,) = script.named("echo")
    assert command.values == [value, value, "end"]
    assert [each.name for each in script.commands] == ["echo"]


def test_arguments_of_the_script_behind_a_variable_are_known() -> None:
    script = view_of("echo $A/$1 $A/$2/c $1/$3.py $((A-$4-1))\n").script
    assert [use.name for use in script.uses] == ["A", "1", "A", "2", "1", "3", "A", "4"]
    (command,) = view_of('echo $1_a.txt "$2b"\n').script.named("echo")
    assert [[part.text for part in word.parts] for word in command.args] == [["1", "_a", ".txt"], ["2", "b"]]
    assert [use.name for use in view_of("echo $1_a.txt ${2}_b $10\n").script.uses] == ["1", "2", "1"]


@pytest.mark.parametrize(
    "before",
    [
        "",
        "N=$(nvidia-smi -L | wc -l)\n",
        "if true; then N=4; fi\n",
        "for N in 1 2; do :; done\n",
        "read N\n",
        "f() { N=4; }\n",
    ],
)
def test_a_value_that_is_not_known_is_not_guessed(before: str) -> None:
    (launch,) = view_of(f"{HEAD}{before}torchrun --nproc-per-node=$N train.py\n").launches
    assert launch.nproc is None


@pytest.mark.parametrize(
    "start",
    [
        "srun torchrun train.py",
        "srun --kill-on-bad-exit=1 -l nice -n 5 torchrun train.py",
        "srun bash -c 'torchrun train.py'",
        'CMD="torchrun train.py"\nsrun bash -c "$CMD"',
        "srun singularity exec --nv image.sif bash -lc 'cd /data && torchrun train.py'",
        "srun bash <<'EOF'\ntorchrun train.py\nEOF",
        "srun python -m torch.distributed.run train.py",
        "srun $(which torchrun) train.py",
        "start() {\n  srun torchrun train.py\n}\nstart",
    ],
)
def test_a_launcher_is_found_behind_what_starts_it(start: str) -> None:
    (launch,) = view_of(f"{HEAD}{start}\n").launches
    assert launch.starter is not None
    assert (launch.starter.name, launch.tasks, launch.tasks_per_node) == ("srun", 2, 1)


@pytest.mark.parametrize(
    ("command", "is_early"),
    [
        ("srun torchrun --node-rank=$SLURM_NODEID {}", True),
        ('srun bash -c "torchrun --node-rank=$SLURM_NODEID {}"', True),
        ('srun bash -c "torchrun --node-rank=\\$SLURM_NODEID {}"', False),
        ("srun bash -c 'torchrun --node-rank=$SLURM_NODEID {}'", False),
        ("export R=$SLURM_NODEID\nsrun bash -c 'torchrun --node-rank=$R {}'", True),
        ("srun bash <<EOF\ntorchrun --node-rank=$SLURM_NODEID {}\nEOF", True),
        ("srun bash <<'EOF'\ntorchrun --node-rank=$SLURM_NODEID {}\nEOF", False),
    ],
)
def test_the_shell_that_expands_a_variable_is_known(command: str, is_early: bool) -> None:
    rest = "--nnodes=2 --nproc-per-node=4 --master-addr=gpu1 train.py"
    assert codes(f"{HEAD}{command.format(rest)}\n") == (["AR101"] if is_early else [])


def test_directives_in_a_here_document_are_those_of_the_script_that_is_written() -> None:
    inner = HEAD + "torchrun --nproc-per-node=8 train.py\n"
    script = f"#!/bin/bash\nfor seed in 1 2; do\ncat > job.sh <<'EOF'\n{inner}EOF\nsbatch job.sh $seed\ndone\n"
    outer, written = read_scripts("submit.sh", script.encode())
    assert (outer.script.kind, outer.script.directives) == ("plain", [])
    assert (written.script.kind, written.resources.nodes, written.resources.gpus) == ("slurm", 2, 4)
    found = {(finding.rule.code, finding.place.line) for finding in lint("submit.sh", script.encode())}
    assert {("AR103", 9), ("AR106", 9)} <= found
    assert "AR401" not in {code for code, _ in found}


def test_chunks_of_a_job_that_starts_no_ranks_may_share_a_node() -> None:
    assert codes("#!/bin/bash\n#PBS -l select=12:ncpus=1\n#PBS -l walltime=1:00:00\nray-start.sh tune.py\n") == []


GOLDEN = sorted(
    path
    for path in (Path(__file__).parents[2] / "golden").rglob("*")
    if path.suffix in (".sh", ".sbatch", ".pbs", ".sge", ".qsub")
)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_that_allranks_writes_get_no_more_than_hints(path: Path) -> None:
    assert codes(path.read_text(encoding="utf-8")) == []


def test_columns_count_characters() -> None:
    (finding,) = lint("job.sh", "echo 'ä€𝄞'; torchrun --standalone --nproc-per-nodes=4 train.py\n".encode())
    assert (finding.place.line, finding.place.column) == (1, 35)
