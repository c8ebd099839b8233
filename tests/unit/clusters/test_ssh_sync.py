"""What is copied to machines that share no directory, where it lies there, and where things come back to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from allranks.clusters.ssh.sync import Copy, Fetcher, error_of_rsync, place_here
from allranks.errors import JobError
from allranks.job.hosts import parse_hosts
from allranks.job.spec import Environment, Job, Sync
from allranks.plan.entry import Program
from allranks.runs.status import Handle
from allranks.system.commands import Answer

RUN = Path("/home/ada/project/runs/train-1121-0931")
RSYNC = "rsync" in subprocess.run("command -v rsync", shell=True, capture_output=True, text=True).stdout


def copy(**given: object) -> Copy:
    return Copy(Sync.model_validate({"method": "rsync", **given}), Path("/home/ada/project"), RUN)


def test_the_folder_is_named_after_the_project() -> None:
    assert re.fullmatch(r"allranks/project-[0-9a-f]{8}", copy().folder)
    assert copy(folder="~/code/").folder == "code"
    assert copy(folder="/scratch/ada").run == "/scratch/ada/runs/train-1121-0931"


def test_commands_for_a_machine() -> None:
    (host,) = parse_hosts(["ada@[2001:db8::7]:2222"])
    work, run = copy(folder="my code", exclude=["/data/"]).commands(host)
    place = run.index("-e")
    assert work[:2] == run[:2] == ("rsync", "-rlpts")
    assert [word for word in work if word.startswith("--exclude=/")] == ["--exclude=/data/", "--exclude=/runs/"]
    assert run[place + 1].split()[0] == "ssh"
    assert run[place + 1].endswith(" -l ada -p 2222")
    assert run[place + 2 :] == (
        "--rsync-path",
        "mkdir -p 'my code/runs/train-1121-0931' && rsync",
        f"{RUN}/",
        "[2001:db8::7]:my code/runs/train-1121-0931/",
    )
    assert work[-2:] == ("/home/ada/project/", "[2001:db8::7]:my code/project/")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("/home/bob/code/project/checkpoints", "/home/ada/project/checkpoints"),
        ("/home/bob/code/project", "/home/ada/project"),
        ("/home/bob/code/runs/train-1121-0931/saved", f"{RUN}/saved"),
        ("/home/bob/code/projects/saved", f"{RUN}/saved"),
        ("/scratch/saved", f"{RUN}/saved"),
    ],
)
@pytest.mark.parametrize("folder", ["code", "/home/bob/code"])
def test_where_checkpoints_come_back_to(there: str, here: str, folder: str) -> None:
    assert place_here(there, folder, Path("/home/ada/project"), RUN) == Path(here)


def test_what_the_ranks_run_is_found_from_the_copy() -> None:
    job = Job(script="src/train.py")
    assert copy().entry(Program("script", "/home/ada/project/src/train.py"), job).target == "src/train.py"
    assert copy().entry(Program("module", "package.train"), job).target == "package.train"
    program = Program("binary", "/usr/bin/hostname")
    assert copy().entry(program, Job(binary="hostname")).target == "hostname"
    with pytest.raises(JobError, match="/usr/bin/hostname is outside of the working directory"):
        copy().entry(program, Job(binary="/usr/bin/hostname"))


@pytest.mark.parametrize(
    ("here", "there"), [("/home/ada/project/.venv", ".venv"), ("/opt/venv", "/opt/venv"), (None, None)]
)
def test_a_virtual_environment_is_that_of_the_machine(here: str | None, there: str | None) -> None:
    assert copy().environment(Environment(venv=here)).venv == there


@pytest.mark.skipif(not RSYNC, reason="there is no rsync")
def test_size_of_what_would_be_copied(tmp_path: Path) -> None:
    for name, size in {"a.py": 10, "data/x y": 300, "data/z": 200, ".git/pack": 999, "runs/r/log": 999}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    for checkpoint in ("ckpt/step-000000010/rank-0.data", "ckpt/.step-000000020.tmp-1/rank-0.data"):
        (tmp_path / checkpoint).parent.mkdir(parents=True)
        (tmp_path / checkpoint).write_bytes(bytes(999))
    copied = Copy(Sync(method="rsync"), tmp_path, tmp_path / "runs" / "r")
    assert copied.measure(Sync().model_copy(update={"max_size": 510})) == "3 files, 510 B"
    with pytest.raises(JobError, match="too large to be copied to each machine: 3 files, 510 B") as raised:
        copied.measure(Sync().model_copy(update={"max_size": 509}))
    assert raised.value.why is not None
    assert raised.value.why.endswith("; the largest in it: data/ 500 B, a.py 10 B")


@pytest.mark.parametrize(
    ("err", "said"),
    [
        ("rsync: safe_write failed: Broken pipe\nssh: Could not resolve hostname x\nrsync error", "ssh: Could not"),
        (
            "rsync: [receiver] write failed: No space left\nrsync error: error in file IO (code 11)\n",
            "rsync: [receiver]",
        ),
        ("", "rsync exited with code 12"),
    ],
)
def test_what_rsync_says(err: str, said: str) -> None:
    assert error_of_rsync(Answer(12, "", err)).startswith(said)


def test_who_may_only_read_a_run_brings_nothing(tmp_path: Path) -> None:
    (tmp_path / "fetching").mkdir()  # It cannot be opened, as a file cannot in somebody else's directory.
    nodes = [{"node": 0, "host": "nowhere.invalid"}]
    fetcher = Fetcher(tmp_path, Handle(extra={"nodes": nodes, "copied_to": "allranks/x", "workdir": str(tmp_path)}))
    fetcher.fetch()
    assert fetcher.finish() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["fetching"]
