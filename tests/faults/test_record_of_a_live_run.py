"""What is known of a run while it continues: without a handle, without a record, read-only, by any of its names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_detach import COUNT
from test_ending import SLEEPER

from allranks.clusters.local import LocalCluster
from allranks.errors import RunFolderError
from allranks.job.load import load_job
from allranks.launch import submit as launching
from allranks.runs.status import Handle
from allranks.system.processes import marked
from waiting import PATIENCE, wait_for

TICKER = """\
import itertools, os, time
for number in itertools.count():
    print("tick", number, flush=True)
    if os.path.exists("go"):
        break
    time.sleep(.01)
"""


def _lose_handle(run):
    path = run / "record.json"
    record = json.loads(path.read_text())
    record |= {"handle": Handle()._asdict(), "created": time.time() - 3600}
    record["status"] |= {"state": "PENDING", "native": "starting"}
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(("stage", "native"), [("ranks", "ranks running"), ("setup", "agent gone")])
def test_a_live_run_that_lost_its_handle_is_found_and_ended(allranks, watch, stage, native):
    allranks.script(SLEEPER)
    setup = "environment:\n  node_setup: |\n    echo $$ > shell\n    sleep 303\n"
    allranks.job("script: train.py\nlaunch:\n  nproc_per_node: 2\n" + (setup if stage == "setup" else ""))
    assert allranks("run", "job.yaml", "--detach").rc == 0
    if stage == "setup":
        watch.pid_file("shell")
    else:
        for rank in (0, 1):
            watch.line(rank, "up")
    _lose_handle(watch.run)
    told = json.loads(allranks("status", "--json").stdout)
    assert (told["status"]["state"], told["status"]["native"]) == ("RUNNING", native)
    assert allranks.record(watch.run)["status"]["state"] == "PENDING"  # Nothing of that is for good.
    assert allranks("cancel").rc == 0
    watch.nothing_left()
    assert watch.status()["state"] == "CANCELLED"


def test_a_run_that_cannot_be_written_down_is_ended_again(allranks, watch):
    """Nobody could find it, and it would continue for ever."""
    allranks.script(SLEEPER)
    job = load_job(None, flags={"script": "train.py"}, environ=allranks.env, cwd=allranks.folder).job
    launch = launching.Launch(job, "", allranks.folder, allranks.folder / "runs", allranks.env)
    kind = LocalCluster()
    run, plan = launching.prepare(launch, kind)
    record = run.folder / "record.json"
    record.unlink()
    record.mkdir()
    with pytest.raises(RunFolderError) as caught:
        launching.start(run, plan, kind, launch.environ_for(plan), detach=True, watched=False)
    assert (caught.value.what, caught.value.why) == (f"cannot write {record}", "Is a directory")
    wait_for("nothing left", lambda: not marked("ALLRANKS_RUN_DIR", str(run.folder)))
    assert watch.events("ranks-started") == []


def test_a_folder_of_the_name_latest_does_not_stop_a_run(allranks):
    keep = allranks.folder / "runs" / "latest" / "mine"
    keep.mkdir(parents=True)
    allranks.script("print('hello')")
    done = allranks("run", "train.py", "--name", "demo")
    assert (done.rc, done.stdout) == (0, "[0] hello\n")
    first, *_, last = done.stderr.splitlines()
    why = "it is not a link that allranks made"
    assert first == f"allranks: note: {allranks.folder}/runs/latest is left as it is: {why}"
    assert last.startswith("allranks: demo-")
    assert " succeeded in " in last
    assert keep.is_dir()


def test_a_folder_of_the_name_latest_leaves_no_second_name_behind(allranks):
    (allranks.folder / "runs" / "latest").mkdir(parents=True)
    allranks.script("")
    assert allranks("run", "train.py", "--name", "demo").rc == 0
    (listed,) = json.loads(allranks("ps", "--json").stdout)
    assert {path.name for path in (allranks.folder / "runs").iterdir()} == {"latest", listed["id"]}


@pytest.fixture
def made_read_only():
    """Give a function that makes a directory read-only in its place; it is as before after the test."""
    mounted = []

    def mount(folder):
        if os.geteuid():
            pytest.skip("only root can mount a directory read-only")
        bound = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, text=True)
        if bound.returncode:
            pytest.skip(f"cannot mount a folder: {bound.stderr.strip()}")
        mounted.append(folder)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)

        def undo():
            subprocess.run(["umount", str(folder)], check=True)
            mounted.remove(folder)

        return undo

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_end_is_seen_where_it_cannot_be_written_down(allranks, watch, made_read_only):
    allranks.script("print('hello')\n")
    assert allranks("run", "train.py", "--detach").rc == 0
    assert watch.event("ended")["state"] == "SUCCEEDED"
    watch.nothing_left()
    undo = made_read_only(allranks.folder / "runs")
    name = watch.run.name
    (listed,) = json.loads(allranks("ps", "--json").stdout)
    status = allranks("status", "--json")
    assert (listed["id"], listed["status"]) == (name, json.loads(status.stdout)["status"])
    assert (listed["status"]["state"], listed["status"]["exit_code"]) == ("SUCCEEDED", 0)
    for args in (["logs"], ["logs", "-f"]):
        done = allranks(*args)
        assert (done.rc, done.stdout, done.stderr) == (0, "[0] hello\n", "")
    done = allranks("cancel")
    assert (done.rc, done.stderr) == (0, f"{name} had ended before: SUCCEEDED\n")
    for args in (["ps"], ["status"]):
        done = allranks(*args)
        assert (done.rc, "SUCCEEDED" in done.stdout, "error" in done.stderr) == (0, True, False)
    assert allranks.record(watch.run)["status"]["state"] == "PENDING"
    undo()
    assert allranks("ps").rc == 0
    written = allranks.record(watch.run)["status"]
    assert (written["state"], written["exit_code"]) == ("SUCCEEDED", 0)


def test_a_reader_that_has_seen_enough_ends_logs_and_not_the_run(allranks, watch):
    allranks.script(TICKER)
    assert allranks("run", "train.py", "--detach").rc == 0
    watch.line(0, "tick 3")
    pipe = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    follow = [sys.executable, "-m", "allranks", "logs", "-f"]
    done = subprocess.run(
        ["bash", "-c", pipe, "bash", *follow],
        cwd=allranks.folder,
        env=allranks.env,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("[0] tick 0\n141\n", "")
    assert json.loads(allranks("status", "--json").stdout)["status"]["state"] == "RUNNING"
    (allranks.folder / "go").touch()
    assert watch.event("ended")["state"] == "SUCCEEDED"


def test_a_run_under_nohup_outlives_its_terminal(allranks, watch, finish):
    allranks.script(COUNT)
    process = subprocess.Popen(
        ["nohup", sys.executable, "-m", "allranks", "run", "train.py"],
        cwd=allranks.folder,
        env=allranks.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        watch.line(0, "up")
        process.send_signal(signal.SIGHUP)
        (allranks.folder / "go").touch()
        code, out, err = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert (code, out) == (0, "[0] up\n[0] done 0\n")
    assert "SIGHUP" not in err
    assert watch.events("stop-requested") == []
    assert watch.status()["state"] == "SUCCEEDED"


def test_under_nohup_the_launcher_goes_on_ignoring_sighup(allranks, watch):
    """The end of a run can overtake a signal; what the kernel says of the process cannot be overtaken."""
    allranks.script(SLEEPER)
    command = ["nohup", sys.executable, "-m", "allranks", "run", "train.py"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=allranks.folder, env=allranks.env, start_new_session=True, **streams)
    try:
        rank = int(watch.line(0, "up"))
        assert _ignores(process.pid, signal.SIGHUP)
        assert not _ignores(watch.agent(), signal.SIGHUP)
        assert not _ignores(rank, signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    finally:
        process.kill()
        process.wait()


def _ignores(pid, number):
    with open(f"/proc/{pid}/status") as stream:
        (mask,) = (int(line.split()[1], 16) for line in stream if line.startswith("SigIgn:"))
    return bool(mask >> (number - 1) & 1)


def test_a_run_is_named_by_its_id_the_beginning_of_it_or_its_folder(allranks, watch):
    allranks.script("import sys\nprint('I am', sys.argv[1], flush=True)\n" + SLEEPER)
    names = ["one", "two", "three", "newest"]
    runs = {}
    for name in names:
        done = allranks("run", "train.py", "--detach", "--name", name, "--", name)
        runs[name] = allranks.folder / "runs" / done.stdout.strip()
    called = {"one": runs["one"].name, "two": "tw", "three": f"runs/{runs['three'].name}"}
    for name in names:
        log = runs[name] / "attempts" / "000" / "node-000" / "rank-0.out"
        wait_for(f"{name} to be up", lambda log=log: log.exists() and "\nup" in log.read_text())
    for name, typed in called.items():
        assert allranks("logs", typed).stdout.splitlines()[0] == f"[0] I am {name}"
        done = allranks("cancel", typed)
        assert (done.rc, done.stdout, done.stderr) == (0, "", f"{runs[name].name} cancelled\n")
        assert marked("ALLRANKS_RUN_DIR", str(runs[name])) == []
    states = [(told["id"], told["status"]["state"]) for told in json.loads(allranks("ps", "--json").stdout)]
    assert states == [(runs[name].name, "RUNNING" if name == "newest" else "CANCELLED") for name in names]
    done = allranks("cancel", runs["newest"])
    assert (done.rc, done.stderr) == (0, f"{runs['newest'].name} cancelled\n")


def test_a_test_leaves_no_run_behind(allranks, watch):
    """What tests/conftest.py promises."""
    allranks.script(SLEEPER)
    assert allranks("run", "train.py", "--detach").rc == 0
    watch.line(0, "up")
    allranks.close()
    assert marked("ALLRANKS_RUN_DIR", str(watch.run)) == []


def test_a_run_whose_directory_is_removed_says_so(allranks, watch, assert_nothing_left):
    allranks.script(TICKER)
    process = allranks.popen("run", "train.py")
    watch.line(0, "tick 1")
    run = watch.run
    run.rename(allranks.folder / "away")  # At once: the agent would write into what is being removed file by file.
    (allranks.folder / "go").touch()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, err
    said = err.decode().splitlines()
    assert said[1:] == [
        f"error: {run} is gone",
        "  why: it was removed while a run wrote into it",
        "  fix: start it again; allranks prune removes only runs that have ended",
        f"error: {run.name} FAILED: its directory was removed while it ran",
    ]
    assert_nothing_left(run)
