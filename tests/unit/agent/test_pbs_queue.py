"""A job of PBS goes back into the queue: with commands on PATH that write down what they are asked, and answer."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks import contract
from allranks.agent import batch_job
from allranks.agent.requeue import Decision, decide, may_start, start_next
from node_orders import pbs as pbs_job

OPERATORS = "qrerun: Unauthorized Request  7.server"
AGAIN = Decision(True, "it was stopped on request, and is to be continued")


class Pbs:
    """The commands of a PBS, and the environment of a job of it.

    Args:
        folder: for the commands; the run's is in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.home = folder, folder / "run", folder / "where it was typed"
        for path in (folder / "bin", self.run / contract.attempt_dir(0), self.home):
            path.mkdir(parents=True)
        (self.run / "script.pbs").touch()
        path = f"{folder}/bin:{os.defpath}"
        self.environ = {"PATH": path, "PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(self.home), "KEPT": "1"}
        self.environ |= {contract.RUN_DIR: str(self.run), contract.ATTEMPT: "0"}

    def answers(self, command: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Let a command answer so."""
        place = self.folder / "bin" / command
        asked = f'printf \'%s\\n\' "$@" >"{self.folder}/{command}.asked"\npwd >>"{self.folder}/{command}.asked"\n'
        seen = f'env -0 >"{self.folder}/{command}.env"\n'
        place.write_text(f"#!/bin/sh\n{asked}{seen}printf '%s' '{out}'\necho '{err}' >&2\nexit {code}\n")
        place.chmod(0o755)

    def asked(self, command: str) -> list[str] | None:
        """Return what a command was asked, without the directory that it was started in; None if it was not."""
        try:
            *words, where = (self.folder / f"{command}.asked").read_text().splitlines()
        except FileNotFoundError:
            return None
        assert where == str(self.home)
        return words

    def seen(self, command: str) -> dict[str, str]:
        """Return the environment of a command."""
        pairs = (self.folder / f"{command}.env").read_text().split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)

    def start_next(self, *, lost: bool = False, **environ: str) -> Decision:
        """Go on with the run."""
        self.environ |= environ
        return start_next(self.run, 0, replace(AGAIN, lost=lost), pbs_job(self.environ))


@pytest.fixture
def pbs(tmp_path: Path) -> Pbs:
    """Give a PBS that lets operators alone put a job back into the queue."""
    made = Pbs(tmp_path)
    made.answers("qrerun", err=OPERATORS, code=159)
    made.answers("qsub", out="a word of the site\n8.server\n")
    return made


def test_an_operators_job_is_put_back(pbs: Pbs) -> None:
    pbs.answers("qrerun")
    assert pbs.start_next() == replace(AGAIN, how="requeue", job="7.server")
    assert (pbs.asked("qrerun"), pbs.asked("qsub")) == (["7.server"], None)
    decided = json.loads((pbs.run / contract.attempt_dir(0) / contract.AGAIN).read_text())
    assert (decided["how"], decided["job"]) == ("requeue", "7.server")


def test_what_puts_the_job_back_may_be_ended_with_it(pbs: Pbs) -> None:
    (pbs.folder / "bin" / "qrerun").write_text("#!/bin/sh\nkill -s TERM $$\n")
    assert pbs.start_next() == replace(AGAIN, how="requeue", job="7.server")
    pbs.answers("qrerun", err="qrerun: Response timed out. Job rerun request still in progress for 7.server", code=163)
    assert pbs.start_next() == replace(AGAIN, how="requeue", job="7.server")
    assert pbs.asked("qsub") is None


def test_another_job_waits_where_users_may_not_do_that(pbs: Pbs) -> None:
    why = f"{AGAIN.why}; qrerun: {OPERATORS}"
    assert pbs.start_next() == replace(AGAIN, how="dependent", job="8.server", why=why)
    assert pbs.asked("qsub") == ["-W", "depend=afterany:7.server", f"{pbs.run}/script.pbs"]


@pytest.mark.parametrize(("said", "job"), [("8.server\\n", "8.server"), ("8.ser", None)], ids=["told", "half told"])
def test_a_job_that_was_submitted_counts_although_qsub_hangs(
    pbs: Pbs, monkeypatch: pytest.MonkeyPatch, said: str, job: str | None
) -> None:
    (pbs.folder / "bin" / "qsub").write_text(f"#!/bin/sh\nprintf 'a word of the site\\n{said}'\nexec sleep 300\n")
    monkeypatch.setattr(batch_job, "_COMMAND_SECONDS", 5.0)
    decided = pbs.start_next()
    assert (decided.job, decided.how, decided.given_up) == (job, job and "dependent", job is None)


def test_it_is_submitted_from_outside_of_the_job_to_the_same_place(pbs: Pbs) -> None:
    pbs.start_next(PBS_O_QUEUE="gpu", PBS_ACCOUNT="lab", PBS_SERVER="other", PBS_NODEFILE="/n", HF_TOKEN="x")
    script = f"{pbs.run}/script.pbs"
    assert pbs.asked("qsub") == ["-W", "depend=afterany:7.server", "-q", "gpu", "-A", "lab", script]
    seen = pbs.seen("qsub")
    assert (seen["KEPT"], {name for name in seen if name.startswith("PBS_")}) == ("1", {"PBS_SERVER"})


def test_after_the_loss_of_a_node_nothing_is_waited_for(pbs: Pbs) -> None:
    """PBS does not end such a job, whoever asks it to, before the node is back."""
    pbs.answers("qrerun")
    decision = pbs.start_next(lost=True)
    assert (decision.how, decision.job, pbs.asked("qrerun")) == ("submit", "8.server", None)
    assert decision.why == f"{AGAIN.why}; PBS ends a job that has lost a node only when that is back"
    assert pbs.asked("qsub") == [f"{pbs.run}/script.pbs"]


@pytest.mark.parametrize(("variable", "options"), [("PBS_ARRAY_INDEX", ["-J", "3-4:2"]), ("PBS_ARRAYID", ["-t", "3"])])
def test_of_an_array_only_this_task_is_submitted(pbs: Pbs, variable: str, options: list[str]) -> None:
    pbs.answers("qsub", out="8[].server\n")
    decision = pbs.start_next(PBS_JOBID="7[3].server", **{variable: "3"})
    assert pbs.asked("qrerun") == ["7[3].server"]
    assert pbs.asked("qsub") == [*options, f"{pbs.run}/script.pbs"]
    assert (decision.how, decision.job) == ("submit", "8[3].server")


@pytest.mark.parametrize(
    ("code", "said", "why"),
    [(166, "qsub: Illegal attribute", "qsub: qsub: Illegal attribute"), (2, "", "qsub: exit code 2")],
)
def test_what_cannot_be_submitted_either_is_given_up(pbs: Pbs, code: int, said: str, why: str) -> None:
    pbs.answers("qsub", err=said, code=code)
    why = f"{AGAIN.why}, but qrerun: {OPERATORS}, and {why}"
    assert pbs.start_next() == Decision(False, why, given_up=True)


def test_a_node_without_the_commands_says_so(pbs: Pbs) -> None:
    (pbs.folder / "bin" / "qsub").unlink()
    (pbs.folder / "bin" / "qrerun").unlink()
    pbs.environ["PATH"] = f"{pbs.folder}/bin"
    decision = pbs.start_next()
    assert (decision.again, decision.given_up) == (False, True)
    assert "qrerun cannot be run: [Errno 2]" in decision.why
    assert "qsub cannot be run: [Errno 2]" in decision.why


def test_where_it_was_submitted_need_not_be_there(pbs: Pbs) -> None:
    pbs.environ["PBS_O_WORKDIR"] = "/nowhere"
    pbs.home = Path.cwd()
    assert pbs.start_next().job == "8.server"
    assert pbs.asked("qsub") == ["-W", "depend=afterany:7.server", f"{pbs.run}/script.pbs"]


@pytest.mark.parametrize(
    ("marked", "end", "expected"),
    [
        (False, None, None),
        (True, None, "PBS is ending the job already"),
        (True, "", "PBS is ending the job already"),
        (True, 1000, "PBS is ending the job already"),
        (True, -1000, None),
        (False, 1000, None),
    ],
)
def test_a_job_that_was_deleted_does_not_go_on(
    pbs: Pbs, marked: bool, end: int | str | None, expected: str | None
) -> None:
    """The script notes SIGTERM; at the time limit, that is no reason to end the run."""
    if marked:
        (pbs.run / contract.attempt_dir(0) / contract.TERMINATED).touch()
    if end is not None:
        pbs.environ[contract.END_TIME] = str(int(time.time()) + end) if isinstance(end, int) else end
    assert pbs_job(pbs.environ).ending() == expected
    decision = pbs.start_next()
    assert (decision.again, pbs.asked("qrerun") is None) == (expected is None, expected is not None)


DELETED = "Job Id: 7.server\n    comment = Job run at Sun Nov 22 on (pbs01:ncpus=1) and terminated \n\tby ada@login\n"


@pytest.mark.parametrize(
    ("answer", "code", "given_up"),
    [("Job Id: 7.server\n    comment = Job run at Sun\n", 0, False), (DELETED, 0, True), ("", 153, True)],
)
def test_a_job_that_pbs_ends_because_it_has_lost_a_node_goes_on(
    pbs: Pbs, answer: str, code: int, given_up: bool
) -> None:
    """The end of a task that PBS does not see is what tells; a person may have deleted the job besides."""
    attempt = pbs.run / contract.attempt_dir(0)
    (attempt / contract.TERMINATED).touch()
    (attempt / "node-001").mkdir()
    (attempt / "node-001" / contract.CUT_OFF).write_text("PBS on pbs02\n")
    pbs.answers("qstat", out=answer, code=code)
    decided = decide(pbs.run, 0, 143, 10)
    assert decided == Decision(True, "PBS on pbs02 was lost", lost=True)
    decision = start_next(pbs.run, 0, decided, pbs_job(pbs.environ))
    assert (decision.given_up, decision.job) == (given_up, None if given_up else "8.server")
    assert decide(pbs.run, 0, 3, 10).again is False  # A rank had failed before.


@pytest.mark.parametrize(("walltime", "limit"), [("Resource_List.walltime = 48:00:30", 172830), ("x = 1", None)])
def test_the_end_of_a_job(pbs: Pbs, walltime: str, limit: int | None) -> None:
    start = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(1700000000))
    pbs.answers("qstat", out=f"Job Id: 7.server\n    stime = {start}\n    {walltime}\n")
    assert pbs_job(pbs.environ).start_and_limit() == (1700000000, limit)


def test_a_time_limit_in_another_form_does_not_end_the_job(pbs: Pbs) -> None:
    pbs.answers("qstat", out="Job Id: 7.server\n    Resource_List.walltime = 1:00:00:00\n")
    assert pbs_job(pbs.environ).end_time() is None


def test_pbs_itself_puts_back_what_makes_room(pbs: Pbs) -> None:
    assert pbs_job(pbs.environ).preempted() is False


def begin(pbs: Pbs, job: str) -> bool:
    """Start attempt 1 as a job; return whether a person has started it."""
    attempt = pbs.run / contract.attempt_dir(1)
    attempt.mkdir()
    assert may_start(pbs.run, 1, 10, pbs_job({**pbs.environ, "PBS_JOBID": job}))
    return (attempt / contract.RESUMED).exists()


@pytest.mark.parametrize(("job", "by_a_person"), [("7.server", False), ("8.server", False), ("9.server", True)])
def test_who_has_begun_an_attempt(pbs: Pbs, job: str, by_a_person: bool) -> None:
    """Who puts a job back keeps its id; the job that follows is named when it is submitted."""
    (pbs.run / contract.attempt_dir(0) / contract.JOB).write_text("7.server\n")
    (pbs.run / contract.attempt_dir(0) / contract.AGAIN).write_text(json.dumps({"job": "8.server"}))
    assert begin(pbs, job) is by_a_person


def test_without_a_word_on_another_job_the_same_id_tells(pbs: Pbs) -> None:
    (pbs.run / contract.attempt_dir(0) / contract.JOB).write_text("7.server\n")
    assert not begin(pbs, "7.server")
