"""What a user may rely on wherever a run is started: the same scenarios on clusters of all kinds, on real commands.

Slurm has all of them, and the others those that depend on code of their kind. No rank here imports torch unless ranks
have to meet: a training is in ``test_scenarios_of_trainings``. What a kind says or does in its own way is in its own
tests, and so are nodes that are started by hand.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from cluster_tools import wait_until
from followed_runs import Followed, files_with, given_to, run_named
from left_behind import command_lines_with
from ranks_told import GOES, PLACES, UP, WHO, expected, listed, ranks_saying, shown, who
from sites import Site, on

from strangers import ARGUMENT, ATTACKED, assert_strangers_learn_nothing, listening


def assert_placed(site: Site, run: Followed, counts: list[int]) -> None:
    """Assert that a run has succeeded, with so many ranks on each of its hosts."""
    done = run.end()
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == expected(counts, site.hosts(run))
    record = site.lab.record(run.folder)
    found = record["kind"], record["cluster"], record["status"]["state"], record["nnodes"], record["world_size"]
    assert found == (site.record_kind, "lab", "SUCCEEDED", len(counts), sum(counts))


#: One node, and as many as there are.
SHAPES = {
    "slurm": [[4], [1] * 4],
    "pbs": [[3], [1] * 4],
    "torque": [[2, 2]],
    "grid_engine": [[3], [1] * 4],
    "pdsh": [[1, 1]],
}


@pytest.mark.smoke
@on(*SHAPES)
def test_ranks_are_where_they_were_asked_for(site: Site) -> None:
    """It takes more than 10 s on a slow machine: schedulers run up to four jobs."""
    site.lab.script(PLACES)
    runs = [
        (site.start(f"{name}-{len(counts)}", "train.py", counts, "--launcher", name), counts)
        for counts in SHAPES[site.kind]
        for name in site.launchers
    ]
    for run, counts in runs:
        assert_placed(site, run, counts)
    site.assert_nothing_left()


@pytest.mark.smoke
@on("slurm", "pbs", "grid_engine", "ssh")
def test_all_ranks_meet(site: Site) -> None:
    """It takes more than 10 s: ranks import torch on two nodes, with each launcher."""
    site.lab.script(WHO)
    runs = [site.start(name, "train.py", [2, 2], "--launcher", name) for name in site.launchers]
    for run in runs:
        assert_placed(site, run, [2, 2])


@on("slurm", "pbs", "ssh")
def test_ranks_that_never_meet_are_noted(site: Site) -> None:
    """It takes more than 10 s: agents import torch on two nodes."""
    site.lab.script("import torch\n")
    run = site.start("alone", "train.py", [1, 1])
    done = run.end()
    assert done.rc == 0, done.stderr
    note = "the 2 ranks formed no process group: each ran the whole script alone; "
    assert f"\nallranks: note: {note}" in done.stderr
    assert site.lab.record(run.folder)["status"]["reason"].startswith(note)


@on("slurm", "ssh")
def test_strangers_change_nothing(site: Site) -> None:
    """It takes more than 10 s: two ranks import torch on nodes of their own, and 41 kinds of talk reach each port."""
    site.lab.script(ATTACKED)
    run = site.start("attacked", "train.py", [1, 1], "--", ARGUMENT)
    wait_until("rank 0 to work", (site.lab.folder / "works").exists)
    places = listening(run.folder)
    assert len(places) == 2
    assert "*" not in {address for found in places.values() for address, _ in found}
    assert_strangers_learn_nothing(run.folder)
    (site.lab.folder / "go").touch()
    done = run.end()
    assert done.rc == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}:{rank}] {rank} [0, 1, 2] fine 2.0" for rank in (0, 1)]
    site.assert_nothing_left()


#: Rank 2, the first one of the second node, fails in a way of its own; the others would continue for long.
FAILING = """\
import os, signal, sys, time
if os.environ["RANK"] == "2":
    {end}
