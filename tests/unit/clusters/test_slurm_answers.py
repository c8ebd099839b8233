"""What Slurm answers is read right: recorded in each state of a job, and with anything in the texts of the user's."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_recorded import NAMES, accounted, accounting, at, json_of, shown, text_of

from allranks.clusters.batch.scheduler import JobInfo, JobReason
from allranks.clusters.slurm import SLURM
from allranks.clusters.slurm_words import parse_accounted, parse_shown, state_of
from allranks.errors import LaunchError
from allranks.runs.status import State

PENDING = JobInfo("1", State.PENDING, "PENDING", exit_code=None)
NOT_STARTED = JobReason(
    "Slurm could not start the script: its work directory, or that of its output, is not there on the node"
)
ENDED = replace(PENDING, started=at("14:30:44"), ended=at("14:30:44"), nodes="node01")
SHOWN = {
    "cancelled": replace(
        ENDED, job_id="16", state=State.CANCELLED, native="CANCELLED", word="None", signal=15,
        started=at("14:30:54"), ended=at("14:31:01"), nodes="node[01-02]",
    ),
    "cancelled-pending": replace(
        PENDING, job_id="18", state=State.CANCELLED, native="CANCELLED", word="JobHeldUser", ended=at("14:31:05")
    ),
    "completed": replace(
        ENDED, job_id="8", state=State.SUCCEEDED, native="COMPLETED", word="None", exit_code=0,
        started=at("14:30:43"), ended=at("14:30:43"), nodes="node[01-02]",
    ),
    "failed": replace(ENDED, job_id="9", state=State.FAILED, native="FAILED", word="NonZeroExitCode", exit_code=3),
    "failed-no-output-folder": replace(
        ENDED, job_id="12", state=State.FAILED, native="FAILED", word="JobLaunchFailure", signal=53
    ),
    "failed-signal": replace(
        ENDED, job_id="11", state=State.FAILED, native="FAILED", word="JobLaunchFailure", signal=11
    ),
    "failed-step": replace(
        ENDED, job_id="10", state=State.FAILED, native="FAILED", word="NonZeroExitCode", exit_code=1,
        nodes="node[01-02]",
    ),
    "node-fail": replace(
        ENDED, job_id="23", state=State.NODE_FAIL, native="NODE_FAIL", word="NodeDown", signal=15,
        started=at("14:31:40"), ended=at("14:31:49"), nodes="node[03-04]",
    ),
    "out-of-memory": replace(
        ENDED, job_id="13", state=State.OUT_OF_MEMORY, native="OUT_OF_MEMORY", word="OutOfMemory",
        ended=at("14:30:45"),
    ),
    "out-of-memory-in-step": replace(
        ENDED, job_id="14", state=State.FAILED, native="FAILED", word="NonZeroExitCode", exit_code=1,
        ended=at("14:30:45"),
    ),
    "pending-begin-time": replace(PENDING, job_id="2", word="BeginTime"),
    "pending-dependency": replace(PENDING, job_id="17", word="Dependency"),
    "pending-held": replace(PENDING, word="JobHeldUser"),
    "pending-node-down": replace(PENDING, job_id="24", word="ReqNodeNotAvail,_UnavailableNodes:node04"),
    "pending-partition-down": replace(PENDING, job_id="3", word="PartitionDown"),
    "pending-partition-limit": replace(PENDING, job_id="4", word="PartitionTimeLimit"),
    "pending-partition-node-limit": replace(PENDING, job_id="7", word="PartitionNodeLimit"),
    "pending-qos-limit": replace(PENDING, job_id="5", word="QOSMaxWallDurationPerJobLimit"),
    "pending-resources": replace(
        PENDING, job_id="20", word="Resources"
    ),
    "pending-too-many-nodes": replace(PENDING, job_id="6", word="PartitionNodeLimit"),
    "preempted": replace(
        ENDED, job_id="21", state=State.PREEMPTED, native="PREEMPTED", word="None", signal=15,
        started=at("14:31:31"), ended=at("14:31:33"), nodes="node[01-04]",
    ),
    "requeued": replace(
        PENDING, job_id="19", word="BeginTime"
    ),
    "running": replace(
        ENDED, job_id="16", state=State.RUNNING, native="RUNNING", word="None", started=at("14:30:54"), ended=None,
        nodes="node[01-02]",
    ),
    "timeout": replace(
        ENDED, job_id="15", state=State.TIMEOUT, native="TIMEOUT", word="TimeLimit", signal=15,
        ended=at("14:31:13"),
    ),
}  # fmt: skip
#: Where accounting tells other things than the controller does. Sizes are those of the recorded MaxRSS.
ONLY_ACCOUNTED = {
    "cancelled": {"native": "CANCELLED by 0", "signal": None, "peak_memory": 10644 << 10},
    "cancelled-pending": {"native": "CANCELLED by 0"},
    "completed": {"peak_memory": 3532 << 10},
    "failed": {"peak_memory": 1336 << 10},
    "failed-signal": {"peak_memory": 3604 << 10},
    "failed-step": {"peak_memory": 3188 << 10},
    "node-fail": {"signal": None, "peak_memory": 10740 << 10},
    "out-of-memory": {"peak_memory": 1336 << 10},
    "out-of-memory-in-step": {
        "state": State.OUT_OF_MEMORY, "native": "OUT_OF_MEMORY", "peak_memory": 10920 << 10
    },
    "pending-node-down": {"word": "ReqNodeNotAvail"},
    "pending-resources": {"word": "None"},
    "preempted": {"signal": None, "peak_memory": 11028 << 10},
    "timeout": {"signal": None, "peak_memory": 10632 << 10},
}  # fmt: skip
#: Written by hand from documentation, not recorded: a requeued task of an array in the layout of Slurm 25.05, in which
#: ReqTRES, AllocTRES, SubmitLine and FailedNode are new.
NEWER = """\
JobId=4712 ArrayJobId=4711 ArrayTaskId=7 ArrayTaskThrottle=2 JobName=a b
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294 Nice=0 Account=lab QOS=normal
   JobState=NODE_FAIL Reason=NodeDown FailedNode=gpu_07 Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:9
   DerivedExitCode=0:15
   RunTime=1-02:03:04 TimeLimit=UNLIMITED TimeMin=N/A
   SubmitTime=2026-11-18T10:00:00 EligibleTime=2026-11-18T10:00:00
   StartTime=2026-11-19T12:27:40 EndTime=2026-11-20T14:30:44 Deadline=N/A
   ReqNodeList=(null) ExcNodeList=gpu_01
   NodeList=gpu_[07-08],big1
   BatchHost=big1
   NumNodes=3 NumCPUs=24 NumTasks=3 CPUs/Task=8 ReqB:S:C:T=0:0:*:*
   ReqTRES=cpu=24,mem=20G,node=3,billing=24
   AllocTRES=cpu=24,mem=20G,node=3,billing=24
   OverSubscribe=OK Contiguous=0 Licenses=(null) LicensesAlloc=(null) Network=(null)
   Command=/home/ada/my work/job.sbatch
   SubmitLine=sbatch --array=1-9%2 my work/job.sbatch
   WorkDir=/home/ada/my work
   TresPerTask=cpu=8
