"""ps, status, logs and cancel of a run that has ended."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from allranks.cli.logs import last_time


@pytest.fixture
def at(allranks, failed_run: Path):
    """Give a function that calls a verb in the directory of the failed run."""
    return lambda *args, **env: allranks(*args, cwd=failed_run.parent.parent, **env)


def test_status(at, failed_run: Path):
    result = at("status")
    rows = {line[:9].strip(): line[9:].strip() for line in result.stdout.splitlines()}
    assert result.rc == 0
    assert rows["run"] == failed_run.name
    assert (rows["command"], rows["state"]) == ("train.py", "FAILED")
    assert rows["reason"] == "rank 1 exited with code 3"
    assert rows["exit code"] == "3"
    assert rows["ranks"] == "2 on 1 node"
    assert rows["cluster"] == "local"
    assert re.fullmatch(r"process \d+ on \S+ \(ended\)", rows["agent"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \d+ (s|min) ago", rows["started"])
    assert rows["folder"] == f"runs/{failed_run.name}"
    assert result.stderr == f"next: allranks logs {failed_run.name} --rank 1\n"


def test_status_by_every_name_of_a_run(at, failed_run: Path):
    def said(*name: str) -> str:
        return re.sub(r"\d+ (s|min) ago", "", at("status", *name).stdout)

    wanted = said()
    for name in (failed_run.name, "demo", "latest", f"runs/{failed_run.name}", "./runs/latest", str(failed_run)):
        assert said(name) == wanted


def test_status_as_json(at, failed_run: Path):
    found = json.loads(at("status", "--json").stdout)
    assert found["id"] == failed_run.name
    assert found["folder"] == str(failed_run)
    assert found["status"]["state"] == "FAILED"
    assert (found["status"]["exit_code"], found["status"]["rank"]) == (3, 1)
    written = json.loads((failed_run / "record.json").read_text())
    times = {name: utc(written["status"][name]) for name in ("started", "ended")}
    assert found == {
        **written,
        "created": utc(written["created"]),
        "status": {**written["status"], **times},
        "diagnosis": json.loads((failed_run / "diagnosis.json").read_text())["diagnosis"],
        "command": "train.py",
        "folder": str(failed_run),
        "position": None,  # It runs no more.
    }
    assert (found["diagnosis"]["cause"], found["diagnosis"]["sure"]) == ("rank 1 exited with code 3", "unknown")


def utc(when: float) -> str:
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="milliseconds")


def test_ps(at, failed_run: Path):
    header, row = at("ps").stdout.splitlines()
    assert header.split() == ["RUN", "STATE", "EXIT", "RANKS", "CLUSTER", "STARTED", "TOOK", "COMMAND", "REASON"]
    assert row.split()[:5] == [failed_run.name, "FAILED", "3", "2", "local"]
    assert re.search(r"  \d+ (s|min) ago  +\S+ s  +train\.py  rank 1 exited with code 3: oops$", row)
    (found,) = json.loads(at("ps", "--json").stdout)
    assert {**found, "position": None} == json.loads(at("status", "--json").stdout)


def test_ps_does_not_list_a_link_to_the_newest_run_that_is_being_replaced(at, failed_run: Path):
    link = failed_run.parent / f".latest-{failed_run.name}"  # As another command leaves it for a moment.
    link.symlink_to(failed_run.name)
    try:
        assert [run["id"] for run in json.loads(at("ps", "--json").stdout)] == [failed_run.name]
    finally:
        link.unlink()


def test_verbs_that_start_and_cancel_runs_write_json(allranks):
    allranks.script("import sys, time\nprint('hello')\nif sys.argv[1:]:\n    time.sleep(300)\nsys.exit(3)\n")
    done = allranks("run", "train.py", "--json")
    found = json.loads(done.stdout)
    assert (done.rc, found["status"]["state"], found["status"]["exit_code"]) == (3, "FAILED", 3)
    assert "[0] hello\n" in done.stderr
    again = allranks("resume", "--json")
    assert (again.rc, json.loads(again.stdout)["id"]) == (3, found["id"])
    cancelled = allranks("cancel", "--json")
    assert (cancelled.rc, json.loads(cancelled.stdout)) == (0, json.loads(again.stdout))
    left = allranks("run", "train.py", "--detach", "--json", "--", "stay")
    assert (left.rc, json.loads(left.stdout)["command"]) == (0, "train.py stay")
    cancelled = json.loads(allranks("cancel", "--json").stdout)
    assert (cancelled["id"], cancelled["status"]["state"]) == (json.loads(left.stdout)["id"], "CANCELLED")


def test_ps_of_some_states(at, failed_run: Path):
    assert at("ps", "--state", "failed").stdout.splitlines()[1].split()[0] == failed_run.name
    assert at("ps", "--state", "RUNNING", "--state", "FAILED").stdout.count(failed_run.name) == 1
    assert at("ps", "--state", "running").stdout == ""
    assert json.loads(at("ps", "--state", "running", "--json").stdout) == []


def test_what_a_run_runs_with_its_arguments(allranks):
    allranks.script("")
    assert allranks("run", "train.py", "--", "--name", "two words").rc == 0
    assert "command    train.py --name 'two words'\n" in allranks("status").stdout
    (allranks.folder / "package.py").write_text("")
    assert allranks("run", "-m", "package").rc == 0
    assert "command    -m package\n" in allranks("status").stdout


def test_ps_without_runs(allranks):
    assert (allranks("ps").rc, allranks("ps").stdout) == (0, "")
    assert json.loads(allranks("ps", "--json").stdout) == []
    assert list(allranks.folder.iterdir()) == []


def test_runs_folder_by_flag_and_variable(allranks, failed_run: Path):
    folder = str(failed_run.parent)
    assert allranks("status", "--runs-folder", folder).stdout.splitlines()[0].split()[1] == failed_run.name
    assert allranks("status", ALLRANKS_RUNS_FOLDER=folder).stdout.splitlines()[0].split()[1] == failed_run.name
    assert allranks("status", "--runs-folder", "none", ALLRANKS_RUNS_FOLDER=folder).rc == 2
    allranks.script("")
    elsewhere = allranks.folder / "else where"
    assert allranks("run", "train.py", ALLRANKS_RUNS_FOLDER="else where").rc == 0
    assert allranks("status", ALLRANKS_RUNS_FOLDER="else where").rc == 0
    assert (elsewhere / "latest" / "record.json").is_file()
    assert allranks.runs() == []


def test_logs(at):
    result = at("logs")
    assert (result.rc, result.stderr) == (0, "[1] oops\n")
    assert sorted(result.stdout.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    assert at("logs", "-f").stdout == result.stdout


@pytest.mark.parametrize(
    ("flags", "out"),
    [
        (["--rank", "0"], "[0] hello from 0\n"),
        (["--rank", "1", "--node", "0"], "[1] hello from 1\n"),
        (["-r", "1", "-f"], "[1] hello from 1\n"),
        (["--rank", "0", "--tail", "0"], ""),
        (["--rank", "0", "--tail", "5"], "[0] hello from 0\n"),
    ],
)
def test_logs_of_some_ranks(at, flags: list[str], out: str):
    result = at("logs", *flags)
    assert (result.rc, result.stdout) == (0, out)


def test_logs_of_several_ranks(at):
    for flags in (["-r", "0", "-r", "1"], ["--rank", "0,1"], ["--rank", "0-1"]):
        assert len(at("logs", *flags).stdout.splitlines()) == 2


def test_tail_counts_lines_of_both_streams(at):
    result = at("logs", "--tail", "1")
    assert len((result.stdout + result.stderr).splitlines()) == 1


def test_logs_with_the_time_at_which_lines_came(at, failed_run: Path):
    for flags in (["-t"], ["--timestamps", "--rank", "0"], ["-t", "-f", "--tail", "3"]):
        lines = at("logs", *flags).stdout.splitlines()
        (line,) = (line for line in lines if line.endswith(" [0] hello from 0"))
        came = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S.%f").timestamp()
        status = json.loads((failed_run / "record.json").read_text())["status"]
        assert status["started"] < came < status["ended"] + 1


@pytest.mark.parametrize("flags", [[], ["-f"], ["--tail", "3"]])
def test_logs_as_json(at, flags: list[str]):
    result = at("logs", "--json", *flags)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert (result.rc, result.stderr) == (0, "")
    times = [datetime.fromisoformat(line.pop("time")) for line in found]
    assert times == sorted(times)
    assert sorted(found, key=lambda line: line["text"]) == [
        {"ranks": [0], "nodes": [0], "stream": "stdout", "text": "hello from 0"},
        {"ranks": [1], "nodes": [0], "stream": "stdout", "text": "hello from 1"},
        {"ranks": [1], "nodes": [0], "stream": "stderr", "text": "oops"},
    ]


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        (["--grep", "from [1-9]"], "[1] hello from 1\n", ""),
        (["--grep", "^oo"], "", "[1] oops\n"),
        (["--grep", "nothing", "-f"], "", ""),
        (["--since", "2999-01-31T14:00"], "", ""),
        (["--since", "2999-01-31T14:00Z", "--json"], "", ""),
        (["--since", "365d", "--rank", "0"], "[0] hello from 0\n", ""),
        (["--since", "2001-01-31", "--rank", "0", "--grep", "hello"], "[0] hello from 0\n", ""),
    ],
)
def test_some_lines_of_the_logs(at, flags: list[str], out: str, err: str):
    result = at("logs", *flags)
    assert (result.rc, result.stdout, result.stderr) == (0, out, err)


def test_lines_since_a_time_of_day(at):
    clock = f"{datetime.now() + timedelta(minutes=5):%H:%M}"  # Yesterday, for it is not that late yet.
    result = at("logs", "--since", clock, "--rank", "0")
    assert (result.rc, result.stdout, result.stderr) == (0, "[0] hello from 0\n", "")


@pytest.mark.parametrize(
    ("clock", "when"),
    [
        ("13:59", datetime(2026, 3, 1, 13, 59)),
        ("14:00:30", datetime(2026, 3, 1, 14, 0, 30)),
        ("14:01", datetime(2026, 2, 28, 14, 1)),
        ("9:30", datetime(2026, 3, 1, 9, 30)),
    ],
)
def test_a_time_of_day_is_the_last_that_there_was(clock: str, when: datetime):
    assert last_time(clock, datetime(2026, 3, 1, 14, 0, 30)) == when


def test_no_escape_codes_in_a_pipe(at):
    for args in (["status"], ["ps"], ["logs"], ["status", "nope"], ["--help"], ["run", "--help"]):
        result = at(*args, TERM="xterm-256color")
        assert b"\x1b" not in result.out + result.err


def test_next_command_names_a_run_elsewhere_by_its_folder(allranks, failed_run: Path):
    result = allranks("status", "--runs-folder", failed_run.parent)
    (line,) = result.stderr.splitlines()
    assert line == f"next: allranks logs '{failed_run}' --rank 1"
    inside = allranks("status", "--runs-folder", ".", cwd=failed_run.parent)
    assert inside.stderr == f"next: allranks logs ./{failed_run.name} --rank 1\n"
    by_variable = allranks("status", ALLRANKS_RUNS_FOLDER=str(failed_run.parent))
    assert by_variable.stderr == f"next: allranks logs {failed_run.name} --rank 1\n"


def test_run_elsewhere_is_explained_with_its_folder(allranks):
    allranks.script("raise SystemExit(3)\n")
    result = allranks("run", "train.py", "--runs-folder", "my runs")
    (run,) = (path for path in (allranks.folder / "my runs").iterdir() if path.name != "latest")
    assert f"\n  fix: allranks logs 'my runs/{run.name}' --rank 0 shows all that it printed\n" in result.stderr


def test_logs_of_an_attempt(allranks, failed_run: Path):
    run = allranks.folder / "runs" / failed_run.name
    shutil.copytree(failed_run, run)
    assert allranks("logs", "--attempt", "1").out == allranks("logs").out != b""
    node = run / "attempts" / "001" / "node-000"
    node.mkdir(parents=True)
    (node / "rank-0.out").write_text("again\n")
    assert allranks("logs").stdout == allranks("logs", "--attempt", "2").stdout == "[0] again\n"
    assert "hello from 0" in allranks("logs", "--attempt", "1", "--rank", "0").stdout
    missing = allranks("logs", "--attempt", "3", "-f")
    assert (missing.rc, missing.message["error"].startswith("--attempt: ")) == (2, True)
