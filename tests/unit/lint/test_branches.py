"""Values and launchers that a script chooses with if, case, && or ||."""

from __future__ import annotations

import pytest

from allranks.lint.engine import lint
from allranks.lint.reading import read_scripts

_TWO = (
    "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --time=1:00:00\n"
)
_MEET = "--nnodes=2 --rdzv-id=1 --rdzv-backend=c10d --rdzv-endpoint=gpu1:29511"
_RUN = "srun $LAUNCH train.py\n"


def found(script: str) -> list[tuple[str, int]]:
    findings = lint("job.sh", script.encode())
    return [(finding.rule.code, finding.place.line) for finding in findings if finding.rule.severity != "hint"]


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ('if [ "$DEBUG" = 1 ]; then LAUNCH=python; else LAUNCH="torchrun --nproc-per-node=4"; fi\n', 7),
        ('LAUNCH=python\n[[ -z $DEBUG ]] && LAUNCH="torchrun --nproc-per-node=4"\n', 8),
        ('case $MODE in\nplain) LAUNCH=python;;\n*) LAUNCH="torchrun --nproc-per-node=4";;\nesac\n', 10),
        ('LAUNCH=torchrun\nif [ "$ALL" = 1 ]; then LAUNCH+=" --nproc-per-node=4"; fi\n', 8),
    ],
)
def test_a_fault_of_a_launcher_that_one_branch_chooses_is_found(choice: str, line: int) -> None:
    assert ("AR308", line) in found(_TWO + choice + _RUN)


def test_a_fault_of_an_array_that_one_branch_makes_longer_is_found() -> None:
    choice = 'LAUNCH=(torchrun)\nif [ "$ALL" = 1 ]; then LAUNCH+=(--nproc-per-node=4); fi\n'
    assert ("AR308", 8) in found(f'{_TWO}{choice}srun "${{LAUNCH[@]}}" train.py\n')


def test_a_branch_that_sets_arguments_of_the_script_alone_is_not_read_again() -> None:
    choice = "ARGS=()\nif [ -f last.pt ]; then ARGS+=(--resume last.pt); fi\n"
    script = f'{_TWO}{choice}srun torchrun --nproc-per-node=4 {_MEET} train.py "${{ARGS[@]}}"\n'
    assert read_scripts("job.sh", script.encode())[0].script.branches == {}


@pytest.mark.parametrize(
    "choice",
    [
        f'MODE=all\nif [ $MODE = all ]; then LAUNCH="torchrun --nproc-per-node=4 {_MEET}"; else LAUNCH=torchrun; fi\n',
        f'N=4\nif (( N > 1 )); then LAUNCH="torchrun --nproc-per-node=4 {_MEET}"; else LAUNCH=torchrun; fi\n',
        f'LAUNCH="torchrun --nproc-per-node=4 {_MEET}"\n[ "$SLURM_NNODES" -eq 1 ] && LAUNCH=torchrun\n',
        f'MODE=wide\ncase $MODE in one) LAUNCH=torchrun;; wide) LAUNCH="torchrun --nproc-per-node=4 {_MEET}";; esac\n',
        f'case $1 in wide) LAUNCH="torchrun --nproc-per-node=4 {_MEET}";; *) LAUNCH=torchrun; exit 1;; esac\n',
        f'if [ $1 = one ]; then LAUNCH=torchrun; else LAUNCH="torchrun --nproc-per-node=4 {_MEET}"; fi\n',
        f'if [ $COUNT_NODES -gt 1 ]; then LAUNCH="torchrun --nproc-per-node=4 {_MEET}"; else LAUNCH=torchrun; fi\n',
    ],
)
def test_a_branch_that_is_not_run_is_no_fault(choice: str) -> None:
    assert found(_TWO + choice + _RUN) == []


def test_the_values_that_one_branch_sets_together_stay_together() -> None:
    choice = (
        f"if [ -n \"$WIDE\" ]; then MEET='{_MEET}'; LAUNCH='torchrun --nproc-per-node=4'; "
        "else MEET=; LAUNCH=python; fi\n"
    )
    assert found(f"{_TWO}{choice}srun $LAUNCH $MEET train.py\n") == []


@pytest.mark.parametrize("text", ["python train.py\ndone\n", "NAME=/data/<name>\nOTHER=$NAME/train\npython train.py\n"])
def test_a_syntax_error_that_our_parser_overlooks_is_found(text: str) -> None:
    assert [code for code, _ in found(f"#!/bin/bash\n{text}")] == ["AR217"]


@pytest.mark.parametrize(
    "text", ["for word in do done; do echo $word; done\n", "echo done\n", "printf done >\\\nlog.txt\n"]
)
def test_words_that_look_like_the_end_of_a_statement_are_no_syntax_error(text: str) -> None:
    assert found(f"#!/bin/bash\n{text}") == []
