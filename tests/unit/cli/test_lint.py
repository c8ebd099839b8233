"""``allranks lint``, as a user calls it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.lint import command as lint
from allranks.errors import UsageError
from allranks.lint.rules import RULES

BAD = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --time=1:00:00
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$MASTER train.py
"""
GOOD = """#!/bin/bash
torchrun --standalone --nproc-per-node=4 train.py
"""


def test_a_finding_has_a_place_what_will_happen_a_fix_and_a_page(allranks: Any) -> None:
    (allranks.folder / "job.sh").write_text(BAD)
    done = allranks("lint", "job.sh")
    assert done.rc == 1
    assert done.stdout.splitlines() == [
        "job.sh:5:38: AR101 fatal: the batch shell expands $SLURM_NODEID before srun starts: it is 0 for every node, "
        "so all nodes are node 0",
        "  fix: expand it on the node: srun bash -c '… $SLURM_NODEID …' in single quotes, or use --rdzv-backend c10d",
        "  see: allranks lint --explain AR101",
    ]
    assert done.stderr == "allranks: lint: 1 file: 1 fatal\n"


def test_a_good_script_and_one_with_hints_exit_with_0(allranks: Any) -> None:
    (allranks.folder / "job.sh").write_text(GOOD)
    done = allranks("lint", "job.sh")
    assert (done.rc, done.stdout, done.stderr) == (0, "", "allranks: lint: 1 file: nothing found\n")
    (allranks.folder / "job.sh").write_text(GOOD.replace("torchrun", "export NCCL_IB_DISABLE=1\ntorchrun"))
    done = allranks("lint", "job.sh")
    assert (done.rc, done.stdout.split(": ")[1]) == (0, "AR509 hint")


def test_directories_and_files_that_are_no_scripts(allranks: Any) -> None:
    folder = allranks.folder / "scripts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.sbatch").write_text(BAD)
    (folder / "launch").write_text(BAD)
    (folder / "notes.txt").write_text(BAD)
    (folder / ".git").mkdir()
    (folder / ".git" / "hook.sh").write_text(BAD)
    (folder / "program.sh").write_bytes(b"\x7fELF\0\0")
    done = allranks("lint", "scripts", "--json")
    assert [finding["path"] for finding in json.loads(done.stdout)["findings"]] == [
        "scripts/launch",
        "scripts/deep/a.sbatch",
    ]
    assert done.stderr == "allranks: lint: scripts/program.sh is not read: a binary file\n"


def test_a_binary_file_is_no_script(allranks: Any) -> None:
    (allranks.folder / "program").write_bytes(b"\x7fELF\0\0")
    done = allranks("lint", "program")
    assert done.rc == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: cannot read program as a script\n  why: it is a binary file\n"
        "  fix: allranks lint FILE, DIRECTORY or -\n"
    )


def test_stdin(allranks: Any) -> None:
    command = [sys.executable, "-m", "allranks", "lint", "-"]
    done = subprocess.run(command, input=BAD, env=allranks.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(": ")[:2]) == (1, ["stdin:5:38", "AR101 fatal"])


def test_json_and_sarif_hold_the_same_findings(allranks: Any) -> None:
    (allranks.folder / "job.sh").write_text(BAD)
    (found,) = json.loads(allranks("lint", "job.sh", "--json").stdout)["findings"]
    assert (found["code"], found["severity"], found["line"], found["column"]) == ("AR101", "fatal", 5, 38)
    log = json.loads(allranks("lint", "job.sh", "--sarif").stdout)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("AR101", "error")
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "AR101"
    (place,) = result["locations"]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "job.sh"}, "region": {"startLine": 5, "startColumn": 38}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--select", "AR101"], 1),
        (["--select", "AR1"], 1),
        (["--select", "node-rank-expanded-in-batch"], 1),
        (["--select", "AR3,AR4"], 0),
        (["--ignore", "AR101"], 0),
        (["--ignore", "AR2", "--ignore", "ar1"], 0),
    ],
)
def test_rules_are_selected_and_ignored(allranks: Any, flags: list[str], code: int) -> None:
    (allranks.folder / "job.sh").write_text(BAD)
    assert allranks("lint", "job.sh", *flags).rc == code


