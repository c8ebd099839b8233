"""Each rule on a script with its fault, and on one without: ``cases/CODE.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from allranks.lint.engine import lint, rule_of
from allranks.lint.reading import read_scripts
from allranks.lint.rules import FAMILIES, RULES
from allranks.lint.rules.base import Rule

CASES = Path(__file__).with_name("cases")


def case(rule: Rule) -> dict[str, Any]:
    return tomllib.loads((CASES / f"{rule.code}.toml").read_text(encoding="utf-8"))


def cases() -> Iterator[Any]:
    """Yield each rule with its first case, and with each of its ``[[more]]``."""
    for rule in RULES:
        shown = case(rule)
        for number, each in enumerate([shown, *shown.get("more", [])]):
            yield pytest.param(rule, each, id=f"{rule.code}-{number}" if number else rule.code)


@pytest.mark.parametrize(("rule", "shown"), [*cases()])
def test_a_rule_finds_its_fault_on_its_line(rule: Rule, shown: dict[str, Any]) -> None:
    found = lint("job.sh", shown["bad"].encode())
    assert (rule.code, shown["line"]) in {(finding.rule.code, finding.place.line) for finding in found}
    others = {finding.rule.code for finding in found if finding.rule.severity != "hint"} - {rule.code}
    assert others == set(shown.get("also", []))


@pytest.mark.parametrize(("rule", "shown"), [*cases()])
def test_a_script_without_the_fault_gets_no_more_than_hints(rule: Rule, shown: dict[str, Any]) -> None:
    found = lint("job.sh", shown["good"].encode())
    assert rule.code not in {finding.rule.code for finding in found}
    assert [finding.what for finding in found if finding.rule.severity != "hint"] == []


def test_the_table_is_complete() -> None:
    codes = [rule.code for rule in RULES]
    assert codes == sorted(set(codes))
    assert len({rule.name for rule in RULES}) == len(codes)
    assert {path.stem for path in CASES.glob("*.toml")} == set(codes)
    for rule in RULES:
        assert re.fullmatch(r"AR[1-9]\d\d", rule.code)
        assert re.fullmatch(r"[a-z0-9-]+", rule.name)
        assert rule.code[2] in FAMILIES
        assert rule.source


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_sentences_are_filled_in(rule: Rule) -> None:
    for finding in lint("job.sh", case(rule)["bad"].encode(), [rule]):
        assert finding.what
        assert finding.fix
        assert not re.search(r"(?<!\$)\{\w+\}", finding.what + finding.fix)


def test_the_labels_of_public_scripts_name_rules_above_a_hint() -> None:
    rows = [line.split("\t") for line in Path(__file__).with_name("public.tsv").read_text().splitlines()[1:]]
    assert len({(row[0], row[2]) for row in rows}) == len(rows)
    assert all(re.fullmatch(r"[0-9a-f]{40}", row[1]) for row in rows)
    faults = {fault.partition(":")[0] for row in rows for fault in "".join(row[3:]).split()}
    assert faults <= {rule.code for rule in RULES if rule.severity != "hint"}


def test_what_stands_in_a_function_is_not_done_by_the_script() -> None:
    """It waits in a function that it never calls: the job ends, and its ranks with it."""
    script = b"#!/bin/bash\n#SBATCH --time=1:00:00\nsrun python train.py &\nlinger() { sleep 60; }\necho started\n"
    assert ("AR702", 3) in {(finding.rule.code, finding.place.line) for finding in lint("job.sh", script)}


def test_a_syntax_error_is_found_in_the_script_that_is_written() -> None:
    script = b"#!/bin/bash\ncat > j.sh <<'EOF'\n#!/bin/bash\nfor i in 1; do echo $i\nEOF\n"
    assert [finding.what for finding in lint("job.sh", script) if finding.rule.code == "AR217"] == [
        "bash cannot read the script: line 3: syntax error: unexpected end of file"
    ]


def test_the_message_of_a_syntax_error_is_no_warning() -> None:
    script = b"#!/bin/bash\nif true; then\ncat <<EOF\ntext\n"
    assert [finding.what for finding in lint("job.sh", script) if finding.rule.code == "AR217"] == [
        "bash cannot read the script: line 5: syntax error: unexpected end of file"
    ]


@pytest.mark.parametrize(
    "script",
    [
        "PYTHONPATH=.:$PYTHONPATH \\    # where it is\ntorchrun --standalone train.py\n",
        'ARGS=(\n  --size 7 \\ # small\n  --epochs 3\n)\ntorchrun --standalone train.py "${ARGS[@]}"\n',
        "torchrun --standalone \\ # one node\n  train.py\n",
    ],
)
def test_a_backslash_before_a_blank_and_a_comment_is_found(script: str) -> None:
    findings = lint("job.sh", f"#!/bin/bash\n{script}".encode(), [rule_of("AR202")])
    assert [finding.what for finding in findings] == [
        "a backslash before a blank is an argument, and continues no line, and the options from here on are lost"
    ]


@pytest.mark.parametrize("word", ["SBATCH", "!#SBATCH", "#SBARCH", "#SABTCH", "# SBTACH"])
def test_a_directive_that_is_none_is_found(word: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --time=1:00:00\n{word} --nodes=2\nsrun python train.py\n".encode()
    assert ("AR404", 3) in {(finding.rule.code, finding.place.line) for finding in lint("job.sh", script)}


@pytest.mark.parametrize("word", ["# SEARCH", "# SBATCH", "##SBATCH", "# SMALL", "#SETUP"])
def test_a_comment_that_is_no_directive_is_not_found(word: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --time=1:00:00\n{word} --nodes=2\nsrun python train.py\n".encode()
    assert "AR404" not in {finding.rule.code for finding in lint("job.sh", script)}


@pytest.mark.parametrize(
    ("start", "is_found"),
    [
        ("accelerate launch --num_processes 4", True),
        ("deepspeed --num_gpus 4", True),
        ("accelerate launch --cpu --num_processes 4", False),
        ("accelerate launch --num_processes 2", False),
        ("srun accelerate launch --num_machines 2 --machine_rank $SLURM_NODEID --num_processes 4", False),
    ],
)
def test_ranks_of_accelerate_and_deepspeed_are_counted_against_the_gpus(start: str, is_found: bool) -> None:
    script = f"#!/bin/bash\n#SBATCH --gpus-per-node=2\n#SBATCH --time=1:00:00\n{start} train.py\n".encode()
    assert ("AR106" in {finding.rule.code for finding in lint("job.sh", script)}) == is_found


def test_a_first_line_that_is_damaged_is_found() -> None:
    script = b"x#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --time=1:00:00\nsrun python train.py\n"
    assert ("AR403", 1) in {(finding.rule.code, finding.place.line) for finding in lint("job.sh", script)}


def test_accelerate_that_knows_of_one_machine_on_each_of_two_nodes_is_found() -> None:
    script = (
        b"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=1:00:00\nsrun accelerate launch --num_processes 4 train.py\n"
    )
    assert ("AR308", 4) in {(finding.rule.code, finding.place.line) for finding in lint("job.sh", script)}


def test_a_shell_that_reads_kill_commands_made_of_a_list_of_processes_is_found() -> None:
    script = b"""ps -ef | grep "train" | grep -v grep | awk '{print "kill -9 "$2}' | sh\n"""
    assert [finding.rule.code for finding in lint("job.sh", script) if finding.rule.severity != "hint"] == ["AR903"]


def test_gpus_of_the_only_task_of_a_node_are_those_of_the_node() -> None:
    script = b"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-task=2\nsrun torchrun --nproc-per-node=4 train.py\n"
    assert "AR106" in {finding.rule.code for finding in lint("job.sh", script)}


@pytest.mark.parametrize("value", ["24h", "12h30m", "1h30m", "1-12h", "12:00:00h"])
def test_a_time_that_sbatch_refuses_is_found(value: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --time={value}\nsrun python train.py\n".encode()
    assert "AR428" in {finding.rule.code for finding in lint("job.sh", script)}


@pytest.mark.parametrize("value", ["30", "30:00", "1-12", "1-12:00", "1-12:00:00", "UNLIMITED"])
def test_a_time_that_sbatch_takes_is_not_found(value: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --time={value}\nsrun python train.py\n".encode()
    assert "AR428" not in {finding.rule.code for finding in lint("job.sh", script)}


@pytest.mark.parametrize(
    ("directive", "starter", "variable"),
    [
        ("#SBATCH --nodes=2", "srun", "SLURM_NODEID"),
        ("#PBS -l nodes=2:ppn=4", "pbsdsh -u --", "PBS_NODENUM"),
        ("#PBS -l select=2:ngpus=4", "mpirun -npernode 1", "OMPI_COMM_WORLD_RANK"),
        ("#PBS -l select=2:ngpus=4", "mpiexec.hydra -ppn 1", "PMI_RANK"),
        ("#PBS -l select=2:ngpus=4", "", "PBS_NODENUM"),
        ("# two machines", "", "NODE_RANK"),
    ],
)
def test_the_variable_of_a_machines_rank_is_that_of_the_scheduler(directive: str, starter: str, variable: str) -> None:
    run = "accelerate launch --num_machines 2 --num_processes 8 --main_process_ip a train.py"
    found = lint("job.sh", f"#!/bin/bash\n{directive}\n{starter} {run}\n".encode())
    assert [finding.fix for finding in found if finding.rule.code == "AR116"] == [
        f"give --machine_rank on each node, expanded there: bash -c '… --machine_rank ${variable} …'"
    ]


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ("--num_processes 8", {"AR107"}),
        ("--num_processes 8 --num_machines 1", {"AR107"}),
        ("--num_processes 8 --num_machines 2 --machine_rank 0", set[str]()),
        ("--num_processes 16 --num_machines=2 --machine_rank 0", {"AR107"}),
        ("--num_processes 8 --num_machines $N --machine_rank 0", set[str]()),
        ("--num_processes 8 --config_file two_machines.yaml", set[str]()),
        ("--num_processes 8 --config_file c.yaml --num_machines 1", {"AR107"}),
    ],
)
def test_the_ranks_of_accelerate_are_those_of_all_machines(options: str, codes: set[str]) -> None:
    script = f"#!/bin/bash\nCUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch {options} train.py\n"
    assert {each.rule.code for each in lint("job.sh", script.encode())} & {"AR107"} == codes


def test_directives_that_come_too_late_are_counted() -> None:
    script = (
        b"#!/bin/bash\nset -e\n#SBATCH --nodes=8\n#SBATCH --gres=gpu:4\n#SBATCH --time=1:00:00\nsrun python train.py\n"
    )
    assert [finding.what for finding in lint("job.sh", script) if finding.rule.code == "AR401"] == [
        "--nodes=8 and 2 more after the first command: ignored"
    ]


def fatal(script: str) -> set[str]:
    """Return the codes of what is not a hint."""
    found = lint("job.sh", f"#!/bin/bash\n{script}\n".encode())
    return {finding.rule.code for finding in found if finding.rule.severity != "hint"}


GADI = "#PBS -q gpu\n#PBS -l ncpus=96\n#PBS -l ngpus=8\n#PBS -l walltime=1:00:00\n#PBS -l wd\n"


def test_a_pbs_that_counts_gpus_of_all_nodes_starts_the_first_node_only() -> None:
    meet = "--nproc-per-node=4 --master-addr=$(head -n 1 $PBS_NODEFILE) --master-port=12345 train.py"
    assert fatal(f"{GADI}torchrun --nnodes=2 --node-rank=$PBS_NODENUM {meet}") == {"AR103"}
    assert fatal(f"{GADI}pbsdsh -u -- torchrun --nnodes=2 --node-rank=$PBS_NODENUM {meet}") & {"AR103"} == set()
    assert fatal(f"{GADI}torchrun --nnodes=2 --node-rank=1 {meet}") == set()
    assert fatal(f"{GADI}torchrun {meet}") == set()


def test_a_pbs_job_in_its_working_directory_is_not_at_home() -> None:
    assert fatal(f"{GADI}python train.py") == set()
    assert fatal(GADI.replace("#PBS -l wd\n", "") + "python train.py") == {"AR410"}


def test_a_node_that_is_a_job_of_its_own_waits_for_the_others() -> None:
    job = "#SBATCH --nodes=1\n#SBATCH --gpus-per-node=8\n#SBATCH --time=1:00:00\n"
    run = "torchrun --nproc-per-node=8 --nnodes=2 --master-addr=gpu1 --master-port=12345"
    assert fatal(f"{job}{run} --node-rank=1 train.py") == set()
    assert "AR307" in fatal(f"{job}{run} --node-rank=$RANK train.py")


_SERVED = """#!/bin/bash
#SBATCH --gpus-per-node=4
#SBATCH --time=4:00:00
"""
_TRAIN = "torchrun --standalone --nproc-per-node=4 train.py"


@pytest.mark.parametrize(
    ("server", "rest", "name"),
    [
        ("while true; do nvidia-smi; sleep 60; done &", f"{_TRAIN}\nwait", "the loop"),
        ("(while :; do nvidia-smi; sleep 60; done) > log &", f"{_TRAIN}\nwait", "the loop"),
        ("watch_gpus() { while true; do nvidia-smi; sleep 60; done; }\nwatch_gpus &", f"{_TRAIN}\nwait", "the loop"),
        ("srun --overlap nvidia-smi -l 10 > gpus.txt &", f"{_TRAIN} &\nwait", "nvidia-smi"),
        ("ray start --head --block &", f"{_TRAIN}\nwait", "ray"),
        ("python -m http.server 8000 &", f"{_TRAIN} &\nwait", "python"),
        ("trap 'kill $board' EXIT\ntensorboard --logdir runs &\nboard=$!", f"{_TRAIN}\nwait", "tensorboard"),
        ("clean() { kill $!; }\ntrap clean EXIT\ntensorboard --logdir runs &", f"{_TRAIN}\nwait", "tensorboard"),
    ],
)
def test_a_wait_for_what_never_ends_is_found(server: str, rest: str, name: str) -> None:
    found = [each for each in lint("job.sh", f"{_SERVED}{server}\n{rest}\n".encode()) if each.rule.code == "AR718"]
    assert [each.what for each in found] == [
        f"wait without a process id waits for {name} too, which never ends: the job stays until its time limit"
    ]


@pytest.mark.parametrize(
    "script",
    [
        f"while true; do nvidia-smi; kill -0 $$ || break; done &\n{_TRAIN}\nwait",
        f"while kill -0 $$; do nvidia-smi; sleep 60; done &\n{_TRAIN}\nwait",
        f"timeout 1h tensorboard --logdir runs &\n{_TRAIN} &\nwait",
        f"tensorboard --logdir runs &\n{_TRAIN}\nkill %1\nwait",
        f"clean() {{ kill %1; }}\ntensorboard --logdir runs &\n{_TRAIN}\nclean\nwait",
        f"tensorboard --logdir runs &\n{_TRAIN} &\nwait -n",
        "vllm serve model &\nwait",
        "python -m vllm.entrypoints.openai.api_server &\nwait",
        f"ray start --head --block &\n{_TRAIN}\nray stop\nwait",
        f"{_TRAIN} &\nwait",
    ],
)
def test_a_wait_for_what_ends_is_not_found(script: str) -> None:
    assert "AR718" not in {each.rule.code for each in lint("job.sh", f"{_SERVED}{script}\n".encode())}


_NODES = "--nnodes=2"


@pytest.mark.parametrize(
    ("script", "codes"),
    [
        (f"torchrun {_NODES} --node-rank=0 a.py &\ntorchrun {_NODES} --node-rank=1 a.py", set()),
        (f"for i in 0 1; do torchrun {_NODES} --node-rank=$i --master-addr=localhost a.py & done", set()),
        (f"torchrun {_NODES} --node-rank=0 a.py &\nssh b torchrun {_NODES} --node-rank=1 --master-addr=a a", {"AR302"}),
        (f"for i in 0 1; do ssh -n h$i torchrun {_NODES} --node-rank=$i --master-addr=localhost a & done", {"AR301"}),
        ("accelerate launch --machine_rank 0 a.py\naccelerate launch --machine_rank 1 a.py", {"AR327"}),
        ("if [ $1 = 0 ]; then torchrun --nnodes=2 --node-rank=0 --master-addr=a a.py\n"
         "else torchrun --nnodes=2 --node-rank=1 --master-addr=a a.py; fi", set()),
        ("torchrun --nnodes=1 --node-rank=0 a.py\ntorchrun --nnodes=1 --node-rank=1 a.py", set()),
    ],
)  # fmt: skip
def test_nodes_that_one_machine_plays_need_no_address(script: str, codes: set[str]) -> None:
    found = lint("job.sh", f"#!/bin/bash\n{script}\n".encode())
    assert {each.rule.code for each in found if each.rule.severity != "hint"} == codes


@pytest.mark.parametrize(
    ("starter", "names"),
    [
        ("srun $OPTIONS torchrun", ["srun", "torchrun"]),
        ('srun "$@" sh -euc "torchrun', ["srun", "sh", "torchrun"]),
        ("mpiexec.openmpi -n 4 torchrun", ["mpiexec.openmpi", "torchrun"]),
        ("jsrun -n 2 -r 1 -a 1 torchrun", ["jsrun", "torchrun"]),
        ("$PROFILE torchrun", ["", "torchrun"]),
        ("mpiexec -n 4 --ppn 2 -d 8 --cpu-bind depth --env A=1 torchrun", ["mpiexec", "torchrun"]),
        ("srun ./set_gpu.sh torchrun", ["srun", "set_gpu.sh", "torchrun"]),
        ("mpiexec bash set_gpu.sh torchrun", ["mpiexec", "bash", "torchrun"]),
        ("srun /opt/profiler torchrun", ["srun", "profiler", "torchrun"]),
        ("srun singularity_wrapper exec torchrun", ["srun", "singularity_wrapper", "torchrun"]),
        ("$PYTHON -m torch.distributed.run", ["", "torch.distributed.run"]),
    ],
)
def test_a_launcher_behind_options_that_are_not_known_is_found(starter: str, names: list[str]) -> None:
    end = '"' if '"torchrun' in starter else ""
    (launch,) = read_scripts("job.sh", f"{starter} --nnodes=2 train.py{end}\n".encode())[0].launches
    assert [each.name for each in (*launch.command.context.via, launch.command)] == names
    assert launch.tasks is None or starter.startswith("mpiexec")


@pytest.mark.parametrize("line", ["srun which python", "srun echo python train.py", "bash set_gpu.sh python train.py"])
def test_a_word_that_names_python_starts_none(line: str) -> None:
    assert read_scripts("job.sh", f"{line}\n".encode())[0].launches == []


def test_an_option_of_a_plugin_of_the_site_may_be_known_to_sbatch() -> None:
    head = "#!/bin/bash\n#SBATCH --time=1:00:00 --image=nersc/pytorch --module=gpu --quotatype=auto --framework=torch\n"
    assert [
        each.what for each in lint("job.sh", f"{head}srun python train.py\n".encode()) if "option" in each.what
    ] == []


def test_a_list_of_nvidia_smi_that_is_killed_is_found() -> None:
    script = b"#!/bin/bash\nnvidia-smi --query-compute-apps=pid --format=csv,noheader | xargs -r kill -9\n"
    assert [(each.rule.code, each.place.line) for each in lint("job.sh", script)] == [("AR904", 2)]


@pytest.mark.parametrize("option", ["--lr=1", '--name="a b"', "--lr 1", "-v"])
def test_an_option_that_a_blank_after_the_backslash_cuts_off_is_found(option: str) -> None:
    script = f"torchrun --standalone --nproc-per-node=2 train.py \\ \n    {option} \\\n    --more=2\n"
    found = [each for each in lint("job.sh", script.encode()) if each.rule.code == "AR202"]
    assert [(each.place.line, each.place.column) for each in found] == [(2, 5)]


@pytest.mark.parametrize(("end", "codes"), [("&", {"AR702"}), ("&\nwait", set()), ("", set())])
def test_a_step_in_the_background_is_awaited(end: str, codes: set[str]) -> None:
    found = lint("job.sh", f"#!/bin/bash\n#SBATCH --time=1:00:00\nsrun --label finetune.sh $@ {end}\n".encode())
    assert {each.rule.code for each in found if each.rule.severity != "hint"} == codes


def test_sh_of_a_cluster_may_be_bash() -> None:
    found = lint("job.sh", b"#!/bin/sh\n#SBATCH --time=1:00:00\nsource venv/bin/activate\nsrun python train.py\n")
    assert "AR215" not in {each.rule.code for each in found}


def test_a_script_that_counts_the_nodes_of_pbs_needs_no_placement() -> None:
    head = "#!/bin/bash\n#PBS -l select=2:ngpus=1\n#PBS -l walltime=1:00:00\ncd $PBS_O_WORKDIR\n"
    run = "mpiexec -ppn 1 -n $N torchrun --nnodes=$N --rdzv-backend=c10d --rdzv-endpoint=$A:29511 train.py"
    for count, codes in {"sort -u $PBS_NODEFILE | wc -l": set(), "wc -l < $PBS_NODEFILE": {"AR412"}}.items():
        found = lint("job.sh", f"{head}N=$({count})\n{run}\n".encode())
        assert {each.rule.code for each in found if each.rule.severity != "hint"} == codes


def test_an_option_that_is_near_to_an_unknown_one_is_named() -> None:
    (finding,) = [
        each for each in lint("job.sh", b"torchrun --nproc_per_nodes=4 train.py\n") if each.rule.code == "AR808"
    ]
    assert finding.fix == "torchrun --help lists the options; did you mean --nproc-per-node?"
