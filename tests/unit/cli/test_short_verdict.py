"""The short form of the verdict: those who report on a failed run show it, and its directory keeps it."""

from __future__ import annotations

import json
import re

import pytest

TYPO = "import os\nif os.environ['RANK'] == '1':\n    weigths\nimport time\ntime.sleep(1000)\n"
FULL = TYPO.replace("weigths", "raise OSError(28, 'No space left on device')")
FOUND, RETRY = "a disk, or /dev/shm, is full (train.py:3, likely)", "can help after a change of the job"


def test_what_reports_on_a_failed_run_shows_the_verdict(allranks) -> None:
    allranks.script(FULL)
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    run = allranks.run()
    line = f"allranks: {run.name}: diagnosis: {FOUND}; a retry {RETRY}\n"
    assert f"{line}error: rank 1 exited with code 1\n" in done.stderr
    rows = dict(re.findall(r"^(\w+) +(.*)$", allranks("status").stdout, re.MULTILINE))
    assert (rows["diagnosis"], rows["retry"]) == (FOUND, RETRY)
    assert allranks("logs", "-f").stderr.endswith(line)
    kept = json.loads((run / "diagnosis.json").read_text())
    assert kept["attempt"] == 0
    assert (kept["diagnosis"]["id"], kept["diagnosis"]["rank"]) == ("no-space", 1)
    assert json.loads(allranks("status", "--json").stdout)["diagnosis"] == kept["diagnosis"]
    assert line in allranks("resume").stderr
    assert json.loads((run / "diagnosis.json").read_text())["attempt"] == 1


def test_what_was_kept_is_shown_and_why_judges_again(allranks) -> None:
    allranks.script(TYPO)
    allranks("run", "train.py", "--nproc-per-node", "2")
    path = allranks.run() / "diagnosis.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "diagnosis": {**kept["diagnosis"], "cause": "it was kept"}}))
    assert "it was kept (train.py:3, certain)" in allranks("status").stdout
    assert "the script raised NameError (train.py:3)" in allranks("why").stdout
    assert json.loads(path.read_text()) == kept
    path.write_text('{"attempt": 0, "diagnosis": {"of": "another version"}}')
    assert "the script raised NameError (train.py:3, certain)" in allranks("status").stdout


@pytest.mark.parametrize(
    ("wrong", "error", "sure"),
    [("weigths", "NameError: name 'weigths' is not defined", "certain"), ("{}['lr']", "KeyError: 'lr'", "likely")],
)
def test_an_exception_of_the_script_is_reported_once(allranks, wrong: str, error: str, sure: str) -> None:
    allranks.script(TYPO.replace("weigths", wrong))
    done = allranks("run", "train.py", "--nproc-per-node", "2")
    assert "diagnosis" not in done.stderr
    assert f"\n  why: {error} (train.py:3)\n" in done.stderr
    retry = "a retry will not help: change the script or its environment first"
    line = f"diagnosis: the script raised {error.partition(':')[0]} (train.py:3, {sure}); {retry}\n"
    assert allranks("logs", "-f").stderr.endswith(line)


def test_an_exception_that_the_script_has_caught_is_reported_beside_its_exit(allranks) -> None:
    caught = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()\nsys.exit('no such data')\n"
    allranks.script(f"import sys, traceback\n{caught}")
    stderr = allranks("run", "train.py").stderr
    assert "diagnosis: the script raised ZeroDivisionError (train.py:3, likely);" in stderr
    assert "\n  why: no such data\n" in stderr


def test_a_run_that_was_not_explained_has_no_verdict(allranks) -> None:
    allranks.script("import sys\nsys.exit(3)\n")
    done = allranks("run", "train.py")
    assert "diagnosis" not in done.stderr
    assert "diagnosis" not in allranks("status").stdout


def test_a_run_that_succeeded_has_none(allranks) -> None:
    allranks.script("print('done')\n")
    done = allranks("run", "train.py", "--json")
    assert json.loads(done.stdout)["diagnosis"] is None
    assert not (allranks.run() / "diagnosis.json").exists()
