"""What PBS answers is read right: recorded in each state of a job, and with anything in the variables of the user's."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pbs_recorded import ANSWERS, PBS_PRO, TORQUE_RUNNING, as_plain, at, recorded, text_of, torque_ended

from allranks.clusters.batch.scheduler import JobInfo, JobReason
from allranks.clusters.pbs import PBS
from allranks.clusters.pbs_words import parse_jobs
from allranks.errors import LaunchError
from allranks.runs.status import State

RAN = "Job run at Sun Nov 22 at 03:21 on (pbs01:ncpus=1)"
DELETED = JobReason("it was deleted by ada@login")
OUT_OF_TIME = JobReason("it reached its time limit", "raise resources.time")
WAITS = JobInfo("0", State.PENDING, "H (held)")
IN_QUEUE = JobInfo("0", State.CANCELLED, "F (finished)")
RUNNING = JobInfo(
    "260.pbsctl", State.RUNNING, "R (running)", word=RAN, started=at("03:21:25"),
)  # fmt: skip
ENDED = replace(RUNNING, state=State.FAILED, native="F (finished)", word=f"{RAN} and failed", ended=at("03:21:26"))
TIMEOUT = replace(
    ENDED, job_id="259.pbsctl", state=State.TIMEOUT, word=f"{RAN} and exceeded resource walltime",
    ended=at("03:21:36"), peak_memory=7620 << 10,
)  # fmt: skip
RECORDED = {
    "begin": replace(WAITS, job_id="264.pbsctl", native="W (waiting)"),
    "by-shell": replace(ENDED, job_id="258.pbsctl", exit_code=139, peak_memory=7268 << 10),
    "cancelled": replace(
        ENDED, state=State.CANCELLED, word=f"{RAN} and terminated by ada@login", signal=15, ended=at("03:21:35"),
        peak_memory=9900 << 10,
    ),
    "cancelled-queued": replace(IN_QUEUE, job_id="267.pbsctl", ended=at("03:21:26")),
    "completed": replace(
        ENDED, job_id="255.pbsctl", state=State.SUCCEEDED, word=f"{RAN} and finished", exit_code=0
    ),
    "dependency-failed": replace(
        IN_QUEUE, job_id="266.pbsctl", ended=at("03:21:32")
    ),
    "dependent": replace(WAITS, job_id="266.pbsctl"),
    "failed": replace(ENDED, job_id="256.pbsctl", exit_code=3),
    "held": replace(WAITS, job_id="263.pbsctl"),
    "killed": replace(
        ENDED, job_id="261.pbsctl", signal=9, ended=at("03:21:32"), peak_memory=9792 << 10
    ),
    "running": RUNNING,
    "signalled": replace(ENDED, job_id="257.pbsctl", signal=11),
    "timeout": TIMEOUT,
}  # fmt: skip


#: Why they wait, or ended so.
WHY = {
    "begin": JobReason("its time to start has not come"),
    "cancelled": DELETED,
    "dependency-failed": JobReason("job 265.pbsctl, which it waited for, did not end as it should"),
    "dependent": JobReason("it waits for job 265.pbsctl"),
    "held": JobReason("it is held", "let it go with qrls {job}"),
    "timeout": OUT_OF_TIME,
}


@pytest.mark.parametrize("name", RECORDED)
def test_why_it_waits_or_ended(name: str) -> None:
    assert recorded(name).why == WHY.get(name)


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_read_of_an_answer(name: str) -> None:
    assert recorded(name) == RECORDED[name]


def test_every_recorded_plain_answer_is_expected() -> None:
    others = {"array", "odd", "odd-wide", "refused", "unreachable", "not-there", "queues", "nodes", "server"}
    assert {path.stem for path in ANSWERS.glob("*.txt")} == RECORDED.keys() | others


@pytest.mark.parametrize("name", ["running", "timeout"])
def test_todays_master_branch(name: str) -> None:
    assert recorded(f"{name}-head") == RECORDED[name]


def test_a_job_that_ended_as_it_wanted_after_it_was_deleted() -> None:
    told = recorded("sigterm-own-exit")
    assert (told.state, told.exit_code, told.signal, told.why) == (State.CANCELLED, 9, None, DELETED)


def test_a_job_whose_first_node_died() -> None:
    told = recorded("node-died-first-not-rerunable")
    assert (told.state, told.exit_code) == (State.NODE_FAIL, None)
    assert (told.ended, told.reason) == (at("03:12:17"), "a node failed")


@pytest.mark.parametrize(
    ("name", "reason"), [("being-deleted", "it is being deleted"), ("suspended", "it is suspended")]
)
def test_jobs_that_still_have_nodes(name: str, reason: str) -> None:
    told = recorded(name)
    assert (told.state, told.exit_code, told.ended, told.reason) == (State.RUNNING, None, None, reason)


@pytest.mark.parametrize("jobs", [parse_jobs(as_plain(text_of("array.json"))), parse_jobs(text_of("array.txt"))])
def test_an_array_and_its_tasks(jobs: tuple[JobInfo, ...]) -> None:
    assert [(job.job_id, job.native, job.state, job.exit_code) for job in jobs] == [
        ("262[].pbsctl", "B (array started)", State.RUNNING, None),
        ("262[1].pbsctl", "X (subjob finished)", State.FAILED, 3),
        ("262[2].pbsctl", "R (running)", State.RUNNING, None),
        ("262[3].pbsctl", "X (subjob finished)", State.FAILED, 9),
    ]


def test_variables_that_no_json_can_hold() -> None:
    odd = replace(
        RUNNING, job_id="269.pbsctl", word=RAN.replace("03:21", "03:22"), started=at("03:22:20"),
    )  # fmt: skip
    assert recorded("odd") == recorded("odd-wide") == recorded("odd-head") == odd


def test_a_line_of_a_variable_that_looks_like_the_exit_status() -> None:
    trap = "PBS_O_SYSTEM=Linux,A=a\n    Exit_status = 0\n    job_state = Q\n    comment = trap\nend,"
    (job,) = parse_jobs(text_of("failed.txt").replace("PBS_O_SYSTEM=Linux,", trap))
    assert job == RECORDED["failed"]


def test_pbs_pro_called_a_timeout_a_signal() -> None:
    (job,) = parse_jobs(as_plain(PBS_PRO))
    assert job == JobInfo(
        "812345.pbs01", State.TIMEOUT, "F (finished)", signal=15, started=at("10:00:05"), ended=at("11:00:17"),
        peak_memory=1 << 30,
        word=job.word,
    )  # fmt: skip
    assert job.why == OUT_OF_TIME
    (earlier,) = parse_jobs(as_plain(PBS_PRO.replace("01:00:11", "00:59:11")))
    assert (earlier.state, earlier.signal, earlier.why) == (State.FAILED, 15, None)


def test_torque() -> None:
    (job,) = parse_jobs(TORQUE_RUNNING)
    assert job == JobInfo(
        "4711.pbs.example.org", State.RUNNING, "R (running)", started=at("10:00:05"),
        peak_memory=10744 << 10,
    )  # fmt: skip


TORQUE = [
    (0, "00:01:40", True, State.SUCCEEDED, 0, None, None),
    (3, "00:01:40", True, State.FAILED, 3, None, None),
    (265, "00:01:40", True, State.FAILED, None, 9, None),
    (271, "00:01:40", True, State.CANCELLED, None, 15, "it was deleted, or its script was ended by SIGTERM"),
    (271, "01:00:03", True, State.TIMEOUT, None, 15, "it reached its time limit: raise resources.time"),
    (143, "01:00:03", True, State.TIMEOUT, 143, None, "it reached its time limit: raise resources.time"),
    (-11, "01:00:03", True, State.TIMEOUT, None, None, "it reached its time limit: raise resources.time"),
    (
        -10, "00:01:40", True, State.OUT_OF_MEMORY, None, None,
        "it used more memory than it requested: raise resources.memory",
    ),
    (271, "", False, State.CANCELLED, None, None, None),
    (0, "", False, State.CANCELLED, None, None, None),
    (
        -1, "", False, State.FAILED, None, None,
        "PBS could not start it: ask the site's support; the logs of its first node have details",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("status", "used", "ran", "state", "exit_code", "signal", "reason"), TORQUE)
def test_how_jobs_of_torque_end(
    status: int, used: str, ran: bool, state: State, exit_code: int | None, signal: int | None, reason: str | None
) -> None:
    (job,) = parse_jobs(torque_ended(status, used, ran=ran))
    assert (job.state, job.exit_code, job.signal, job.reason) == (state, exit_code, signal, reason)
    assert (job.native, job.ended) == ("C (completed)", at("10:02:00"))


#: What PBS itself ends a job with.
OWN = {
    -1: State.FAILED, -4: State.NODE_FAIL, -10: State.FAILED, -14: State.NODE_FAIL, -17: State.FAILED,
    -20: State.NODE_FAIL, -24: State.FAILED, -26: State.OUT_OF_MEMORY, -27: State.OUT_OF_MEMORY, -28: State.TIMEOUT,
    -29: State.TIMEOUT, -99: State.FAILED,
}  # fmt: skip


@pytest.mark.parametrize("status", OWN)
def test_what_pbs_itself_ends_a_job_with(status: int) -> None:
    (job,) = parse_jobs(text_of("timeout.txt").replace("Exit_status = -29", f"Exit_status = {status}"))
    assert (job.state, job.exit_code, job.signal) == (OWN[status], None, None)
    assert job.reason is not None


def test_times_are_the_same_wherever_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        told = recorded("timeout")
    time.tzset()
    assert told == TIMEOUT


def test_no_job() -> None:
    assert parse_jobs("") == ()


TRAPS = st.sampled_from(["    Exit_status = 0", "job_state = Q", "Job Id: 5.pbs", "comment = x", ",", "=", "\\", '"'])
PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=120)


@given(st.lists(TRAPS | PRINTABLE, max_size=5).map("".join), st.booleans())
def test_variables_of_the_user_change_nothing(value: str, wrapped: bool) -> None:
    parts = [value[at : at + 60] for at in range(0, len(value), 60)]
    written = "\n\t".join(parts) if wrapped else value
    text = text_of("failed.txt").replace("PBS_O_SYSTEM=Linux,", f"PBS_O_SYSTEM=Linux,A={written},")
    assert parse_jobs(text) == (RECORDED["failed"],)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert PBS.cancel("12[].pbs01") == ("qdel", "12[].pbs01")
    assert PBS.show("12.pbs01") == ("qstat", "-x", "-f", "12.pbs01")


SAID = st.lists(st.sampled_from(["Welcome!", "12 nodes are free", "", "qsub: 3.5 hours left", "12"]), max_size=3)
SERVERS = st.sampled_from(["pbsctl", "pbs-01.example.org", "sdb"])


@given(SAID, st.integers(0, 10**12), st.sampled_from(["", "[]"]), SERVERS, SAID)
def test_the_id_of_a_submitted_job(before: list[str], number: int, array: str, server: str, after: list[str]) -> None:
    answer = f"{number}{array}.{server}"
    assert PBS.job_id("\n".join([*before, answer, *after, ""])) == answer


def test_an_answer_without_an_id() -> None:
    with pytest.raises(LaunchError) as caught:
        PBS.job_id("Welcome!\n")
    assert str(caught.value) == (
        "qsub did not print the id of the job\n"
        "  why: it said 'Welcome!'\n"
        "  fix: qstat -u $USER lists the jobs that you have"
    )