"""


@pytest.mark.parametrize("name", NAMES)
def test_what_the_controller_told(name: str) -> None:
    assert shown(name) == SHOWN[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_accounting_told(name: str) -> None:
    told = accounted(name)
    other = {"word": told.word if told.state is not State.PENDING else SHOWN[name].word, **ONLY_ACCOUNTED.get(name, {})}
    assert told == replace(SHOWN[name], **other)


@pytest.mark.parametrize("name", NAMES)
def test_json_tells_nothing_that_the_plain_formats_do_not(name: str) -> None:
    told, raw = shown(name), json_of(name, "squeue.json")
    assert (told.job_id, told.native, told.nodes) == (str(raw["job_id"]), raw["job_state"], raw["nodes"])
    assert told.ended == (raw["end_time"] if told.state.is_final else None)
    assert told.started == (raw["start_time"] if told.nodes else None)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("pending-") and name != "requeued"])
def test_json_of_accounting_tells_nothing_more_either(name: str) -> None:
    told, raw = accounted(name), json_of(name, "sacct.json")
    assert (told.job_id, told.started or told.ended) == (str(raw["job_id"]), raw["time"]["start"])
    assert (told.ended or 0) == raw["time"]["end"]


@pytest.mark.parametrize("name", NAMES)
def test_squeue_and_scontrol_give_the_same_reason(name: str) -> None:
    word = text_of(name, "squeue.txt").splitlines()[1].split("|")[2]
    job = shown(name)
    assert job.why in (state_of(job.native, word)[1], NOT_STARTED)


def test_a_newer_slurm() -> None:
    (job,) = parse_shown(NEWER)
    assert job == JobInfo(
        "4711_7", State.NODE_FAIL, "NODE_FAIL", word="NodeDown", signal=9, started=at("14:30:44") - 93784,
        ended=at("14:30:44"), nodes="gpu_[07-08],big1",
    )  # fmt: skip
    assert job.reason == "node gpu_07 failed"


def test_an_older_slurm_writes_null_where_there_are_no_nodes() -> None:
    (job,) = parse_shown(text_of("pending-held", "scontrol.txt").replace("NodeList=\n", "NodeList=(null)\n"))
    assert job == SHOWN["pending-held"]


def test_the_tasks_of_an_array() -> None:
    other = NEWER.replace("JobId=4712 ", "JobId=4711 ").replace("TaskId=7 ", "TaskId=8-9%2 ")
    assert [job.job_id for job in parse_shown(f"{NEWER}\n{other}\n")] == ["4711_7", "4711_8-9%2"]


def test_a_job_that_has_nodes_but_has_not_begun() -> None:
    (job,) = parse_shown(text_of("running", "scontrol.txt").replace("JobState=RUNNING", "JobState=CONFIGURING"))
    assert (job.state, job.started) == (State.PENDING, None)
    assert (job.nodes, job.reason) == ("node[01-02]", "its nodes are being made ready")


def test_times_are_the_same_wherever_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        told = shown("timeout")
    time.tzset()
    assert told == SHOWN["timeout"]


def test_no_job() -> None:
    assert parse_shown("") == parse_accounted("") == ()


TRAPS = st.sampled_from(
    [
        "JobState=FAILED ",
        "\n   JobState=FAILED Reason=None\n",
        "   NodeList=gpu9",
        "NumNodes=9",
        "\nExitCode=3:0",
        " ",
        "=",
        "\n",
    ]
)
TEXTS = st.lists(TRAPS | st.text(max_size=8), max_size=6).map("".join)
NAMES_OF_JOBS = TEXTS.map(lambda text: " ".join(text.splitlines()))


@given(name=NAMES_OF_JOBS, command=TEXTS, workdir=TEXTS, comment=TEXTS)
def test_texts_of_the_user_change_nothing(name: str, command: str, workdir: str, comment: str) -> None:
    text = text_of("running", "scontrol.txt").replace("JobName=mnist", f"JobName={name}")
    text = text.replace("Command=(null)", f"Command={command}\n   SubmitLine=sbatch {command}\n   Comment={comment}")
    assert parse_shown(text.replace("WorkDir=/home/ada/project", f"WorkDir={workdir}"))[0] == SHOWN["running"]


@pytest.mark.parametrize(
    ("written", "size"), [("1.50G", 3 << 29), ("2048K", 2 << 20), ("4096", 4096), ("0", None), ("", None)]
)
def test_sizes_of_memory(written: str, size: int | None) -> None:
    (job,) = parse_accounted(
        f"7|RUNNING|0:0|Unknown|Unknown|node01||None\n7.batch|RUNNING|0:0|Unknown|Unknown|node01|{written}|\n"
    )
    assert job.peak_memory == size


def test_of_a_requeued_job_the_last_record_counts() -> None:
    (job,) = parse_accounted(
        "1|REQUEUED|0:0|2026-11-20T14:30:42|2026-11-20T14:30:44|node01||None\n"
        "1.batch|CANCELLED|0:15|2026-11-20T14:30:42|2026-11-20T14:30:44|node01|90688K|\n"
        "1|FAILED|7:0|2026-11-20T14:31:41|2026-11-20T14:31:44|node[02-03]||BeginTime\n"
        "1.batch|FAILED|7:0|2026-11-20T14:31:41|2026-11-20T14:31:44|node02|10892K|\n"
    )
    assert (job.state, job.exit_code, job.nodes) == (State.FAILED, 7, "node[02-03]")
    assert job.peak_memory == 10892 << 10


def test_completed_with_an_exit_code_is_no_success() -> None:
    (job,) = parse_accounted(accounting("completed").replace("COMPLETED|0:0", "COMPLETED|4:0"))
    assert (job.state, job.native, job.exit_code) == (State.FAILED, "COMPLETED", 4)


def test_commands() -> None:
    assert SLURM.cancel("12") == ("scancel", "12")
    assert SLURM.cancel("12;west") == ("scancel", "--clusters=west", "12")
    assert SLURM.show("12") == ("scontrol", "show", "job", "12")
    assert SLURM.show("12;west") == ("scontrol", "--clusters=west", "show", "job", "12")


BEFORE = st.lists(st.sampled_from(["Welcome!", "12 nodes are free", "", "12"]), max_size=3)
AFTER = st.lists(st.sampled_from(["Good luck!", "12 nodes are free", "12;west is closed", ""]), max_size=3)


@given(BEFORE, st.integers(1, 67_000_000), st.sampled_from(["", "west"]), st.booleans(), AFTER)
def test_the_id_of_a_submitted_job(
    before: list[str], number: int, cluster: str, parsable: bool, after: list[str]
) -> None:
    if parsable:
        answer = f"{number};{cluster}" if cluster else str(number)
    else:
        answer = f"Submitted batch job {number}" + (f" on cluster {cluster}" if cluster else "")
    expected = f"{number};{cluster}" if cluster else str(number)
    assert SLURM.job_id("\n".join([*before, answer, *after, ""])) == expected


def test_an_answer_without_an_id() -> None:
    with pytest.raises(LaunchError) as caught:
        SLURM.job_id("allocation granted\n")
    assert str(caught.value) == (
        "sbatch did not print the id of the job\n"
        "  why: it said 'allocation granted'\n"
        "  fix: squeue --me lists the jobs that you have"
    )
