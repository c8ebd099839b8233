"""Runs that do not exist, and records that were cut off."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

HELLO = "import os\nprint('hello')\nraise SystemExit(int(os.environ.get('CODE', 0)))\n"


@pytest.fixture
def finished(allranks):
    """Give the command in a directory with one finished run."""
    allranks.script(HELLO)
    assert allranks("run", "train.py", "--name", "demo", "--binary", "/bin/true").rc == 2
    assert allranks("run", "train.py", "--name", "demo").rc == 0
    return allranks


def another(allranks, name: str) -> Path:
    """Make a copy of the only run under another id."""
    run = allranks.run()
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    record = json.loads((copy / "record.json").read_text())
    (copy / "record.json").write_text(json.dumps({**record, "id": name}))
    return copy


def test_an_id_that_is_nearly_one(finished):
    run_id = finished.run().name
    near = finished("status", run_id.replace("demo", "deom"))
    assert (near.rc, near.message["fix"]) == (2, f"did you mean {run_id}?")


def test_the_file_that_a_run_was_made_of(finished):
    run_id = finished.run().name
    named = finished("resume", "demo.py")
    assert (named.rc, named.message["fix"]) == (2, f"did you mean {run_id}?")


def test_prefix_that_fits_several_runs(finished):
    run_id = finished.run().name
    other = another(finished, f"{run_id}-2").name
    assert finished("status", "demo").message["why"] == f"{run_id}, {other}"
    assert finished("status", run_id).stdout.splitlines()[0] == f"run        {run_id}"
    assert finished("status", other[:-1] + "2").stdout.splitlines()[0] == f"run        {other}"


def test_record_cut_off_in_the_middle(finished):
    run = finished.run()
    path = run / "record.json"
    path.write_text(path.read_text()[:100])
    for verb in ("status", "logs", "cancel", "report", "top", "metrics"):
        result = finished(verb)
        assert (result.rc, result.stdout) == (1, "")
        assert (str(path) in result.message["error"], [*result.message]) == (True, ["error", "why", "fix"])
    other = another_record(run)
    listed = finished("ps")
    assert (listed.rc, listed.stdout.splitlines()[1].split()[:2]) == (0, [other, "SUCCEEDED"])
    assert str(path) in listed.stderr


def another_record(run: Path) -> str:
    """Make a whole run beside one whose record is cut."""
    name = f"{run.name}-2"
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    text = {
        "id": name,
        "name": "demo",
        "cluster": "local",
        "kind": "local",
        "world_size": 1,
        "nnodes": 1,
        "created": 1.0,
        "host": "here",
        "attempt": 0,
        "handle": {},
        "status": {"state": "SUCCEEDED", "exit_code": 0},
        "stop_timeout": 30.0,
        "file_mode": 384,
    }
    (copy / "record.json").write_text(json.dumps(text))
    return name


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"id": 1}', "\0\0\0", "\ufffd"])
def test_record_that_is_none(finished, text: str):
    path = finished.run() / "record.json"
    path.write_bytes(text.encode("utf-16"))
    result = finished("status")
    assert (result.rc, result.stdout) == (1, "")
    assert str(path) in result.message["error"]
    path.write_text(text)
    assert str(path) in finished("status").message["error"]


def test_events_cut_off_in_the_middle_of_a_line(finished):
    """An agent that died while it wrote: what it told before counts, and its end is found out."""
    run = finished.run()
    events = run / "attempts/000/node-000/agent.jsonl"
    whole = events.read_bytes()
    assert whole.count(b'"kind": "ended"') == 1
    events.write_bytes(whole[: whole.index(b'"kind": "ended"') + 4])
    record = json.loads((run / "record.json").read_text())
    record["status"] = {"state": "RUNNING"}
    (run / "record.json").write_text(json.dumps(record))
    status = json.loads(finished("status", "--json").stdout)["status"]
    assert (status["state"], status["native"], status["exit_code"]) == ("FAILED", "agent gone", 1)
    assert finished("logs").stdout == "[0] hello\n"
    assert finished("logs", "-f").stdout == "[0] hello\n"


def test_events_that_are_no_text(finished):
    run = finished.run()
    events = run / "attempts/000/node-000/agent.jsonl"
    events.write_bytes(b"\xff\xfe\n[1]\nnull\n{}\n" + events.read_bytes() + b'{"time": 1, "ho')
    record = json.loads((run / "record.json").read_text())
    record["status"] = {"state": "RUNNING"}
    (run / "record.json").write_text(json.dumps(record))
    assert json.loads(finished("status", "--json").stdout)["status"]["state"] == "SUCCEEDED"