time.sleep(1000)
"""
ENDS = {
    "raises": ('raise ValueError("no data")', 1, "exited with code 1", r"ValueError: no data \(raises\.py:3\)"),
    "exits": ('print("no data here", file=sys.stderr); sys.exit(7)', 7, "exited with code 7", "no data here"),
    "dies": (
        'print("no data here", file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)',
        *(137, "was killed by SIGKILL", r"the kernel did not kill it for its memory: .*; its last words: no data here"),
    ),
}


#: What ``allranks why`` makes of each.
VERDICTS = {
    "raises": ("script-exception", "likely"),
    "exits": ("", "unknown"),
    "dies": ("killed-by-another-process", "likely"),
}
#: Without an agent the kernel's count of kills is not known.
DIES_ALONE = (r"memory may have run out.*; its last words: no data here", ("killed", "likely"))

#: In every way where a scheduler may say something of its own, and so that all ways of starting ranks have one.
ENDS_ON = {
    "slurm": ENDS,
    "pbs": ENDS,
    "torque": ["exits"],
    "grid_engine": ["exits", "dies"],
    "ssh": ["raises", "dies"],
    "pdsh": ["raises"],
}


@on(*ENDS_ON)
def test_the_rank_that_failed_first_is_named(site: Site) -> None:
    """It takes more than 10 s on a slow machine: Slurm and PBS run six jobs of four ranks each."""
    runs = []
    for how in ENDS_ON[site.kind]:
        site.lab.script(FAILING.format(end=ENDS[how][0]), f"{how}.py")
        runs += [site.start(f"{how}-{name}", f"{how}.py", [2, 2], "--launcher", name) for name in site.launchers]
    for run in runs:
        how, _, launcher = run.name.partition("-")
        (_, code, words, why), verdict = ENDS[how], VERDICTS[how]
        if (how, launcher) == ("dies", "direct"):
            why, verdict = DIES_ALONE
        done, name = run.end(), run.folder.name
        assert done.rc == code, done.stderr
        error, cause, *rest = done.stderr.splitlines()[-4:]
        assert error == f"error: rank 2 on {site.hosts(run)[1]} {words}"
        assert re.fullmatch(f"  why: {why}", cause), cause
        status = site.lab.record(run.folder)["status"]
        assert (status["state"], status["rank"], status["exit_code"]) == ("FAILED", 2, code)
        found = json.loads(site.lab("why", name, "--json").stdout)["diagnosis"]
        fix = found["fix"].replace("RUN", name)
        assert rest == [f"  fix: {fix}", f"  see: runs/{name}/attempts/000/node-001/rank-2.err"]
        if how == "raises":
            assert fix.startswith(f"correct raises.py:3, then: allranks resume {name} (no checkpoint: ")
        assert (found["id"], found["sure"], found["rank"], found["host"]) == (*verdict, 2, site.hosts(run)[1])
    site.assert_nothing_left()


#: Rank 3 stands elsewhere than the others.
STANDS = """\
import os, time
def elsewhere():
    time.sleep(1000)
