"""What people do on a real Slurm beside the plain run: real training, uneven nodes, jobs within jobs, ends."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from followed_runs import Followed, follow
from ranks_told import PLACES, TELL, WHO, expected, ranks_saying, told, who
from slurm_cluster import SlurmCluster

from allranks.system.hostlist import expand
from mnist_files import idx
from waiting import PATIENCE

RECIPE = Path(__file__).parents[2] / "recipes" / "mnist"
#: The recipe on ranks that also tell where they are. What rank 0 says of processes, it has from its process group.
TRAIN = f"""\
import json, os, runpy, socket, sys  # And, as an agent reads, torch.optim: it imports what that needs, once for all.
total = os.environ["WORLD_SIZE"]
{TELL}
sys.path.insert(0, {str(RECIPE)!r})
runpy.run_path({str(RECIPE / "train.py")!r}, run_name="__main__")
"""
EPOCH = re.compile(r"Epoch 1 - Avg Loss: \d+\.\d{4}, Accuracy: (\d+\.\d{2})%$", re.MULTILINE)
BOTH = pytest.mark.parametrize("launcher", ["torchrun", "direct"])
#: Busy, with 100 MB of memory, until there is a file ``go``.
BUSY = """\
import os
held = bytearray(b"x" * (100 << 20))
print("up", flush=True)
while not os.path.exists("go"):
    sum(range(100000))
