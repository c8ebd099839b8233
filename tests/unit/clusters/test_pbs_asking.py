"""PBS is asked with its own commands; here scripts stand in for them that give recorded answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pbs_recorded import GRID_ENGINE, VERSIONS, failures, recorded, text_of, torque_ended

from allranks import contract
from allranks.clusters.batch.cluster import SubmittedJob
from allranks.clusters.batch.scheduler import JobInfo, first_fix
from allranks.clusters.pbs import PBS, PbsCluster, flavour, query_job
from allranks.errors import LaunchError
from allranks.runs.status import Handle, State

#: What qstat says in turn, on which output, and its exit code; the last is repeated.
Said = tuple[str, int, int]
Qstat = Callable[..., dict[str, str]]
OPENPBS, TORQUE = "pbs_version = 23.06.06\n", "Version: 6.1.3\nCommit: 0b3ca9e9\n"
UNKNOWN: Said = ("qstat: Unknown Job Id 9999.pbsctl\n", 2, 153)
AWAY: Said = ("Connection refused\nqstat: cannot connect to server pbsctl (errno=15010)\n", 2, 255)
NO_HISTORY: Said = ("qstat: PBS is not configured to maintain job history 7.pbsctl\n", 2, 0)
NO_SUCH_OPTION: Said = ("qstat: invalid option -- 'w'\nusage: \nqstat [-f] [-W site_specific]\n", 2, 2)
#: Seen at sites, or in the issues of programs that ask PBS: worth another try.
PASSING = [
    "Connection timed out\nqstat: cannot connect to server pbs01 (errno=15010)",
    "Connection refused\nqstat: cannot connect to server pbs01 (errno=111)",
    "Unknown Host.\nqstat: cannot connect to server pbs01 (errno=15008)",
    "No Permission.\nqstat: cannot connect to server pbs01 (errno=15007)",
    "pbs_iff: cannot read reply from pbs_server\nNo Permission.",
    "Communication failure.\nqstat: cannot connect to server pbs01 (errno=15096)",
    "qstat: End of File",
    "munge: Error: Failed to access socket",
    "socket_connect_unix failed: 15137\nqstat: cannot connect to server (null) (errno=15137)",
    "Unable to communicate with pbs01(10.0.0.1)\nCannot connect to specified server host 'pbs01'.",
    "Couldn't connect to cluster: pbs01",
    "qstat: Pbs Server is currently too busy to service this request. Please retry this request. (15133)",
]
QUEUE = "set scheduler.partition to a queue that qstat -Q lists and you may use"
LIMITS = (
    "lower resources.time, resources.nodes, resources.cpus_per_node, resources.gpus_per_node or resources.memory, "
    "or choose another scheduler.partition; "
    "qstat -Q -f shows the limits of the queues"
)
NAME = "change name: letters, digits, ., _, + and -, and not too long"
TAKE_OUT = "change scheduler.constraint, scheduler.resources or scheduler.directives"
SELECT = "take -l nodes, or what asks for select, out of scheduler.directives"
SCRIPT = "name a script that exists and is not empty"
REFUSED = [
    QUEUE, "change resources.cpus_per_node", "change resources.nodes or scheduler.constraint", TAKE_OUT, TAKE_OUT,
    SELECT, SELECT, LIMITS, SCRIPT, f"its queue may not take your jobs: {QUEUE}", "change resources.time",
    "change scheduler.directives", NAME, SCRIPT, SCRIPT, "change -l place in scheduler.directives",
    "change resources.memory", QUEUE, "change scheduler.array", "change scheduler.array", "change scheduler.directives",
    TAKE_OUT,
]  # fmt: skip
#: Texts of the lists of errors of OpenPBS and Torque, or told by sites, not recorded.
MORE_REFUSED = {
    "qsub: submit error (Unknown queue MSG=cannot locate queue)": QUEUE,
    "qsub: submit error (Access to queue is denied MSG=user ada not in ACL)": QUEUE,
    "qsub: submit error (Job rejected by all possible destinations (check syntax, queue resources, ...))": LIMITS,
    "qsub: submit error (Job exceeds queue resource limits MSG=cannot satisfy queue max nodect requirement)": LIMITS,
    "qsub: Maximum number of jobs for user ada already in queue gpuq": "wait until some of your other jobs have ended",
    "qsub: would exceed queue gpuq's per-user limit": "wait until some of your other jobs have ended",
    "qsub: Bad UID for job execution": (
        "submit as a user whom PBS lets run jobs, which root often is not; ask the site's support"
    ),
    "qsub: Invalid Account": "change scheduler.account or scheduler.project",
    "qsub: Request rejected.  Reason: No active allocation found for project lab": (
        "change scheduler.account or scheduler.project"
    ),
    "qsub: Resource: filesystems is required to be set.": "set scheduler.resources, such as filesystems=home:scratch",
    "qsub: Unknown Reservation Id": "change scheduler.reservation; pbs_rstat lists reservations",
    "qsub: Job name is too long ": NAME,
    "qsub: Invalid Job Dependency": "change scheduler.directives: the job that it depends on is not there any more",
}


@pytest.fixture
def qstat(tmp_path: Path) -> Qstat:
    """Give a function that makes a qstat of a version, which gives answers in turn and notes how it was asked."""
    script, log = tmp_path / "bin" / "qstat", tmp_path / "log"

    def make(version: str, *answers: Said) -> dict[str, str]:
        script.parent.mkdir()
        log.touch()
        turns = [f"{turn}) printf %s {shlex.quote(text)} >&{where}; exit {code};;" for turn, (text, where, code) in
                 enumerate(answers, start=1)]  # fmt: skip
        last = turns[-1].replace(f"{len(answers)})", "*)", 1) if turns else ""
        script.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --version ] && {{ echo version >>{log}.v; printf %s {shlex.quote(version)} >&2; exit; }}\n'
            f'echo "$@" "$TZ" >>{log}\ncase $(wc -l <{log}) in\n' + "\n".join([*turns[:-1], last]) + "\nesac\n"
        )
        script.chmod(0o755)
        return {"PATH": f"{script.parent}:{os.defpath}", "TZ": "Asia/Tokyo"}

    return make


def asked(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines()


WIDE, PLAIN = "-x -f -w 7.pbsctl UTC0", "-x -f 7.pbsctl UTC0"
WITHOUT_HISTORY = "-f -w 7.pbsctl UTC0"


@pytest.mark.parametrize("name", ["running", "failed", "timeout", "cancelled-queued", "dependent", "odd-wide"])
def test_a_job_is_asked_for_once(qstat: Qstat, tmp_path: Path, name: str) -> None:
    assert query_job("7.pbsctl", qstat(OPENPBS, (text_of(f"{name}.txt"), 1, 0))) == recorded(name)
    assert asked(tmp_path) == [WIDE]


def test_a_version_without_wide_lines(qstat: Qstat, tmp_path: Path) -> None:
    environ = qstat(OPENPBS, NO_SUCH_OPTION, NO_SUCH_OPTION, (text_of("failed.txt"), 1, 0))
    assert query_job("7.pbsctl", environ) == recorded("failed")
    assert asked(tmp_path) == [WIDE, WITHOUT_HISTORY, PLAIN]


def test_an_array_stands_as_its_tasks_do(qstat: Qstat, tmp_path: Path) -> None:
    whole = text_of("array.txt")
    info = query_job("262[].pbsctl", qstat(OPENPBS, (whole, 1, 0)))
    assert info is not None
    assert (info.job_id, info.state) == ("262[2].pbsctl", State.RUNNING)
    assert asked(tmp_path) == ["-x -f -w -t 262[].pbsctl UTC0"]


def test_an_array_of_which_a_task_failed(qstat: Qstat) -> None:
    ended = text_of("array.txt").replace("job_state = R", "job_state = X").replace("job_state = B", "job_state = F")
    info = query_job("262[].pbsctl", qstat(OPENPBS, (ended, 1, 0)))
    assert info is not None
    assert (info.job_id, info.state, info.exit_code) == ("262[1].pbsctl", State.FAILED, 3)


def test_torque_is_asked_in_its_own_way(qstat: Qstat, tmp_path: Path) -> None:
    info = query_job("4711", qstat(TORQUE, (torque_ended(0), 1, 0)))
    assert info is not None
    assert (info.state, info.exit_code, info.native) == (State.SUCCEEDED, 0, "C (completed)")
    assert asked(tmp_path) == ["-f 4711 UTC0"]


@pytest.mark.parametrize("version", [OPENPBS, TORQUE])
@pytest.mark.parametrize("said", [UNKNOWN, ("qstat: Unknown Job Id Error 9999.pbs.example.org\n", 2, 153)])
def test_a_job_that_nobody_knows(qstat: Qstat, version: str, said: Said) -> None:
    assert query_job("9999", qstat(version, said)) is None


def test_without_a_history_a_job_that_has_ended_is_forgotten(qstat: Qstat, tmp_path: Path) -> None:
    assert query_job("7.pbsctl", qstat(OPENPBS, NO_HISTORY, UNKNOWN)) is None
    assert asked(tmp_path) == [WIDE, WITHOUT_HISTORY]


def test_without_a_history_a_job_that_runs_is_known(qstat: Qstat, tmp_path: Path) -> None:
    environ = qstat(OPENPBS, NO_HISTORY, (text_of("odd-wide.txt"), 1, 0))
    assert query_job("7.pbsctl", environ) == recorded("odd-wide")
    assert asked(tmp_path) == [WIDE, WITHOUT_HISTORY]


def test_pbs_that_is_away_for_a_moment(qstat: Qstat, tmp_path: Path) -> None:
    assert query_job("7.pbsctl", qstat(OPENPBS, AWAY, AWAY, (text_of("running.txt"), 1, 0))) == recorded("running")
    assert asked(tmp_path) == [WIDE, WIDE, WIDE]


def test_pbs_that_stays_away(qstat: Qstat, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        query_job("7.pbsctl", qstat(OPENPBS, AWAY))
    assert str(caught.value) == (
        "PBS cannot be reached\n"
        "  why: Connection refused; cannot connect to server pbsctl (errno=15010)\n"
        "  fix: see qstat -B, and try again when it answers"
    )
    assert asked(tmp_path) == [WIDE, WIDE, WIDE]


def test_what_is_no_answer(qstat: Qstat, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"qstat printed nothing about job 7\.pbsctl that allranks can parse"):
        query_job("7.pbsctl", qstat(OPENPBS, NO_SUCH_OPTION))
    assert len(asked(tmp_path)) == 4


def test_a_job_that_may_not_be_seen(qstat: Qstat, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        query_job("7.pbsctl", qstat(OPENPBS, ("qstat: Unauthorized Request  7.pbsctl\n", 2, 159)))
    assert str(caught.value) == (
        "qstat failed\n  why: Unauthorized Request  7.pbsctl\n  fix: type it to see more: qstat -x -f -w 7.pbsctl"
    )
    assert asked(tmp_path) == [WIDE]


@pytest.mark.parametrize("version", VERSIONS)
def test_which_pbs_it_is_is_asked_once(qstat: Qstat, tmp_path: Path, version: str) -> None:
    environ = qstat(version)
    assert [flavour(environ), flavour(environ)] == [VERSIONS[version]] * 2
    assert (tmp_path / "log.v").read_text() == "version\n"


def test_no_qstat(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert flavour(environ) is None
    with pytest.raises(LaunchError) as caught:
        query_job("7.pbsctl", environ)
    assert str(caught.value) == (
        "there is no PBS here: qstat cannot be started\n"
        "  why: No such file or directory\n"
        "  fix: run this where qstat is in PATH, such as the cluster's login node; some sites need "
        "module load pbs or torque"
    )


def test_grid_engine_is_no_pbs(qstat: Qstat) -> None:
    with pytest.raises(
        LaunchError, match=r"this qstat is not PBS'\n  why: .*\n  fix: .*, use the kind slurm or grid_engine"
    ):
        flavour(qstat(GRID_ENGINE))


def test_the_jobs_of_a_qstat_that_does_not_say_it_is_pbs_are_queried(qstat: Qstat, tmp_path: Path) -> None:
    environ = qstat("wrapped\n", NO_SUCH_OPTION, NO_SUCH_OPTION, (text_of("failed.txt"), 1, 0))
    assert query_job("7.pbsctl", environ) == recorded("failed")
    assert asked(tmp_path) == [WIDE, WITHOUT_HISTORY, PLAIN]


def test_some_other_qstat(qstat: Qstat) -> None:
    with pytest.raises(LaunchError, match=r"this qstat is not PBS'\n  why: .*/qstat --version said 'Unknown option"):
        flavour(qstat("Unknown option: version\nUsage: qstat [-f] [-a|-i|-r]\n"))


def test_asking_anything(qstat: Qstat) -> None:
    environ = qstat(OPENPBS, ("hello\n", 1, 0), AWAY)
    assert PBS.output(("qstat", "-B"), environ) == "hello\n"
    with pytest.raises(LaunchError, match="PBS cannot be reached"):
        PBS.output(("qstat", "-B"), environ)


@pytest.mark.parametrize(("failure", "fix"), list(zip(failures("refused.txt"), REFUSED, strict=True)))
def test_refused_jobs(failure: tuple[list[str], int, str], fix: str) -> None:
    error = PBS.refusal(*failure)
    assert (error.what, error.fix) == ("PBS refuses the job", fix)
    assert error.why is not None and "usage" not in error.why and "[-" not in error.why


@pytest.mark.parametrize("said", MORE_REFUSED)
def test_other_refused_jobs(said: str) -> None:
    error = PBS.refusal(["qsub", "job.pbs"], 1, said)
    assert (error.what, error.fix) == ("PBS refuses the job", MORE_REFUSED[said])


def test_the_words_of_a_refusal() -> None:
    (name,) = (failure for failure in failures("refused.txt") if failure[0][1] == "-N")
    assert PBS.refusal(*name).why == "illegal -N value"
    torque = "qsub: submit error (Unknown queue MSG=cannot locate queue)\n"
    assert PBS.refusal(["qsub"], 170, torque).why == "Unknown queue MSG=cannot locate queue"
    assert str(PBS.refusal(["qsub"], 1, "qsub: Ask Ada first\n")) == "PBS refuses the job\n  why: Ask Ada first"
    assert str(PBS.refusal(["qdel", "1"], 8, "")) == (
        "qdel failed\n  why: qdel ended with 8 and said nothing\n  fix: type it to see more: qdel 1"
    )


@pytest.mark.parametrize("failure", failures("unreachable.txt"), ids=lambda failure: " ".join(failure[0]))
def test_an_unreachable_pbs(failure: tuple[list[str], int, str]) -> None:
    assert PBS.refusal(*failure).what == "PBS cannot be reached"
    assert first_fix(PBS.unreachable, failure[2])


@pytest.mark.parametrize("said", PASSING)
def test_what_is_worth_another_try(said: str) -> None:
    assert PBS.refusal(["qdel", "1"], 1, said).what == "PBS cannot be reached"


def test_what_is_not_there() -> None:
    told = [bool(code and re.search(PBS.gone, said)) for _, code, said in failures("not-there.txt")]
    assert told == [True, True, True, True, True, True, False, True, False, False]
    others = (said for name in ("not-there.txt", "refused.txt") for _, _, said in failures(name))
    assert not any(first_fix(PBS.unreachable, said) for said in others)


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    """Give the directory of a run whose agent and script have ended well, when the recorded job had started."""
    run = tmp_path / "run"
    node = run / contract.node_dir(0, 0)
    node.mkdir(parents=True)
    end = {"time": 9.0, "host": "h", "kind": contract.ENDED, "state": "SUCCEEDED", "exit_code": 0}
    (node / contract.AGENT_EVENTS).write_text(json.dumps(end) + "\n")
    (run / contract.attempt_dir(0) / contract.EXIT).write_text("0\n")
    return run


def state_of(run: Path, seconds: float, info: JobInfo | None, monkeypatch: pytest.MonkeyPatch, **env: str) -> State:
    """Return the state of a run whose script ended so long after its job started."""
    assert info is not None and info.started is not None
    os.utime(run / contract.attempt_dir(0) / contract.EXIT, (info.started + seconds,) * 2)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return PbsCluster().status_of(run, Handle(job_id="7.pbsctl")).state


@pytest.mark.parametrize(
    ("code", "decision", "seconds", "state"),
    [
        (1, None, 60, State.RUNNING),
        (1, False, 60, State.FAILED),
        (1, None, 200, State.FAILED),
        (75, True, 200, State.RUNNING),
    ],
)
def test_a_script_has_time_to_decide_about_another_attempt(
    qstat: Qstat,
    ended: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    decision: bool | None,
    seconds: int,
    state: State,
) -> None:
    attempt = ended / contract.attempt_dir(0)
    (attempt / contract.EXIT).write_text(f"{code}\n")
    os.utime(attempt / contract.EXIT, (time.time() - seconds,) * 2)
    (attempt / "node-000" / contract.AGENT_EVENTS).unlink()
    if decision is not None:
        (attempt / contract.AGAIN).write_text(json.dumps({"again": decision, "job": "7.pbsctl"}))
    for name, value in qstat(OPENPBS, (text_of("running.txt"), 1, 0)).items():
        monkeypatch.setenv(name, value)
    assert PbsCluster().status_of(ended, Handle(job_id="7.pbsctl")).state is state


@pytest.mark.parametrize(("seconds", "state"), [(60, State.SUCCEEDED), (-60, State.RUNNING)])
def test_a_job_that_pbs_keeps_after_its_script_has_ended_is_over(
    qstat: Qstat, ended: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, state: State
) -> None:
    """PBS keeps a job that has lost a node. A job that was put back has started after an end of its script."""
    env = qstat(OPENPBS, (text_of("running.txt"), 1, 0))
    assert state_of(ended, seconds, recorded("running"), monkeypatch, **env) is state


def test_a_run_whose_ranks_have_all_succeeded_has_not_failed(
    qstat: Qstat, ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PBS kills a job that has lost a node when that is back."""
    killed = text_of("failed.txt").replace("Exit_status = 3", "Exit_status = 271")
    assert killed != text_of("failed.txt")
    assert state_of(ended, 1, recorded("failed"), monkeypatch, **qstat(OPENPBS, (killed, 1, 0))) is State.SUCCEEDED