print("up", flush=True)
elsewhere() if os.environ["RANK"] == "3" else time.sleep(1000)
"""


@on("slurm", "pbs", "grid_engine")
def test_where_ranks_of_all_nodes_stand(site: Site) -> None:
    """It takes more than 10 s on a slow machine: a scheduler starts and cancels a job on two nodes."""
    script = site.lab.script(STANDS, "stands.py")
    run = site.start("stands", "stands.py", [2, 2]).wait_for_ranks(4)
    done = site.lab("stacks", run.folder.name)
    note = "ranks that advance are at different lines too: call it again to see which of them stand still"
    assert (done.rc, done.stderr) == (0, f"allranks: note: {note}\n")
    places = [f"  {script}:3 in elsewhere", f"  {script}:5 in <module>"]
    assert done.stdout.splitlines() == ["rank 3", *places, "ranks 0-2", places[1]]
    assert site.lab("cancel", run.folder.name).rc == 0
    site.assert_nothing_left()


@on("ssh")
def test_a_hang_is_noticed_over_all_nodes(site: Site) -> None:
    """The first node's ranks advance for a while after those of the second have stopped.

    It takes more than 10 s: the ranks hang three times, after 3 s in which some of them advance.
    """
    site.lab.script(
        "import os, time\n"
        "def load():\n"
        "    time.sleep(1000)\n"
        "def wait():\n"
        "    time.sleep(1000)\n"
        "if os.environ['RANK'] == '0':\n"
        "    for n in range(30): print(n, flush=True); time.sleep(0.1)\n"
        "load() if os.environ['RANK'] == '3' else wait()\n",
        "hangs.py",
    )
    run = site.start("hangs", "hangs.py", [2, 2], "--hang-timeout", 1, "--on-hang", "end").end()
    code, err = run.rc, run.stderr
    place = "ranks 0-2 are in wait at hangs.py:5; rank 3 is in load at hangs.py:3"
    assert (code, err.count(f"{place}; the run ends"), err.count("no rank has advanced")) == (1, 1, 1), err
    verdict = json.loads(site.lab("why", run.folder.name, "--json").stdout)["diagnosis"]
    assert (verdict["id"], verdict["rank"], place in verdict["cause"]) == ("hang", 3, True)
    flags = ("--hang-timeout", 1, "--on-hang", "restart", "--max-restarts", 1)
    run = site.start("again", "hangs.py", [2, 2], *flags).end()
    code, err = run.rc, run.stderr
    assert (code, err.count("all ranks restart"), err.count("restarted with 4 ranks on 2 nodes")) == (1, 2, 1)
    assert "the ranks hang: none has advanced for" in err
    site.assert_nothing_left()


#: By the verb, by Ctrl-C, or by a command of the scheduler, and with which launcher.
CANCELS = {
    "slurm": [("cancel", "torchrun"), ("cancel", "direct"), ("ctrl-c", "torchrun"), ("outside", "torchrun")],
    "pbs": [(how, launcher) for how in ("cancel", "ctrl-c", "outside") for launcher in ("torchrun", "direct")],
    "torque": [("cancel", "torchrun"), ("ctrl-c", "direct"), ("outside", "torchrun")],
    "grid_engine": [("cancel", "torchrun"), ("cancel", "direct"), ("ctrl-c", "direct"), ("outside", "torchrun")],
    "ssh": [("cancel", "torchrun"), ("ctrl-c", "torchrun")],
    "pdsh": [("cancel", "torchrun"), ("ctrl-c", "torchrun")],
}


@pytest.mark.smoke
@on(*CANCELS)
def test_nothing_is_left_of_a_run_that_is_cancelled(site: Site) -> None:
    """It takes more than 10 s: schedulers start and cancel up to six jobs on two nodes each."""
    site.lab.script(UP)
    runs = [
        (site.start(f"{how}-{name}", "train.py", [1, 1], "--launcher", name), how) for how, name in CANCELS[site.kind]
    ]
    everyone = [run.wait_for_ranks(2) for run, _ in runs]
    assert listed_of(site, everyone) == ["RUNNING"] * len(runs)
    for run, how in runs:
        if how == "cancel":
            assert site.lab("cancel", run.folder.name).rc == 0
        elif how == "ctrl-c":
            run.process.send_signal(signal.SIGINT)
        else:
            site.cancel_outside(run)
    for run in everyone:  # All of them first: another command would see an end before the run's own.
        run.end()
    assert listed_of(site, everyone) == ["CANCELLED"] * len(runs)
    for run, how in runs:
        code, name = 130 if how == "ctrl-c" else 143, run.folder.name
        assert run.rc == code, run.stderr
        *_, said, following = run.stderr.splitlines()
        assert said.startswith(f"allranks: {name} was cancelled{site.why_cancelled(run)}"), run.stderr
        assert following.startswith(f"next: allranks resume {name} (no checkpoint: ")
        assert_shown(site, run, "CANCELLED", str(code))
        assert len([*(run.folder / "attempts").iterdir()]) == 1
    site.assert_nothing_left()


def listed_of(site: Site, runs: Iterable[Followed]) -> list[str]:
    """Return the states that ps says of runs."""
    found = listed(site.lab)
    return [found[run.folder.name] for run in runs]


def assert_shown(site: Site, run: Followed, state: str, code: str | None) -> None:
    """Assert what status says of a run: its state, also in the scheduler's own word, and its exit code."""
    said, found = shown(site.lab, run.folder)
    native = site.native(state)
    assert (said.split()[0], found) == (state, code)
    assert native is None or said == f"{state}  {native}"


