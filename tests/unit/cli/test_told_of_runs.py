"""What a run is introduced with, and how its end is explained where no rank is to blame."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.cli import render
from allranks.cli.failure import explain
from allranks.plan.plan import Plan
from allranks.runs.record import Record, Run
from allranks.runs.status import Handle, State, Status
from allranks.system.processes import signal_process
from waiting import PATIENCE, wait_for

UNSAVED = "no checkpoint: from the beginning, unless the script loads its own"


@pytest.mark.parametrize(
    ("nodes", "least", "each", "unknown", "said"),
    [
        (1, 0, 1, False, ("1 rank", "1 node")),
        (2, 2, 4, False, ("8 ranks", "2 nodes")),
        (4, 1, 2, False, ("2 to 8 ranks", "1 to 4 nodes")),
        (2, 2, 1, True, ("as many ranks as the nodes have GPUs", "2 nodes")),
    ],
)
def test_how_many(nodes: int, least: int, each: int, unknown: bool, said: tuple[str, str]) -> None:
    plan = Plan(
        *("id", "train", "lab", "slurm", "/runs/id", "/"),
        *(nodes, each, "nccl", 30.0, (), (), (), (), (), False),
        min_nodes=least,
        ranks_unknown=unknown,
    )
    assert (render.ranks(plan), render.nodes(plan)) == said


@pytest.mark.parametrize(
    ("job", "ranks", "said"),
    [
        (
            "scheduler: {directives: [--gpus=8]}",
            "as many ranks as the nodes have GPUs",
            "1 node x a rank for each GPU;",
        ),
        ("resources: {nodes: '1:4', gpus_per_node: 2}", "2 to 8 ranks", "4 nodes x 2 ranks;"),
    ],
)
def test_a_plan_claims_no_number_of_ranks_that_it_does_not_know(allranks, job: str, ranks: str, said: str) -> None:
    allranks.script("")
    allranks.script("lab: {kind: slurm}\n", "clusters.yaml")
    allranks.job(f"script: train.py\ncluster: lab\n{job}\n")
    shown = allranks("plan", "-v").stdout
    assert shown.startswith(f"plan for train on lab: {ranks}, run train-")
    assert said in shown


def _submitted(allranks, scancel: str) -> Any:
    """Start a run on a Slurm that is made of scripts; its job runs, and ``scancel`` is what that command does."""
    recorded = Path(__file__).parents[2] / "cluster/answers/slurm-22.05/running/scontrol.txt"
    bin_folder = allranks.folder / "bin"
    bin_folder.mkdir()
    for name, text in {"sbatch": "echo 16", "scontrol": f"cat '{recorded}'", "scancel": scancel}.items():
        allranks.script(f"#!/bin/sh\n{text}\n", f"bin/{name}").chmod(0o755)
    allranks.script("")
    allranks.script("lab: {kind: slurm}\n", "clusters.yaml")
    process = allranks.popen("run", "train.py", "--on", "lab", PATH=f"{bin_folder}:{os.environ['PATH']}")
    _read_until(process, "running")
    process.send_signal(signal.SIGINT)
    return process


def _read_until(process: Any, end: str) -> str:
    """Read lines of stderr to the one that ends so, and return it."""
    while line := process.stderr.readline().decode():
        if line.rstrip().endswith(end):
            return line
    raise AssertionError(f"no line ends with {end}")


def test_ctrl_c_twice_before_slurm_has_heard_of_the_first(allranks) -> None:
    process = _submitted(allranks, "echo $$ >started; exec sleep 300")
    told = _read_until(process, "once more to leave at once, without waiting for it")
    assert told.startswith("allranks: SIGINT: job 16 is being cancelled; once more to leave")
    begun = allranks.folder / "started"
    scancel = int(wait_for("scancel", lambda: begun.exists() and begun.read_text().strip()))
    time.sleep(0.5)  # A second one at once would count as the same.
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    signal_process(scancel, signal.SIGKILL)
    name = allranks.run().name
    assert process.returncode == 130
    assert err.decode() == (
        f"allranks: SIGINT: not waiting; the cluster has not said so yet: allranks cancel {name}\n"
        f"next: allranks status {name}\n"
    )


def test_a_job_that_cannot_be_cancelled_goes_on(allranks) -> None:
    process = _submitted(allranks, "echo 'scancel: error: no way' >&2; exit 1")
    _, err = process.communicate(timeout=PATIENCE)
    said = f"error: the job continues: scancel failed\n  why: no way\n  fix: allranks cancel {allranks.run().name}\n"
    assert (process.returncode, err.decode().endswith(said)) == (1, True), err.decode()


def _ended(folder: Path, status: Status, handle: Handle, kind: str = "slurm") -> Run:
    (folder / "attempts" / "000").mkdir(parents=True)
    record = Record("x", "x", "lab", kind, 1, 1, created=0.0, host="h", stop_timeout=1, file_mode=0o600)
    return Run(folder, record).with_handle(handle, status)


def test_a_job_that_never_ran_has_no_log_to_see(tmp_path: Path) -> None:
    run = _ended(tmp_path, Status(State.TIMEOUT, "DEADLINE"), Handle(job_id="9"))
    fix = f"raise resources.time, or let the run save and continue: allranks resume {tmp_path} ({UNSAVED})"
    assert str(explain(run)) == f"x TIMEOUT before any rank had started\n  fix: {fix}"


def test_a_reason_is_told_with_the_log_that_is_there(tmp_path: Path) -> None:
    run = _ended(tmp_path, Status(State.NODE_FAIL, "NODE_FAIL", "node n1 failed", 1), Handle(job_id="9"))
    (tmp_path / "slurm-9.out").write_text("the end\n")
    fix = f"resume it: allranks resume {tmp_path} ({UNSAVED})"
    fix += "; if a node is lost again, start the job without it: --exclude NODE"
    said = f"x NODE_FAIL: node n1 failed\n  why: the end\n  fix: {fix}\n  see: {tmp_path}/slurm-9.out"
    assert str(explain(run)) == said


BACK = "\n  fix: allranks resume {} continues from the newest checkpoint, when the machine is back"


@pytest.mark.parametrize(("kind", "fix"), [("ssh", BACK), ("pdsh", BACK), ("slurm", ""), ("local", "")])
def test_only_the_owner_of_a_lost_machine_has_to_bring_it_back(tmp_path: Path, kind: str, fix: str) -> None:
    reason = "node 1 (n1) was lost: the connection broke"
    run = _ended(tmp_path, Status(State.FAILED, "ended", reason, 1), Handle(job_id="9"), kind)
    run.node_folder(0).mkdir()
    event = {"time": time.time(), "host": "n0", "kind": contract.ENDED, "state": "FAILED", "lost": [1]}
    (run.node_folder(0) / contract.AGENT_EVENTS).write_text(json.dumps(event) + "\n")
    assert str(explain(run)) == f"x FAILED: {reason}{fix.format(tmp_path)}"


def test_the_error_of_another_nodes_agent_is_told_whole(tmp_path: Path) -> None:
    run = _ended(tmp_path, Status(State.FAILED, "FAILED", "no way", 1), Handle(job_id="9"))
    node = run.node_folder(1)
    node.mkdir()
    event = {
        "time": time.time(),
        "host": "n1",
        "kind": contract.ERROR,
        "what": "no way",
        "why": "a wall",
        "fix": "a door",
    }
    (node / contract.AGENT_EVENTS).write_text(json.dumps(event) + "\n")
    assert str(explain(run)) == "no way\n  why: a wall\n  fix: a door"


def test_the_cause_of_an_error_of_ours_is_its_first_line(allranks) -> None:
    allranks.script("from allranks.errors import RankError\nraise RankError('no room', why='full', fix='free it')\n")
    done = allranks("run", "train.py")
    assert done.rc == 1
    assert "error: rank 0 exited with code 1\n  why: no room\n  fix: free it\n  see: " in done.stderr


def test_a_run_that_could_not_start_is_the_newest(allranks) -> None:
    allranks.script("")
    assert allranks("run", "train.py", "--name", "older").rc == 0
    tools = allranks.folder / "tools"
    tools.mkdir()
    ssh = "#!/bin/sh\ncase \" $* \" in *' -G '*) exit 0;; esac\necho no route to it >&2\nexit 255\n"
    allranks.script(ssh, "tools/ssh").chmod(0o755)
    path = f"{tools}:{allranks.env['PATH']}"
    done = allranks("run", "train.py", "--name", "newer", "--nodes", "gpu1,gpu2", "--backend", "gloo", PATH=path)
    assert (done.rc, done.stderr.startswith("error: cannot reach gpu")) == (1, True), done.stderr
    told = json.loads(allranks("status", "--json").stdout)
    assert (told["name"], told["status"]["state"], told["status"]["native"]) == ("newer", "FAILED", "not started")
