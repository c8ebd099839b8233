"""The dry run shows the very files that a run then has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

JOB = """\
script: train.py
args: [--text, "two\\nlines", 'it''s "quoted"']
name: demo
launch: {nproc_per_node: 2, max_restarts: 1}
environment:
  variables: {COLOUR: "blue\\t$HOME", MY_TOKEN: 0123456789abcdef}
  setup: [export A=1]
runs: {group_readable: true}
"""


@pytest.mark.smoke
def test_plan_is_what_a_run_executes(allranks, checked):
    """The dry run names the id that is free, so the next run has it, and all files byte for byte."""
    allranks.script("import os, sys\nprint(sys.argv[2:], os.environ['COLOUR'], os.environ['MY_TOKEN'][:4])\n")
    allranks.job(JOB)
    for _ in range(2):  # The second try is for a minute that ends between the two commands.
        planned = allranks("plan", "--json")
        result = allranks("run")
        plan, run = json.loads(planned.stdout), allranks.runs()[-1]
        if plan["run_id"] == run.name:
            break
    assert (planned.rc, planned.stderr, result.rc) == (0, "", 0)
    assert result.by_rank == {rank: ["['two\\nlines', 'it\\'s \"quoted\"'] blue\t$HOME 0123"] for rank in (0, 1)}
    assert planned.out == (run / "plan.json").read_bytes()
    for file in plan["files"]:
        path = run / file["path"]
        assert path.read_text() == file["text"]
        assert path.stat().st_mode & 0o777 == file["mode"]
    assert {path.name for path in run.iterdir()} == {
        "attempts",
        "code",
        "job.yaml",
        "key",
        "plan.json",
        "preflight.json",
        "record.json",
        *(file["path"] for file in plan["files"]),
    }
    (command,) = plan["commands"]
    assert command["command"] == ["bash", str(run / "node-000.sh")]


def test_plan_writes_nothing(allranks):
    allranks.script("")
    before = sorted(allranks.folder.rglob("*"))
    assert allranks("plan", "train.py").rc == 0
    assert sorted(allranks.folder.rglob("*")) == before


def test_plan_shows_each_file_and_each_reason(allranks):
    allranks.script("")
    allranks.job(JOB)
    plan = json.loads(allranks("plan", "--json", "--debug").stdout)
    text = allranks("plan", "--debug", "-v").stdout
    assert text.startswith(f"plan for demo on local: 2 ranks, run {plan['run_id']}\n")
    for reason in plan["reasons"]:
        assert reason["why"] in text
    for file in plan["files"]:
        shown = "\n".join(f"  {line}".rstrip() for line in file["text"].splitlines())
        assert f"{plan['run_dir']}/{file['path']}:\n{shown.replace(chr(9), chr(92) + 't')}\n" in text
    assert text.endswith(f"  bash {plan['run_dir']}/node-000.sh\n")
    assert "TORCH_DISTRIBUTED_DEBUG" in text
    short = allranks("plan", "--debug")
    table, _, rest = text.partition(f"\n\n{plan['run_dir']}/node-000.sh:\n")
    assert (short.stdout, bool(rest)) == (f"{table}\n", True)
    assert short.stderr == "next: -v shows the scripts, -o DIR/ writes them; allranks run starts the job\n"


def test_the_files_of_a_plan_are_written_to_a_directory(allranks):
    allranks.script("")
    allranks.job(JOB)
    (allranks.folder / "there").mkdir()
    for folder in ("there", "new/one/"):
        done = allranks("plan", "-o", folder)
        shown = f"{folder.rstrip('/')}/node-000"
        assert (done.rc, done.stdout) == (0, "")
        assert done.stderr == f"wrote {shown}.sh\nwrote {shown}.json\n"
        plan = json.loads(allranks("plan", "--json").stdout)
        written = {path.name: path for path in (allranks.folder / folder).iterdir()}
        assert written.keys() == {file["path"] for file in plan["files"]}
        assert [written[file["path"]].stat().st_mode & 0o777 for file in plan["files"]] == [0o740, 0o640]
    refused = allranks("plan", "-o", "train.py/")
    assert (refused.rc, refused.stderr.splitlines()[0]) == (2, "error: cannot write to train.py")


def test_script_of_a_run_can_be_started_by_hand(allranks):
    """The script says so itself; secrets must be set then."""
    import subprocess

    allranks.script("import os\nopen('seen', 'a').write(os.environ['RANK'])\n")
    allranks.job("script: train.py\nenvironment:\n  variables: {MY_TOKEN: 0123456789abcdef}\n")
    assert allranks("run").rc == 0
    script = allranks.run() / "node-000.sh"
    bare = subprocess.run(["bash", str(script)], env=allranks.env, capture_output=True, text=True, check=False)
    assert bare.returncode != 0
    assert "MY_TOKEN: set it before you start this script by hand" in bare.stderr
    given = subprocess.run(["bash", str(script)], env={**allranks.env, "MY_TOKEN": "x"}, check=False)
    assert (given.returncode, (allranks.folder / "seen").read_text()) == (0, "00")


def test_debug_says_what_it_turned_on_and_is_off_otherwise(allranks):
    shown = "import os\nprint(os.environ.get('NCCL_DEBUG'), os.environ.get('TORCH_DISTRIBUTED_DEBUG'))\n"
    allranks.script(shown)
    on = allranks("run", "train.py", ALLRANKS_LOG_LEVEL="DEBUG")
    assert on.stdout == "[0] INFO DETAIL\n"
    assert "allranks: debug: NCCL_DEBUG=INFO\nallranks: debug: TORCH_DISTRIBUTED_DEBUG=DETAIL\n" in on.stderr
    off = allranks("run", "train.py", LOG_LEVEL="DEBUG")
    assert off.stdout == "[0] None None\n"
    assert "debug" not in off.stderr


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("--venv", "nope"), "environment.venv: there is no virtual environment {}/nope here"),
        (("--python", "/no/python"), "environment.python: there is no /no/python here"),
        (("--python", "./python -O"), "environment.python: there is no ./python here"),
        (("--conda", "nope"), "environment.conda: there is no conda here, neither CONDA_EXE nor on PATH"),
    ],
)
def test_an_environment_that_is_not_on_this_machine_is_noted(allranks, flags: tuple[str, ...], note: str):
    allranks.script("")
    assert f"note: {note.format(allranks.folder)}\n" in allranks("plan", "train.py", *flags).stdout
    allranks.job("script: train.py\nenvironment:\n  setup: make environment\n")  # It may make it.
    assert "there is no" not in allranks("plan", *flags).stdout.partition("node-000.sh")[0]


def test_a_conda_environment_that_is_not_on_this_machine_is_noted(allranks, tmp_path: Path):
    allranks.script("")
    conda = tmp_path / "conda/bin/conda"
    conda.parent.mkdir(parents=True)
    conda.touch(mode=0o700)
    (tmp_path / "conda/envs/mine").mkdir(parents=True)

    def noted(name: str) -> bool:
        shown = allranks("plan", "train.py", "--conda", name, CONDA_EXE=str(conda)).stdout
        return f"note: environment.conda: there is no conda environment {name} in {tmp_path}/conda/envs/{name}" in shown

    assert (noted("mine"), noted("base"), noted("other")) == (False, False, True)
    (tmp_path / "elsewhere/other").mkdir(parents=True)
    known = tmp_path / "home/.conda/environments.txt"
    known.parent.mkdir()
    known.write_text(f"{tmp_path}/elsewhere/other\n")
    assert not noted("other")


def test_what_the_caller_has_set_stays(allranks):
    allranks.script("import os\nprint(os.environ['OMP_NUM_THREADS'])\n")
    assert allranks("run", "train.py", OMP_NUM_THREADS="7").stdout == "[0] 7\n"
    assert "OMP_NUM_THREADS" in allranks("plan", "train.py", OMP_NUM_THREADS="7").stdout
    assert "set in your environment" in allranks("plan", "train.py", OMP_NUM_THREADS="7").stdout


def test_settings_that_this_machine_does_not_know_are_named(allranks):
    allranks.script("")
    allranks.job("script: train.py\nresources: {time: 1h, memory: 2GB}\nscheduler: {partition: gpu}\n")
    notes = json.loads(allranks("plan", "--json").stdout)["notes"]
    assert notes == [
        "resources.time is not enforced on this machine",
        "resources.memory is not enforced on this machine",
        "there is no scheduler here: scheduler.partition not used",
    ]
