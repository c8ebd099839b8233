"""What Grid Engine answers is read right, and it is requested what a job needs: by answers of a real one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from allranks.clusters.batch.scheduler import OUT_OF_TIME, JobInfo, JobReason
from allranks.clusters.grid_engine import GRID_ENGINE, directives, own, parse, parse_ended, why_pending
from allranks.errors import JobError
from allranks.job.spec import Job
from allranks.runs.status import State

ANSWERS = Path(__file__).parents[2] / "cluster/answers/grid-engine-8.1.9"
QUEUE = "choose another scheduler.partition; qconf -sql lists the queues"
RULE = "wait, or make resources.cpus_per_node the slots that it gives on each host: allocation_rule in qconf -sp"
LESS = "ask for less in scheduler.resources or scheduler.directives, or wait; see qhost -F"
#: The job of each, and what keeps it waiting.
PENDING = {
    "array": ("9", JobReason("its queue is disabled", f"wait, or {QUEUE}")),
    "begin-time": ("7", JobReason("its time to start has not come")),
    "busy": ("15", JobReason("the slots that it needs are in use")),
    "gpus": ("1", JobReason("gpu=5 is requested, and a host offers gpu=4", LESS)),
    "no-permission": ("5", JobReason("you may not use queue staff.q", QUEUE)),
    "queue-disabled": ("4", JobReason("its queue is disabled", f"wait, or {QUEUE}")),
    "queue-limit": ("6", JobReason("its queue does not give h_rt=3600", QUEUE)),
    "slots": ("2", JobReason("parallel environment one offers 4 slots", f"{RULE} one")),
    "uneven": ("3", JobReason("parallel environment four offers 0 slots", f"{RULE} four")),
}
STATES = {
    **{f"pending-{name}": JobInfo(job, State.PENDING, "qw (waiting)", why=why) for name, (job, why) in PENDING.items()},
    "pending-dependency": JobInfo("12", State.PENDING, "hqw (held)", why=JobReason("it waits for another job")),
    "pending-held": JobInfo("8", State.PENDING, "hqw (held)", why=JobReason("it is held", "let it go with qrls {job}")),
    "error-100": JobInfo(
        *("21", State.PENDING, "Eqw (error)"),
        why=JobReason("it could not be started (exit_status of job start = 100)", "fix that, then qmod -cj {job}"),
    ),
    "error-no-output-folder": JobInfo(
        *("10", State.PENDING, "Eqw (error)"),
        why=JobReason(
            'it could not be started (can\'t open output file "/nowhere/out": No such file or directory)',
            "fix that, then qmod -cj {job}",
        ),
    ),
    "running": JobInfo("11", State.RUNNING, "r (running)", started=1795432461),
    "running-array": JobInfo("13", State.RUNNING, "r (running)", started=1795432463),
    "running-on-a-dead-node": JobInfo("30", State.RUNNING, "r (running)", started=1795432519),
    "rescheduled": JobInfo("29", State.RUNNING, "Rr (running)", started=1795432516),
    "suspended": JobInfo("11", State.RUNNING, "s (suspended)", started=1795432461, why=JobReason("it is suspended")),
    "deleting": JobInfo(
        "27", State.RUNNING, "dr (being deleted)", started=1795432511, why=JobReason("it is being deleted")
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_job_that_has_not_ended(name: str):
    shown, listed = ((ANSWERS / name / file).read_text() for file in ("job.xml", "qstat.xml"))
    found = parse(STATES[name].job_id, shown, listed)
    assert (found, found and found.why) == (STATES[name], STATES[name].why)


def test_recorded_states_are_all_read():
    assert {folder.name for folder in ANSWERS.iterdir() if folder.is_dir()} == set(STATES)


def test_an_array_stands_as_the_task_that_decides():
    shown, listed = ((ANSWERS / "running-array" / file).read_text() for file in ("job.xml", "qstat.xml"))
    found = parse("13", shown, listed)
    assert found and found.native == "r (running)"
    waits = parse("13", shown, listed.replace("<state>r</state>", "<state>qw</state>"))
    assert waits and waits.native == "qw (waiting)"
    assert waits.reason == "as many tasks of its array run as the site allows at a time"


def test_a_job_of_another_user_is_not_in_the_list():
    shown = (ANSWERS / "running" / "job.xml").read_text()
    assert parse("11", shown, "") == STATES["running"]
    assert parse("12", shown, "") is None


def ended(job: str, state: State, started: int, ended: int, host: str, **fields: object) -> JobInfo:
    """Return what is known of a job of this number that has ended; times are in seconds since the first record."""
    return JobInfo(job, state, "finished", started=1795432400 + started, ended=1795432400 + ended, nodes=host, **fields)  # type: ignore[arg-type]


AFTER, LIMIT = "assumedly after job", "qmaster enforced h_rt, h_cpu, or h_vmem limit"
ENDED = {
    "array": ended("26", State.FAILED, 110, 110, "node01", exit_code=1),
    "cancelled": ended("27", State.CANCELLED, 111, 112, "node02", word=AFTER),
    "completed": ended("16", State.SUCCEEDED, 69, 69, "node02", exit_code=0),
    "completed-record-of-each-task": ended("17", State.SUCCEEDED, 73, 74, "node03", exit_code=0),
    "failed": ended("18", State.FAILED, 77, 77, "node02", exit_code=3),
    "failed-100": ended("21", State.SUCCEEDED, 87, 87, "node01", exit_code=0),
    "failed-signal": ended("19", State.FAILED, 78, 78, "node01", signal=11, word=AFTER),
    "failed-task-killed": ended("20", State.CANCELLED, 80, 82, "node03", word=AFTER),
    "requeued-99": ended("24", State.SUCCEEDED, 105, 105, "node02", exit_code=0),
    "requeued-99-not-rerunable": ended("25", State.SUCCEEDED, 108, 108, "node04", exit_code=0),
    "rescheduled-cancelled": ended("29", State.CANCELLED, 116, 117, "node04", word=AFTER),
    "timeout": ended("22", State.TIMEOUT, 88, 92, "node03", signal=9, word=LIMIT),
    "timeout-notify": ended("23", State.TIMEOUT, 94, 103, "node04", signal=9, word=LIMIT),
}


def records(name: str) -> str:
    return (ANSWERS / f"{name}.txt").read_text().partition("\n[exit")[0]


@pytest.mark.parametrize("name", ENDED)
def test_a_job_that_has_ended(name: str):
    found = parse_ended(ENDED[name].job_id, records(name))
    assert found == ENDED[name]
    assert found.why == (OUT_OF_TIME if found.state is State.TIMEOUT else None)


def test_the_end_of_an_array_is_that_of_the_task_that_failed():
    assert parse_ended("26", records("array")) == ended("26", State.FAILED, 110, 110, "node01", exit_code=1)


@pytest.mark.parametrize(
    ("old", "new", "state", "why"),
    [
        (
            "category     -l h_rt=3",
            "category     -l h_rt=3600,h_vmem=1G",
            State.FAILED,
            "it used more memory than it requested",
        ),
        ("failed       37  : qmaster", "failed       19  : node", State.NODE_FAIL, "node03 was lost"),
        ("failed       37  : qmaster", "failed       21  : queue", State.FAILED, None),
    ],
)
def test_other_ends(old: str, new: str, state: State, why: str | None):
    text = records("timeout")
    assert old in text
    found = parse_ended("22", text.replace(old, new))
    assert found
    assert (found.state, found.why and found.why.text) == (state, why)


def test_a_job_that_accounting_does_not_know():
    assert parse_ended("28", records("cancelled-pending").partition("$ qacct")[2]) is None
    assert re.search(GRID_ENGINE.gone, (ANSWERS / "unknown-job.txt").read_text())


def blocks(name: str) -> dict[str, str]:
    """Return what was said to each command of a file, by its options."""
    parts = (part.partition("\n") for part in (ANSWERS / name).read_text().split("$ qsub ")[1:])
    return {command.removesuffix(" -b y sleep 600"): said.partition("\n[exit")[0] for command, _, said in parts}


def test_whether_a_job_could_ever_start():
    found = {command: why_pending(said) for command, said in blocks("verified.txt").items()}
    assert found == {
        "-w v -l gpu=5": PENDING["gpus"][1],
        "-w v -pe one 5": PENDING["slots"][1],
        "-w v -q staff.q": PENDING["no-permission"][1],
        "-w v -q short.q -l h_rt=1:0:0": PENDING["queue-limit"][1],
        "-w v -q closed.q": None,
        "-w v -pe four 8 -l gpu=1": None,
    }


SITE = "change scheduler.resources or scheduler.directives; qconf -sc lists what there is"
REFUSED = {
    "-q nowhere.q": (
        'job requests unknown queue "nowhere.q"',
        "set scheduler.partition to a queue that qconf -sql lists",
    ),
    "-pe nothing 2": (
        'the requested parallel environment "nothing" does not exist',
        "set scheduler.parallel_environment to one that qconf -spl lists",
    ),
    "-l tpu=1": ('unknown resource "tpu"', SITE),
    "-l h_rt=soon": ('attribute "h_rt" is not a time value', "change resources.time"),
    "-l gpu=many": ('attribute "gpu" is not a integer value', SITE),
    "-l hostname=nohost": ('can\'t resolve hostname "nohost"', "change scheduler.include or scheduler.exclude"),
    "-P nothing": ('the requested project "nothing" does not exist', "change scheduler.project"),
    "-t 0-3": ("0 is an invalid task id", "change scheduler.array; tasks count from 1"),
    "-N 1job": ('denied: "1job" is not a valid object name (cannot start with a digit)', "change name"),
    "-nonsense": ('invalid option argument "-nonsense"', "change scheduler.directives"),
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_refused_job(options: str):
    error = GRID_ENGINE.refusal(("qsub",), 1, blocks("refused.txt")[options])
    assert (error.what, error.why, error.fix) == ("Grid Engine refuses the job", *REFUSED[options])


def test_no_qmaster():
    error = GRID_ENGINE.refusal(("qsub",), 1, blocks("no-qmaster.txt")["-b y sleep 600"].partition("\n[exit")[0])
    assert (error.what, error.fix) == ("Grid Engine cannot be reached", "try again when qstat answers")


def test_the_id_of_a_submitted_job():
    found = [GRID_ENGINE.job_id(said) for said in blocks("submitted.txt").values()]
    assert found == ["57", "58", "59", "60"]


def asked(nproc: int = 1, **sections: object) -> list[str]:
    """Return the options with which a job is submitted, without those that all jobs have."""
    job = Job.model_validate({"script": "train.py", **sections})
    found = [f"{each.option} {each.value}" if each.value else each.option for each in directives(job, nproc)]
    always = ["-S /bin/bash", "-j y", "-o /dev/null", "-notify", "-N train", "-r y"]
    assert set(always) <= set(found)
    return [each for each in found if each not in always]


def test_what_is_asked_for():
    pe = {"parallel_environment": "mpi"}
    assert asked() == []
    assert asked(resources={"nodes": 2}, scheduler=pe) == ["-pe mpi 2"]
    assert asked(4, resources={"nodes": 2}, scheduler=pe, launch={"launcher": "direct"}) == ["-pe mpi 8"]
    resources = {"nodes": 2, "cpus_per_node": 8, "memory": "64GB", "time": "1h"}
    scheduler = {
        **pe,
        **{"partition": "gpu.q", "project": "lab", "array": "1-8%4", "constraint": "arch=x"},
        **{"resources": ["gpu=1"], "exclude": ["n[1-2]"], "directives": ["#$ -p -5"]},
    }
    assert asked(resources=resources, scheduler=scheduler, notify={"mail": "me@example.org"}) == [
        *("-pe mpi 16", "-l h_rt 3600", "-l h_vmem 8388608K", "-l gpu=1", "-l arch=x", "-l hostname !(n1|n2)"),
        *("-q gpu.q", "-P lab", "-t 1-8", "-tc 4", "-M me@example.org", "-m ae", "-p -5"),
    ]
    assert asked(resources={"nodes": 2}, scheduler={"directives": ["-pe mpi 8"]}) == ["-pe mpi 8"]


@pytest.mark.parametrize("resources", [{"nodes": 2}, {"cpus_per_node": 4}])
def test_a_job_needs_a_parallel_environment(resources: dict[str, int]):
    with pytest.raises(JobError, match=r"scheduler\.parallel_environment is not given"):
        asked(resources=resources)


def test_hosts_that_must_be_among_the_nodes():
    scheduler = {"parallel_environment": "mpi", "include": ["n1", "n2"]}
    assert asked(resources={"nodes": 2}, scheduler=scheduler)[-1] == "-l hostname (n1|n2)"
    with pytest.raises(JobError, match=r"scheduler.include names 2 hosts, for 3 nodes"):
        asked(resources={"nodes": 3}, scheduler=scheduler)


@pytest.mark.parametrize(
    ("scheduler", "gpus"), [({}, 0), ({"resources": ["gpu=1"]}, None), ({"directives": ["-l GPUs=2"]}, None)]
)
def test_gpus_are_counted_on_the_nodes(scheduler: dict[str, list[str]], gpus: int | None):
    assert own(Job.model_validate({"script": "train.py", "scheduler": scheduler})) == (None, gpus)
