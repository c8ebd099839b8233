"""``allranks report --trace``: the timeline for Perfetto."""

from __future__ import annotations

import json
from typing import Any

#: Rank 1 fails when rank 0 is there.
FAILS = """\
import os, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("there"):
        time.sleep(0.01)
    sys.exit(3)
open("there", "w").close()
time.sleep(600)
"""


def _trace(text: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the events, by the rules of the form, and the names of processes."""
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    for each in events:
        assert each["pid"] in processes
        assert isinstance(each["tid"], int)
        if each["ph"] == "X":
            assert each["dur"] >= 0
        if each["ph"] in ("X", "i"):
            assert isinstance(each["ts"], int)
        else:
            assert each["ph"] == "M"
    return events, processes


def test_attempts_ranks_restarts_and_checkpoints(allranks: Any) -> None:
    allranks.script(FAILS)
    assert allranks("run", "train.py", "--nproc-per-node", "2", "--max-restarts", "1", "--stop-timeout", "5").rc == 3
    run = allranks.run()
    began = json.loads((run / "attempts/000/node-000/agent.jsonl").read_text().splitlines()[0])["time"]
    saved = {"attempt": 0, "step": 7, "path": "/c", "leaving": False, "time": began + 1}
    (run / "checkpoints.jsonl").write_text(json.dumps(saved) + "\n")
    done = allranks("report", "--trace", "trace.json")
    assert (done.rc, done.stdout, done.stderr) == (0, "", f"allranks: timeline of {run.name}: trace.json\n")
    text = (allranks.folder / "trace.json").read_text()
    events, processes = _trace(text)
    host = json.loads((run / "attempts/000/node-000/agent.jsonl").read_text().splitlines()[0])["host"]
    assert processes == {0: f"run {run.name}", 1: f"node 0 ({host})"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert threads == {(0, 0): "checkpoints", (0, 1): "attempt 1", (1, 0): "rank 0", (1, 1): "rank 1"}
    spans = [(threads[each["pid"], each["tid"]], each["name"]) for each in events if each["ph"] == "X"]
    ranks = [("rank 0", "restart 1"), ("rank 0", "running"), ("rank 1", "restart 1"), ("rank 1", "running")]
    assert sorted(span for span in spans if span[0] != "attempt 1") == ranks
    assert [name for thread, name in spans if thread == "attempt 1"][-3:] == ["running", "restarting", "running"]
    codes = {each["args"].get("exit code") for each in events if each["ph"] == "X" and each["tid"] == each["pid"] == 1}
    assert 3 in codes
    (checkpoint,) = [each for each in events if each["name"] == "checkpoint of step 7"]
    assert checkpoint["ts"] == round((began + 1) * 1e6)
    assert allranks("report", "--trace", "-").stdout == text
    assert allranks("report", "--trace", "trace.json").rc == 0


def test_two_runs_are_apart_and_a_file_of_the_users_own_stays(allranks: Any) -> None:
    script = allranks.script("")
    for _ in range(2):
        assert allranks("run", "train.py").rc == 0
    names = [run.name for run in allranks.runs()]
    _, processes = _trace(allranks("report", *names, "--trace", "-").stdout)
    assert [processes[0], processes[1_000_000]] == [f"run {name}" for name in names]
    assert len(processes) == 4
    done = allranks("report", "--trace", "train.py")
    assert (done.rc, script.read_text()) == (2, "")
    assert done.message["error"] == "train.py is left as it is"
