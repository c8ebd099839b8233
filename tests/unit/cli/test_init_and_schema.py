"""init writes what runs as it is, schema describes it, and shells complete our words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from waiting import PATIENCE


def test_what_init_writes_runs(allranks):
    """It takes more than 10 s on a slow machine: two trainings, for each of which an agent imports torch."""
    result = allranks("init")
    assert (result.rc, result.stdout) == (0, "")
    assert result.stderr == "wrote job.yaml\nwrote train.py\nwrote .gitignore\nnext: allranks run\n"
    ran = allranks("run", "--nproc-per-node", "2")
    batch, *lines = ran.stdout.splitlines()
    assert batch.startswith("[0] batch: 64 samples")
    assert (ran.rc, [line[:13] for line in lines]) == (0, [f"[0] epoch {number}: " for number in (1, 2, 3)])
    losses = [float(line.rpartition(" ")[2]) for line in lines]
    assert losses[2] < losses[0]
    once = allranks("run", "job.yaml", "--", "--epochs", "1")
    assert (once.rc, len(once.stdout.splitlines())) == (0, 2)
    saved = [path.name for run in allranks.runs() for path in (run / "checkpoints").glob("step-*")]
    assert sorted(saved) == ["step-000000016", "step-000000024"]


def test_init_into_a_new_folder(allranks, weird_tmp_path: Path):
    result = allranks("init", weird_tmp_path / "new" / "project")
    assert result.rc == 0
    written = sorted(path.name for path in (weird_tmp_path / "new" / "project").iterdir())
    assert written == [".gitignore", "job.yaml", "train.py"]
    named = allranks("init", "a b")
    assert named.stderr.endswith("next: cd 'a b' && allranks run\n")


def test_init_keeps_a_script_and_overwrites_nothing(allranks):
    allranks.script("import sys\nprint(sys.argv[1:])\n")
    assert allranks("init").rc == 0
    assert allranks("run").stdout == "[0] []\n"
    job = (allranks.folder / "job.yaml").read_text()
    assert allranks("init").rc == 2
    assert (allranks.folder / "train.py").read_text()[:10] == "import sys"
    assert (allranks.folder / "job.yaml").read_text() == job
    assert allranks("init", "--force").rc == 0
    assert (allranks.folder / "train.py").read_text()[:10] != "import sys"


def git(folder: Path, *args: str) -> str:
    """Run git in a directory, with no settings but the folder's own."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(["git", *args], cwd=folder, env=env, capture_output=True, text=True, check=True).stdout


def test_git_sees_nothing_of_what_a_run_leaves(allranks):
    """It takes more than 10 s on a slow machine: the agent of a training imports torch."""
    git(allranks.folder, "init", "-q")
    result = allranks("init", "project")
    project = allranks.folder / "project"
    assert (result.rc, result.stderr.splitlines()[2]) == (0, "wrote project/.gitignore")
    ran = allranks("run", "project/job.yaml", "--runs-folder", "project/runs")
    epochs = [line for line in ran.stdout.splitlines() if line.startswith("[0] epoch")]
    assert (ran.rc, len(epochs)) == (0, 3)
    env = {**allranks.env, "OMP_NUM_THREADS": "1"}
    with closing(allranks.ranks.start("script", "train.py", (), project, env)) as alone:
        code, out, err = alone.finish(PATIENCE)
    assert (code, len(out.splitlines())) == (0, 4), err
    left = set(git(project, "status", "--short", "-uall", ".").split()) - {"??"}
    assert left == {".gitignore", "job.yaml", "train.py"}
    assert {path.name for path in project.iterdir()} >= {"runs", "metrics.jsonl"} | left