#: What no quoting of shells, schedulers or JSON must alter; what starts it stands nowhere else.
SECRET = "s3same'\"\\$HOME`,;&\n% \té="
PLAIN = "a, 'b' $c"
HOSTILE = 'it\'s 50%j of "a" $HOME'
#: Tells what this rank has been given, and ends when there is a file ``go``.
GIVEN = """\
import hashlib, json, os, time
secret = hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest()
print("given", json.dumps([secret, os.environ["PLAIN"], os.getcwd()]), flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""


@on("slurm", "pbs", "grid_engine", "ssh", "pdsh")
def test_names_and_secrets_reach_the_ranks_unaltered(site: Site) -> None:
    """In a directory of any name; the secret is in no command line, and in files only as long as the ranks start.

    It takes more than 10 s on a slow machine: two jobs on two nodes.
    """
    folder = _moved(site.lab, HOSTILE)
    site.lab.script(GIVEN, "my train.py")
    site.lab.job(
        f"script: my train.py\nenvironment: {{variables: {{MY_TOKEN: <secret>, PLAIN: {json.dumps(PLAIN)}}}}}\n",
        "my job.yaml",
    )
    runs = [site.start(name, "my job.yaml", [1, 1], "--launcher", name, MY_TOKEN=SECRET) for name in site.launchers]
    given = [sha256(SECRET.encode()).hexdigest(), PLAIN, str(folder)]
    for run in runs:
        site.wait_until("both ranks", lambda run=run: len(given_to(run)) == 2)
        assert given_to(run) == [given] * 2
        assert {mode for _, mode in files_with(run.folder, b"s3same")} <= {0o600}
        assert [path for path, _ in files_with(run.folder, b"s3same") if path.name != "secrets.sh"] == []
    assert command_lines_with(b"s3same") == []
    site.lab.script("", "go")
    for run in runs:
        assert run.end().rc == 0, run.stderr
        assert files_with(run.folder, b"s3same") == []
        assert_shown(site, run, "SUCCEEDED", "0")
        assert [log.name for log in run.folder.glob("*-*.out")] == site.logs_of_scheduler(run)


def _moved(lab: Any, name: str) -> Path:
    """Have the command run in a directory of this name below, with all that is there."""
    folder = Path(lab.folder)
    lab.folder = folder / name
    lab.folder.mkdir()
    (folder / "clusters.yaml").rename(lab.folder / "clusters.yaml")
    return Path(lab.folder)


@on("slurm", "pbs", "grid_engine")
def test_a_detached_run_is_followed_while_it_runs(site: Site) -> None:
    """It takes more than 10 s on a slow machine: two jobs on two nodes, and eight commands."""
    site.lab.script(GOES)
    flags = ("--on", "lab", "--nodes", "2", site.ranks_flag, "1", "--detach")
    runs = []
    for name in site.launchers:
        started = site.lab("run", "train.py", *flags, "--launcher", name, "--name", name)
        assert (started.rc, started.stdout) == (0, f"{run_named(site.lab, name).name}\n"), started.stderr
        runs.append(Followed(site.lab, name, site.lab.popen("logs", "-f", run_named(site.lab, name).name)))
    for run in runs:
        said = ""
        while ranks_saying(said, "up") != [0, 1]:
            line = run.process.stdout.readline().decode()
            assert line, said
            said += line
        assert_shown(site, run, "RUNNING", None)
    assert listed_of(site, runs) == ["RUNNING"] * len(runs)
    (site.lab.folder / "part").write_text("0")
    (site.lab.folder / "part").rename(site.lab.folder / "go")
    for run in runs:
        run.end()
        assert (run.rc, ranks_saying(run.stdout, "went")) == (0, [0, 1])
        assert_shown(site, run, "SUCCEEDED", "0")
    assert listed_of(site, runs) == ["SUCCEEDED"] * len(runs)


@on("slurm", "pbs", "grid_engine")
def test_a_script_that_plan_wrote_runs_when_a_person_submits_it(site: Site) -> None:
    """It takes more than 10 s on a slow machine: two jobs on two nodes, one after the other."""
    site.lab.script(PLACES)
    for name in site.launchers:
        flags = ("--on", "lab", "--nodes", "2", "--launcher", name, "--name", name)
        written = site.lab("plan", "train.py", *flags, "-o", f"{name}.sh")
        assert written.rc == 0, written.stderr
        hosts = site.submit(site.lab.folder / f"{name}.sh")
        run = run_named(site.lab, name)
        logs = run.glob("attempts/000/node-*/rank-*.out")
        assert who("".join(log.read_text() for log in logs)) == expected([1, 1], hosts)
        assert_code_is_copied_as_compiled(run / "code")


def assert_code_is_copied_as_compiled(copied: Path) -> None:
    """Assert that a script has copied what nodes need, with its compiled form, which nodes take as it is."""
    with ZipFile(copied) as archive:
        names = set(archive.namelist())
    assert {"allranks/agent/supervisor.pyc", "allranks/contract.pyc", "allranks/diagnosis/__main__.py"} <= names
    assert not any(name.startswith("allranks/lint/") for name in names)