@pytest.mark.parametrize(
    ("comment", "code"),
    [("  # allranks: ignore[AR101]", 0), ("  # allranks: ignore", 0), ("  # allranks: ignore[AR102]", 1), ("", 1)],
)
def test_a_comment_leaves_a_finding_out(allranks: Any, comment: str, code: int) -> None:
    (allranks.folder / "job.sh").write_text(BAD.replace("train.py", f"train.py{comment}"))
    assert allranks("lint", "job.sh").rc == code


def test_a_comment_above_covers_the_whole_command(allranks: Any) -> None:
    lines = BAD.replace("srun ", "# allranks: ignore[AR101]\nsrun ").replace("--node-rank", "\\\n  --node-rank")
    (allranks.folder / "job.sh").write_text(lines)
    assert allranks("lint", "job.sh").rc == 0


def test_explain(allranks: Any) -> None:
    done = allranks("lint", "--explain", "ar113")
    assert done.rc == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "AR113 cpus-not-inherited (hint)"
    assert "versions: Slurm 22.05 to 23.02" in lines
    assert lines[-1].startswith("source: ")


def test_fields_of_a_rule_are_explained_in_capitals(allranks: Any) -> None:
    said = [allranks("lint", "--explain", code).stdout.splitlines() for code in ("AR101", "AR901", "AR908")]
    assert said[0][1].startswith("what: the batch shell expands $VARIABLE before srun starts: ")
    assert said[1][1] == "what: NAME is in the script as text: everyone who can read the script has it"
    assert said[2][2] == "fix: ${VARIABLE:?}"


def test_each_rule_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in RULES:
        assert lint.main(["--explain", rule.code], standalone_mode=False) == 0
        assert capsys.readouterr().out.startswith(f"{rule.code} {rule.name} ({rule.severity})\nwhat: ")


def test_fix_mends_what_is_safe_shows_it_and_keeps_the_mode(allranks: Any) -> None:
    path = allranks.folder / "job.sh"
    path.write_bytes(b"#!/bin/bash\r\nNCCL_DEBUG=WARN\r\npython train.py\r\n")
    path.chmod(0o750)
    done = allranks("lint", "--fix", "job.sh")
    assert (done.rc, done.stdout) == (0, "")
    assert path.read_bytes() == b"#!/bin/bash\nexport NCCL_DEBUG=WARN\npython train.py\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert "-NCCL_DEBUG=WARN\n+export NCCL_DEBUG=WARN\n" in done.stderr
    again = allranks("lint", "--fix", "job.sh")
    assert again.stderr == "allranks: lint: 1 file: nothing found\n"


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ([], "no file to read"),
        (["missing.sh"], "cannot read missing.sh"),
        (["job.sh", "--select", "XY1"], "no such rule: XY1"),
        (["--explain", "AR999"], "no such rule: AR999"),
        (["job.sh", "--json", "--sarif"], "--json and --sarif exclude each other"),
        (["-", "--fix"], "--fix needs a file"),
    ],
)
def test_usage_errors_exit_with_2(allranks: Any, args: list[str], what: str) -> None:
    (allranks.folder / "job.sh").write_text(GOOD)
    done = allranks("lint", *args)
    assert (done.rc, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {what}\n")


def test_a_pipe_without_a_writer_does_not_block(allranks: Any) -> None:
    os.mkfifo(allranks.folder / "pipe.sh")
    done = allranks("lint", "pipe.sh")
    assert done.rc == 2
    assert "not a regular file" in done.stderr


def test_a_python_script_is_named_and_one_with_directives_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n")
    Path("job").write_text("#!/usr/bin/env python3\n#SBATCH --nodes=1\nprint(1)\n")
    Path("good.sh").write_text(GOOD)
    with pytest.raises(UsageError, match=r"^train\.py is a Python script"):
        lint.main(["train.py"], standalone_mode=False)
    assert lint.main(["train.py", "good.sh", "job"], standalone_mode=False) == 0
    assert capfd.readouterr().err == (
        "allranks: lint: train.py is not read: a Python script\nallranks: lint: 2 files: nothing found\n"
    )