@pytest.mark.parametrize(
    ("before", "added"),
    [
        (b"*.pt\r\n\xff", ["runs/", "checkpoints/", "metrics.jsonl", "__pycache__/"]),
        (b"/runs\n__pycache__\n!metrics.jsonl\n", ["checkpoints/"]),
    ],
    ids=["all lines", "one line"],
)
def test_init_adds_to_a_gitignore_what_is_missing(allranks, before: bytes, added: list[str]):
    path = allranks.folder / ".gitignore"
    path.write_bytes(before)
    assert allranks("init").stderr.splitlines()[2] == f"added {', '.join(added)} to .gitignore"
    after = before.rstrip() + "".join(f"\n{line}" for line in added).encode() + b"\n"
    assert path.read_bytes() == after
    again = allranks("init", "--force")
    assert again.stderr == "wrote job.yaml\nwrote train.py\nnext: allranks run\n"
    assert path.read_bytes() == after


@pytest.mark.parametrize("name", ["train.py", "main.py"])
def test_init_beside_a_script_writes_a_job_for_it(allranks, name: str):
    allranks.script("print('mine')", name)
    assert allranks("init").rc == 0
    assert (allranks.folder / name).read_text() == "print('mine')"
    assert [path.name for path in allranks.folder.glob("*.py")] == [name]
    done = allranks("run")
    assert (done.rc, done.stdout) == (0, "[0] mine\n")


def test_schema(allranks):
    result = allranks("schema")
    schema = json.loads(result.stdout)
    assert (result.rc, result.stderr) == (0, "")
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) >= {"script", "module", "binary", "args", "resources", "launch", "environment"}
    assert set(schema["$defs"]) >= {"Resources", "Launch", "Environment", "Scheduler", "Retry", "Runs"}
    assert schema["additionalProperties"] is False
    assert "nproc_per_node" in schema["$defs"]["Launch"]["properties"]
    assert all(entry["description"] for entry in schema["$defs"]["Launch"]["properties"].values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(allranks, shell: str):
    result = allranks("completion", shell)
    assert result.rc == 0
    assert "_ALLRANKS_COMPLETE" in result.stdout
    assert result.stderr.startswith("next: ")
    if shutil.which(shell):
        check = subprocess.run([shell, "-n"], input=result.out, capture_output=True, check=False)
        assert (check.returncode, check.stderr) == (0, b"")


COMPLETE = """\
eval "$(allranks completion bash 2>/dev/null)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
function_of=$(complete -p allranks)
function_of=${function_of#*-F }
${function_of%% *} allranks
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["allranks", "st"], ["status", "stacks"]),
        (["allranks", "c"], ["cancel", "compare", "check", "convert", "checkpoint", "completion"]),
        (["allranks", "run", "--max-"], ["--max-restarts"]),
        (["allranks", "completion", "z"], ["zsh"]),
        (["allranks", "status", "de"], ["demo"]),
        (["allranks", "run", "--backend", ""], ["nccl", "gloo"]),
        (["allranks", "plan", "--launcher", "d"], ["direct"]),
        (["allranks", "run", "--on", "l"], ["local", "lab"]),
    ],
    ids=" ".join,
)
def test_bash_completes(allranks, tmp_path: Path, words: list[str], found: list[str]):
    (allranks.folder / "runs" / "demo").mkdir(parents=True)
    (allranks.folder / "runs" / "demo" / "record.json").write_text("{}")
    (allranks.folder / "clusters.yaml").write_text("lab: {kind: slurm}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE, "bash", *words],
        env={**allranks.env, "PATH": path},
        cwd=allranks.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == found


def test_the_help_of_run_shows_what_matters_first(allranks):
    shown = allranks("run", "--help").stdout.splitlines()
    titles = [line for line in shown if line.endswith(":") and line[0] != " "]
    subjects = [
        "What to run:",
        "Ranks:",
        "Nodes and network:",
        "SSH:",
        "Environment:",
        "Schedulers:",
        "This command:",
    ]
    assert titles == ["Most used:", *subjects]
    assert "  Examples:" in shown[shown.index("This command:") :]
