"""A run that has ended is resumed, in its own directory, and continues from its newest checkpoint."""

from __future__ import annotations

import os
import signal
from typing import Any

from exact_runs import command, undisturbed, weights_in
from waiting import PATIENCE, wait_for

OPTIONS = ("--epochs", "20", "--every", "2", "--quiet")


def started_and_killed(allranks: Any, watch: Any) -> None:
    """Leave a run that failed in the middle of its training."""
    process = allranks.popen(*command("hurt", *OPTIONS, "--slow-until", "go"))
    wait_for("a checkpoint", lambda: (allranks.folder / "hurt" / "latest").exists())
    os.kill(watch.event("ranks-started")["ranks"][1]["pid"], signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    (allranks.folder / "go").touch()


def test_a_run_that_failed_goes_on_where_it_was(allranks: Any, watch: Any) -> None:
    """It takes more than 10 s: a training, its continuation, and the undisturbed one."""
    started_and_killed(allranks, watch)
    (run,) = allranks.runs()
    done = allranks("resume", timeout=PATIENCE)
    assert done.rc == 0, done.stderr
    assert allranks.runs() == [run]
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["000", "001"]
    assert allranks.record()["status"]["state"] == "SUCCEEDED"
    assert "continuing from hurt/step-" in done.stderr
    assert weights_in(done.stdout) == undisturbed(allranks, *OPTIONS)


def test_a_detached_attempt_is_followed_and_cancelled_like_any_run(allranks: Any, watch: Any) -> None:
    """It takes more than 10 s: a training and its continuation."""
    started_and_killed(allranks, watch)
    (allranks.folder / "go").unlink()
    started = allranks("resume", "--detach")
    assert (started.rc, started.stdout.strip()) == (0, allranks.run().name)
    wait_for("the ranks", lambda: "continuing from" in allranks("logs").stderr)
    assert "RUNNING" in allranks("status").stdout
    again = allranks("resume")
    assert again.rc == 1
    assert f"error: {allranks.run().name} has not ended\n  why: it is RUNNING\n" in again.stderr
    assert allranks("cancel").rc == 0
    assert allranks.record()["status"]["state"] == "CANCELLED"


def test_a_run_that_succeeded_has_nothing_to_resume(allranks: Any) -> None:
    allranks.script("print('done')\n")
    assert allranks("run", "train.py").rc == 0
    done = allranks("resume")
    assert done.rc == 1
    assert f"error: {allranks.run().name} has succeeded: there is nothing to resume\n" in done.stderr


def test_a_run_whose_script_was_removed(allranks: Any) -> None:
    allranks.script("raise SystemExit(3)\n")
    assert allranks("run", "train.py").rc == 3
    (allranks.folder / "train.py").unlink()
    done = allranks("resume")
    assert (done.rc, done.message["error"]) == (1, f"there is no script {allranks.folder}/train.py")
    assert not (allranks.run() / "attempts" / "001").exists()


def test_a_run_of_another_version_is_refused_in_words(allranks: Any) -> None:
    allranks.script("raise SystemExit(3)\n")
    assert allranks("run", "train.py").rc == 3
    (allranks.run() / "plan.json").write_text("{}")
    done = allranks("resume")
    assert done.rc == 1
    assert "plan.json is not a plan of this version" in done.stderr
