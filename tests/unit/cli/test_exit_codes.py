"""A foreground run ends with the script's own code, and says how it ended."""

from __future__ import annotations

import json
import signal

import pytest

from waiting import PATIENCE

UNSAVED = "no checkpoint: from the beginning, unless the script loads its own"

ENDS = {
    "pass": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit(2)": 2,
    "import sys; sys.exit(75)": 75,  # It was not asked to stop.
    "import sys; sys.exit('no data here')": 1,
    "import os; os._exit(250)": 250,
    "1 / 0": 1,
    "import os; os.kill(os.getpid(), 9)": 137,
    "import os; os.kill(os.getpid(), 15)": 143,
    "import ctypes; ctypes.string_at(0)": 139,
}


@pytest.mark.parametrize("script", ENDS)
def test_code_of_the_script(allranks, assert_nothing_left, script: str):
    allranks.script(f"{script}\n")
    code = ENDS[script]
    result = allranks("run", "train.py")
    run = allranks.run()
    assert result.rc == code
    if code:
        assert result.message["error"].startswith("rank 0 ")
        verdict = json.loads(allranks("why", "--json").stdout)["diagnosis"]
        assert result.message["fix"] == verdict["fix"].replace("RUN", run.name)
        if script == "1 / 0":  # The log was just shown: the next step is in the script.
            assert result.message["fix"] == f"correct train.py:1, then: allranks resume {run.name} ({UNSAVED})"
        assert result.message["see"] == f"runs/{run.name}/attempts/000/node-000/rank-0.err"
    else:
        assert result.message == {}
    status = allranks.record()["status"]
    assert (status["exit_code"], status["state"]) == (code, "FAILED" if code else "SUCCEEDED")
    assert_nothing_left(run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run(allranks, assert_nothing_left, number: int, code: int):
    allranks.script("import time\nprint('ready', flush=True)\ntime.sleep(300)\n")
    process = allranks.popen("run", "train.py")
    assert process.stdout.readline() == b"[0] ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    run = allranks.run()
    name = signal.Signals(number).name
    assert process.returncode == code
    assert f"allranks: {name}: the ranks have 30 s to save and exit; ".encode() in err
    *_, ended, following = err.decode().splitlines()
    assert ended == f"allranks: {run.name} was cancelled (got {name})"
    assert following == f"next: allranks resume {run.name} ({UNSAVED})"
    assert allranks.record()["status"]["state"] == "CANCELLED"
    (run / "checkpoints.jsonl").write_text('{"attempt": 0, "step": 63, "path": "/ckpt", "leaving": true}\n')
    status = allranks("status")
    assert "\ncheckpoint  step 63\n" in status.stdout
    assert status.stderr == f"next: allranks resume {run.name} (from step 63)\n"
    assert_nothing_left(run)


def test_a_node_started_by_hand_does_not_know_what_node_0_has_saved(allranks):
    allranks.script("")
    assert allranks("run", "train.py").rc == 0
    run = allranks.run()
    (run / "attempts/000/node-000").rename(run / "attempts/000/node-001")
    record = json.loads((run / "record.json").read_text()) | {"nnodes": 2, "status": {"state": "CANCELLED"}}
    (run / "record.json").write_text(json.dumps(record))
    note = "on all nodes: from the newest checkpoint of node 0"
    assert allranks("status").stderr == f"next: allranks resume {run.name} ({note})\n"


def test_reader_that_goes_away_does_not_end_the_run(allranks):
    """``allranks run ... | head -1``: the training continues, and its logs are whole."""
    text = "import time\nfor i in range(3000):\n    print(i, 'x' * 100, flush=True)\nopen('done', 'w')\n"
    allranks.script(text)
    process = allranks.popen("run", "train.py")
    assert process.stdout.readline().startswith(b"[0] 0 x")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(PATIENCE) == 0
    assert b"allranks: the reader of stdout is gone; the run continues, its logs are in its directory\n" in err
    assert (allranks.folder / "done").exists()
    assert len(allranks("logs").stdout.splitlines()) == 3000


def test_detached_run(allranks, assert_nothing_left):
    allranks.script("import time\nprint('ready', flush=True)\ntime.sleep(300)\n")
    result = allranks("run", "train.py", "--detach")
    run = allranks.run()
    assert (result.rc, result.stdout) == (0, f"{run.name}\n")
    assert result.stderr.endswith(f"next: allranks logs -f {run.name}\n")
    follower = allranks.popen("logs", "-f")
    assert follower.stdout.readline() == b"[0] ready\n"
    assert "RUNNING" in allranks("status").stdout
    cancelled = allranks("cancel")
    assert (cancelled.rc, cancelled.stderr) == (0, f"{run.name} cancelled\n")
    assert follower.wait(PATIENCE) == 0
    assert "CANCELLED" in allranks("ps").stdout
    assert_nothing_left(run)


def test_ctrl_c_before_the_command_is_imported_ends_it_without_a_traceback(allranks):
    """Its command line is imported for a tenth of a second; here, until the signal comes."""
    allranks.script("import sys, time\nprint('importing', flush=True)\ntime.sleep(300)\n", "click.py")
    process = allranks.popen("ps", PYTHONPATH=str(allranks.folder))
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")