@pytest.mark.parametrize(("after", "state"), [(1, State.TIMEOUT), (-1, State.CANCELLED)])
def test_without_a_history_a_time_limit_is_told_from_a_cancellation(
    qstat: Qstat, ended: Path, monkeypatch: pytest.MonkeyPatch, after: int, state: State
) -> None:
    """The script leaves when the limit is, and when it was ended."""
    end = {"time": 9.0, "host": "h", "kind": contract.ENDED, "state": "CANCELLED", "exit_code": 143}
    (ended / contract.node_dir(0, 0) / contract.AGENT_EVENTS).write_text(json.dumps(end) + "\n")
    terminated = ended / contract.attempt_dir(0) / contract.TERMINATED
    terminated.write_text("1000\n")
    os.utime(terminated, (1000 + after,) * 2)
    for name, value in qstat(OPENPBS, NO_HISTORY, UNKNOWN).items():
        monkeypatch.setenv(name, value)
    status = PbsCluster().status_of(ended, Handle(job_id="7.pbsctl"))
    reason = "it reached its time limit: raise resources.time" if state is State.TIMEOUT else None
    assert (status.state, status.reason, status.exit_code) == (state, reason, 143)


def test_who_waits_is_told_what_happens_in_each_attempt(
    qstat: Qstat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in qstat(OPENPBS, (text_of("running.txt"), 1, 0)).items():
        monkeypatch.setenv(name, value)
    job = SubmittedJob(PbsCluster(), tmp_path, "7.pbsctl")
    assert (job.wait(0), job.news()) == (False, ["job 7.pbsctl submitted", "running"])
    first, second = (tmp_path / contract.attempt_dir(number) for number in range(2))
    (first / "node-000").mkdir(parents=True)
    warned = {"time": 1.0, "host": "h", "kind": contract.WARNED, "signal": "SIGUSR1"}
    (first / "node-000" / contract.AGENT_EVENTS).write_text(json.dumps(warned) + "\n")
    assert (job.wait(0), job.news()) == (False, ["SIGUSR1: the job is to end; ranks that listen save and exit"])
    again = {"again": True, "how": "requeue", "job": "7.pbsctl", "why": "it was asked to stop"}
    (first / contract.AGAIN).write_text(json.dumps(again))
    assert (job.wait(0), job.news()) == (False, [])  # Whether PBS lets it is not known yet.
    (first / contract.AGAIN).write_text(json.dumps({**again, "how": "dependent", "job": "8.pbsctl"}))
    (second / "node-000").mkdir(parents=True)
    lost = {"time": 2.0, "host": "n1", "kind": contract.NODE_LOST, "node": 1, "why": "silent for 30 s"}
    (second / "node-000" / contract.AGENT_EVENTS).write_text(json.dumps(lost) + "\n")
    news = ["attempt 1 follows, in job 8.pbsctl: it was asked to stop", "node 1 (n1) was lost: silent for 30 s"]
    assert (job.wait(0), job.news()) == (False, news)
    assert (job.wait(0), job.news()) == (False, [])