"""
#: Holds a port of its node until it ends, and says so.
HOLDER = """\
import socket, sys
with socket.create_server(("", int(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a directory with real handwritten digits as MNIST's files: ranks need not import scikit-learn for them."""
    from sklearn import datasets  # Here: it takes longer to import than torch, and each worker reads this file.

    folder, found = tmp_path_factory.mktemp("digits"), datasets.load_digits()
    parts = {"train": slice(360, None), "t10k": slice(360)}
    for kind, data in (("images-idx3", found.images * 15), ("labels-idx1", found.target)):
        for part, samples in parts.items():
            values = data[samples].astype("uint8")
            (folder / f"{part}-{kind}-ubyte").write_bytes(idx(values.tobytes(), *values.shape))
    return folder


def _assert_trained(text: str, counts: list[int]) -> None:
    """Assert that the ranks on node01, node02, … have trained for an epoch, together."""
    assert who(text) == expected(counts)
    assert f"Processes: {sum(counts)} on cpu (gloo)" in text
    (accuracy,) = EPOCH.findall(text)
    assert float(accuracy) > 50  # Of ten digits: a guess is right in 10 %.
    assert "Trained for 1 epochs" in text


@BOTH
def test_the_recipe_trains(lab: Any, digits: Path, launcher: str) -> None:
    """It takes more than 10 s: four ranks import torch, and train on real digits until they know most of them."""
    lab.script(TRAIN)
    flags = ("--nodes", "2", "--nproc-per-node", "2", "--gpus-per-node", "4", "--launcher", launcher)
    done = lab("run", "train.py", "--on", "lab", *flags, "--", "--epochs", "1", "--data-dir", digits)
    assert done.rc == 0, done.stderr
    _assert_trained(done.stdout, [2, 2])
    record = lab.record()
    assert (record["status"]["state"], record["nnodes"], record["world_size"]) == ("SUCCEEDED", 2, 4)


def test_more_ranks_than_gpus_on_all_nodes(lab: Any) -> None:
    lab.script(PLACES)
    flags = ("--nodes", "4", "--nproc-per-node", "8", "--gpus-per-node", "4")
    done = lab("run", "train.py", "--on", "lab", *flags)
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == expected([8] * 4)
    assert (lab.record()["nnodes"], lab.record()["world_size"]) == (4, 32)


@pytest.mark.parametrize(
    ("launch", "directives"),
    [("{}", '["--gpus=6"]'), ("{launcher: direct, nproc_per_node: 3}", '["--ntasks=6", "--gpus-per-task=1"]')],
)
def test_nodes_with_different_numbers_of_gpus(lab: Any, launch: str, directives: str) -> None:
    lab.script(PLACES)
    lab.job(f"script: train.py\nresources: {{nodes: 2}}\nlaunch: {launch}\nscheduler: {{directives: {directives}}}\n")
    done = lab("run", "--on", "lab")
    assert done.rc == 0, done.stderr
    assert who(done.stdout) == expected([4, 2])
    assert lab.record()["world_size"] == 6
    assert who(lab("logs", "--rank", "5").stdout) == expected([4, 2])[5:]


def test_an_unknown_account_is_refused_in_words(lab_with_accounting: Any) -> None:
    lab = lab_with_accounting
    lab.script(PLACES)
    done = lab("run", "train.py", "--on", "lab", "--account", "nobody")
    assert (done.rc, done.stdout) == (1, "")
    assert "error: Slurm refuses the job\n  why: Invalid account or account/partition combination" in done.stderr
    assert "\n  fix: change scheduler.account (nobody); see yours with sacctmgr show associations" in done.stderr
    assert told(lab) == ("FAILED  not started", "FAILED", "1")


def test_a_limit_that_a_qos_may_lift_is_no_refusal(
    lab_with_accounting: Any, slurm_with_accounting: SlurmCluster
) -> None:
    lab, change = lab_with_accounting, ("sacctmgr", "--immediate", "modify", "qos", "urgent", "set")
    lab.script("")
    check = ("check", "train.py", "--on", "lab", "--only", "scheduler", "--time", "2:00:00")
    told = "scheduler  02:00:00 are requested, and partition main gives a job at most 01:00:00\n"
    refused = lab(*check)
    assert (refused.rc, f"FAIL  {told}" in refused.stdout) == (3, True), refused.stdout
    slurm_with_accounting.run(*change, "Flags=PartitionTimeLimit")
    found = lab(*check)
    slurm_with_accounting.run(*change, "Flags=-1")
    assert (found.rc, f"WARN  {told}" in found.stdout) == (0, True), found.stdout


def test_accounting_tells_the_peak_of_memory(lab_with_accounting: Any, slurm_with_accounting: SlurmCluster) -> None:
    lab, cluster = lab_with_accounting, slurm_with_accounting
    lab.script(BUSY)
    assert lab("run", "train.py", "--on", "lab", "--account", "lab", "--detach").rc == 0
    cluster.wait_until("the rank", lambda: "up" in lab("logs").stdout)
    job = lab.record()["handle"]["job_id"]

    def measured() -> Any:
        sstat = ("sstat", "--noheader", "--allsteps", "--parsable2", "--format=MaxRSS", "--jobs", job)
        return re.search(r"^\d{6,}K$", cluster.run(*sstat), re.MULTILINE)

    cluster.wait_until("a measurement of its memory", measured)
    lab.script("", "go")
    sacct = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", "--jobs", job)
    cluster.wait_until("the record of accounting", lambda: cluster.run(*sacct).strip() == "COMPLETED")
    found = re.search(r"^memory +(\d+) MB at most$", lab("status").stdout, re.MULTILINE)
    assert found and 100 < int(found[1]) < 1000


#: Its ranks have met, tell the port at which they did, and stay until there is a file ``go``.
STAYS = f"""\
{WHO.partition("dist.barrier()")[0]}
import time
print("port", os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
dist.destroy_process_group()
"""


def test_two_jobs_at_once_on_the_same_nodes(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s on a slow machine: without an agent each of the four ranks imports torch for itself."""
    first = slurm.sbatch("--wrap=true", folder=lab.folder) + 1
    slurm.wait_idle()
    port = 16384 + first  # What the first job would take: somebody else has it.
    with slurm.popen_on("node01", [sys.executable, "-c", HOLDER, str(port)], stdin=-1, stdout=-1) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == b"held\n"
        lab.script(STAYS)
        runs = [follow(lab, name, "train.py", "--launcher", "direct", "--nodes", 2) for name in ("one", "two")]
        for run in runs:
            slurm.wait_until(f"the ranks of {run.name}", lambda run=run: _logs(run).count("port ") == 2)
        lab.script("", "go")
        followed = [run.end().stdout for run in runs]
        holder.stdin.close()
    assert [run.rc for run in runs] == [0, 0]
    assert [who(text) for text in followed] == [expected([1, 1])] * 2
    ports = [{*re.findall(r"port (\d+)$", text, re.MULTILINE)} for text in followed]
    assert len(ports[0]) == len(ports[1]) == 1
    assert len({*ports[0], *ports[1], str(port)}) == 3


def _logs(run: Followed) -> str:
    """Return what the ranks of a run have written so far."""
    return "".join(log.read_text() for log in run.lab.folder.glob(f"runs/{run.name}-*/attempts/000/node-*/rank-*.out"))


#: Submits a run of its own, from its first rank; ends when that may start.
OUTER = """\
import os, subprocess
if os.environ["RANK"] == "0":
    subprocess.run(["allranks", "run", "inner.py", "--on", "lab", "--nodes", "2", "--detach"], check=True)
"""
INNER = PLACES + 'print("env", json.dumps(dict(os.environ)), flush=True)\n'


def _environments(text: str) -> list[dict[str, str]]:
    """Return what each rank had in its environment."""
    return [json.loads(found) for found in re.findall(r"env (\{.*\})$", text, re.MULTILINE)]


def _run_named(lab: Any, name: str) -> Path:
    (folder,) = (run for run in lab.runs() if run.name.startswith(name))
    return Path(folder)


def _assert_a_job_of_its_own(lab: Any, slurm: SlurmCluster, outer_job: str) -> None:
    """Assert that ``inner.py`` ran in a job that knows nothing of the one that it was submitted from."""
    inner = _run_named(lab, "inner")
    followed = lab("logs", "-f", inner.name).stdout
    job = lab.record(inner)["handle"]["job_id"]
    assert job != outer_job
    environments = _environments(followed)
    hosts = [
        *expand(environments[0]["SLURM_JOB_NODELIST"])
    ]  # Others than the first, if the job around is not gone yet.
    assert who(followed) == expected([1, 1], hosts)
    for environ in environments:
        assert {environ["SLURM_JOB_ID"], environ["SLURM_JOBID"]} == {job}
        assert (environ["SLURM_JOB_NUM_NODES"], environ["SLURM_JOB_NAME"]) == ("2", "inner")
        # The job around had GPUs, this one has asked for none.
        assert not [name for name in environ if "GPU" in name or name == "CUDA_VISIBLE_DEVICES"]
        assert (environ["GLOO_SOCKET_IFNAME"], environ["OF_THE_USER"]) == ("eth0", "kept")
        assert environ["MASTER_ADDR"] == slurm.network.nodes[hosts[0]].ip


@BOTH
def test_a_rank_submits_a_job_of_its_own(lab: Any, slurm: SlurmCluster, launcher: str) -> None:
    """It takes more than 10 s on a slow machine: two jobs, of which one submits the other."""
    lab.script(OUTER, "outer.py")
    lab.script(INNER, "inner.py")
    done = lab("run", "outer.py", "--on", "lab", "--gpus-per-node", "3", "--launcher", launcher, OF_THE_USER="kept")
    assert done.rc == 0, done.stderr
    _assert_a_job_of_its_own(lab, slurm, lab.record(_run_named(lab, "outer"))["handle"]["job_id"])


def test_a_rank_on_this_machine_submits_a_job(lab: Any, slurm: SlurmCluster) -> None:
    """Its ranks meet on the loopback; those of the job must not.

    It takes more than 10 s on a slow machine: a run here, and the job that it submits.
    """
    lab.script(OUTER, "outer.py")
    lab.script(INNER, "inner.py")
    done = lab("run", "outer.py", OF_THE_USER="kept")
    assert done.rc == 0, done.stderr
    _assert_a_job_of_its_own(lab, slurm, "")


def test_inside_an_allocation_a_job_of_its_own_must_be_asked_for(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s on a slow machine: a job runs the command twice, and submits another job."""
    lab.script(INNER, "inner.py")
    lab.script(INNER, "around.py")
    own = "env -u SLURM_JOB_ID allranks run inner.py --on lab --nodes 2 --detach"
    lab.script(f"#!/bin/bash\nset -e\nallranks run around.py --on lab\nexport OF_THE_USER=kept\n{own}\n", "job.sh")
    job = str(slurm.sbatch("--gpus-per-node=2", "job.sh", folder=lab.folder))
    assert slurm.wait_for_state(int(job))["JobState"] == "COMPLETED"
    said = (lab.folder / f"slurm-{job}.out").read_text()
    assert who(said) == expected([2])
    assert {environ["SLURM_JOB_ID"] for environ in _environments(said)} == {job}
    assert lab.record(_run_named(lab, "around"))["handle"]["job_id"] is None
    _assert_a_job_of_its_own(lab, slurm, job)


@BOTH
def test_a_run_is_told_of_while_it_runs_and_when_it_has_ended(lab: Any, slurm: SlurmCluster, launcher: str) -> None:
    lab.script(BUSY)
    shape = ("--nodes", "2", "--gpus-per-node", "2", "--launcher", launcher)
    assert lab("run", "train.py", "--on", "lab", *shape, "--detach").rc == 0
    everyone = [0, 1, 2, 3]
    slurm.wait_until("all ranks", lambda: ranks_saying(lab("logs").stdout, "up") == everyone)

    def seen() -> list[Any]:
        usage = [node for node in json.loads(lab("top", "--json").stdout) if node["memory"] > 2 * (100 << 20)]
        return usage if len(usage) == 2 and all(node["cpus"] > 0 for node in usage) else []

    usage = slurm.wait_until("the use of both nodes", seen)
    assert [(node["node"], node["host"]) for node in usage] == [(0, "node01"), (1, "node02")]
    assert [row.split()[:2] for row in lab("top").stdout.splitlines()[1:]] == [["0", "node01"], ["1", "node02"]]
    assert told(lab) == ("RUNNING  RUNNING", "RUNNING", None)
    lab.script("", "go")
    assert lab("logs", "-f", timeout=PATIENCE).rc == 0
    assert told(lab) == ("SUCCEEDED  COMPLETED", "SUCCEEDED", "0")
    assert [row.split()[:2] for row in lab("top").stdout.splitlines()[1:]] == [["0", "node01"], ["1", "node02"]]
    assert ranks_saying(lab("logs").stdout, "up") == everyone


def test_the_end_is_known_when_slurm_has_forgotten_it(lab: Any, slurm: SlurmCluster) -> None:
    """It takes more than 10 s on a slow machine: two jobs run, and then slurmctld starts again."""
    lab.script("import sys\nprint('up')\nsys.exit(7)\n")
    for launcher in ("torchrun", "direct"):
        lab("run", "train.py", "--on", "lab", "--launcher", launcher, "--detach")
    for run in lab.runs():
        assert slurm.wait_for_state(int(lab.record(run)["handle"]["job_id"]))["JobState"] == "FAILED"
    slurm.forget_jobs()
    for run in lab.runs():
        assert told(lab, run) == ("FAILED", "FAILED", "7")
        status = lab.record(run)["status"]
        found = (status["state"], status["exit_code"], status["reason"])
        assert found == ("FAILED", 7, "rank 0 exited with code 7")
        assert lab("logs", run.name).stdout == "[0] up\n"
