"""A scheduler of another package: the directory beside this is that package. Its jobs run on this machine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import AllranksError
from allranks.system import schedulers
from waiting import wait_for

#: Says what each rank is told; without torch, which its agent would import for the word allranks.
PLACE = """\
import os
print(*(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LAB_HOST", "OMP_NUM_THREADS")))
"""
#: Says who a rank is, and which modules of schedulers it took to find that out.
WHO = """\
import sys
from allranks.runtime.environment import detect
who = detect()
loaded = [name for name in ("allranks.agent.slurm_job", "lab_queue_job") if name in sys.modules]
print(who.kind, who.rank, who.world_size, *loaded)
"""
ENDS_THEN_GOES_ON = """\
import os, sys
print("attempt", os.environ["ALLRANKS_ATTEMPT"], "ends at", os.environ["ALLRANKS_END_TIME"], flush=True)
sys.exit(75 if os.environ["ALLRANKS_ATTEMPT"] == "0" else 0)
"""
TWO_NODES = ("--nodes", 2, "--nproc-per-node", 1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package, as its users do, into a directory of its own."""
    folder = tmp_path_factory.mktemp("lab")
    source = shutil.copytree(Path(__file__).with_name("lab_queue"), folder / "source")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def lab(allranks: Any, site: Path, tmp_path: Path) -> Any:
    """Give the command where that package is installed, with the cluster ``lab`` of its kind."""
    path = f"{site}/bin:{allranks.env['PATH']}"
    allranks.env |= {"PYTHONPATH": str(site), "PATH": path, "LAB_HOME": str(tmp_path / "jobs")}
    allranks.job("lab: {kind: lab}\n", "clusters.yaml")
    return allranks


def said(lab: Any) -> str:
    """Return what the script of the first job has said."""
    return (Path(lab.env["LAB_HOME"]) / "1" / "log").read_text()


@pytest.mark.parametrize("launcher", ["torchrun", "direct"])
def test_its_jobs_run_to_their_end(lab: Any, launcher: str) -> None:
    """Each task gets the job's environment but for what is its own, and its share of the CPUs that it has there."""
    lab.script(PLACE)
    done = lab("run", "--on", "lab", *TWO_NODES, "--launcher", launcher, "train.py")
    assert done.rc == 0
    took = r" in \d+\.\d s" if launcher == "torchrun" else ""  # Its agents know; this scheduler records no times.
    assert re.fullmatch(rf"allranks: {lab.run().name} succeeded{took}", done.stderr.splitlines()[-1])
    told = [(lab.run() / f"attempts/000/node-00{rank}/rank-{rank}.out").read_text() for rank in (0, 1)]
    assert told == ["0 2 localhost 6\n", "1 2 127.0.0.1 6\n"]
    assert said(lab).splitlines()[:2] == ["allranks: an attempt starts", f"{lab.run()}/code/lab_queue_job.pyc"]


def test_a_job_that_asks_for_another_attempt_is_put_back(lab: Any) -> None:
    lab.script(ENDS_THEN_GOES_ON)
    done = lab("run", "--on", "lab", "--nproc-per-node", 2, "--time", "1h", "--requeue", "train.py")
    assert done.rc == 0
    decided = [json.loads((lab.run() / f"attempts/00{number}/again.json").read_text()) for number in (0, 1)]
    assert [(one["again"], one["how"], one["job"]) for one in decided] == [(True, "requeue", "1"), (False, None, None)]
    end = int((Path(lab.env["LAB_HOME"]) / "1" / "started").read_text()) + 3600
    for number, lines in ((0, 2), (1, 2)):
        told = [log.read_text() for log in (lab.run() / f"attempts/00{number}").glob("node-*/rank-*.out")]
        assert told == [f"attempt {number} ends at {end}\n"] * lines


def test_a_job_is_cancelled(lab: Any) -> None:
    lab.script("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    assert lab("run", "--on", "lab", "--detach", "train.py").rc == 0
    log = lab.run() / "attempts/000/node-000/rank-0.out"
    wait_for("a rank", lambda: log.exists() and log.read_text() == "here\n")
    assert lab("cancel").rc == 0
    assert lab.record()["status"]["state"] == "CANCELLED"


def test_a_script_that_is_submitted_by_hand_carries_what_it_needs(lab: Any) -> None:
    lab.script(PLACE)
    assert lab("plan", "--on", "lab", *TWO_NODES, "-o", "job.lab", "train.py").rc == 0
    subprocess.run(["labsub", "job.lab"], cwd=lab.folder, env=lab.env, check=True)
    ended = Path(lab.env["LAB_HOME"]) / "1" / "ended"
    wait_for("the end of the job", lambda: ended.exists() and ended.read_text() == "0\n")
    told = [path.read_text() for path in sorted((lab.folder / "runs").glob("*/attempts/000/node-*/rank-*.out"))]
    assert told == ["0 2 localhost 6\n", "1 2 127.0.0.1 6\n"]


def test_ranks_that_it_starts_by_itself_find_their_place(lab: Any) -> None:
    script = lab.script(f"{WHO}from allranks.runtime import stop\nprint(stop._end_time())\n")
    env = {**lab.env, "LAB_END": "1900000000"}
    command = ["labrun", "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    ranks = [f"Lab {rank} 2 allranks.agent.slurm_job lab_queue_job" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == ["1900000000.0"] * 2 + ranks


def test_ranks_that_have_their_place_from_an_agent_load_no_scheduler(lab: Any) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "2"}
    command = [sys.executable, str(lab.script(WHO))]
    done = subprocess.run(command, env={**lab.env, **place}, capture_output=True, text=True, check=True)
    assert done.stdout == "torchrun 1 2\n"


def test_inside_one_of_its_jobs_a_run_takes_the_nodes_of_the_job(lab: Any) -> None:
    lab.script("pass\n")
    done = lab("plan", "--json", "train.py", LAB_JOB="7", LAB_HOSTS="localhost")
    assert (json.loads(done.stdout)["kind"], json.loads(done.stdout)["cluster"]) == ("lab", "allocation 7")


def test_a_job_that_is_submitted_inside_another_one_hears_nothing_of_that(lab: Any) -> None:
    lab.script("import os\nprint(os.environ['LAB_JOB'], 'LAB_TASKS' in os.environ)\n")
    done = lab("run", "--on", "lab", "train.py", LAB_JOB="7", LAB_TASKS="3", ALLRANKS_RUN_DIR="/of/a/rank")
    assert (done.rc, done.by_rank) == (0, {0: ["1 False"]})


def test_its_module_is_one_file_on_the_top_level() -> None:
    with pytest.raises(AllranksError) as caught:
        schedulers.file_to_copy("os.path")
    assert str(caught.value).splitlines()[0] == "the module of the scheduler, os.path, cannot be used"


def test_the_page_shows_the_entry_points_of_this_package() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "schedulers.md"
    (shown,) = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert shown in Path(__file__).with_name("lab_queue").joinpath("pyproject.toml").read_text()


def test_keys_that_only_other_schedulers_have_are_noted(lab: Any) -> None:
    lab.script(PLACE)
    lab.job("script: train.py\nscheduler: {flavour: torque, qos: urgent, partition: short}\n")
    done = lab("plan", "--on", "lab", "job.yaml")
    note = "scheduler.flavour, scheduler.qos: Lab has no such thing, not used; a queue is --queue"
    assert (done.rc, note in done.stdout) == (0, True)
