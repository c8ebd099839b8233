"""Where logs come from: a run of ours, any files and directories, or a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from allranks import contract
from allranks.diagnosis.attempt import LAUNCHER, end_of, logs_in, logs_of, of_attempt
from allranks.diagnosis.hangs import verdict as verdict_on_hang
from allranks.diagnosis.matching import rules_of
from allranks.diagnosis.model import Diagnosis
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.text import Log, plain, split
from allranks.diagnosis.verdict import judge, sentence
from allranks.errors import UsageError
from allranks.runs import estimate
from allranks.runs.attempt import read_json
from allranks.runs.blame import exit_message
from allranks.runs.hangs import newest
from allranks.runs.record import Run
from allranks.runs.status import State

#: Files of a directory that are read at most.
_MOST_FILES = 10_000
#: Files that are no logs.
_NO_LOG = re.compile(r"\.(?:pyc?|pth?|ckpt|safetensors|bin|np[yz]|zip|gz|ya?ml)$")
#: What ranks say that have waited for too long: which rank they waited for, their agents have seen.
_AFTER_A_HANG = ("rendezvous-timeout", "store-connect", "store-timeout", "nccl-timeout", "gloo-timeout")
#: Failures by too little memory.
_OF_MEMORY = ("cuda-out-of-memory", "host-memory-allocation", "host-memory-slurm", "host-memory-killed")
#: An exception of the script itself.
_OWN = "script-exception"
#: How a run has ended that no log has to explain.
_BY_STATE = {
    State.TIMEOUT: "time-limit",
    State.PREEMPTED: "preempted",
    State.CANCELLED: "cancelled",
    State.NODE_FAIL: "node-lost",
    State.OUT_OF_MEMORY: "host-memory-slurm",
}


def of_run(run: Run) -> Diagnosis | None:
    """Return the verdict on the newest attempt of a run; None if nothing tells of a failure.

    The rank that failed first is known from the agents: its log is read before those of all others.
    """
    status = run.record.status
    hang = newest(run.attempt_folder)
    if hang and (status.rank is None or status.state is not State.FAILED):
        return verdict_on_hang(hang)
    if status.state is State.PREEMPTED and status.exit_code == contract.CONTINUE_LATER:
        said = plain(status.reason or "", contract.RECORD_FILE, 1)
        cause = "the job was asked to stop, and has saved"
        return Diagnosis(
            "stop-requested", cause, "certain", evidence=(said,), fix="allranks resume RUN", retry="as it is"
        )
    if rule := next((rule for rule in RULES if rule.id == _BY_STATE.get(status.state)), None):
        line = plain(status.reason or f"{run.record.cluster}: {status.native}", contract.RECORD_FILE, 1)
        found = Diagnosis(rule.id, rule.cause, "certain", evidence=(line,), fix=rule.fix, retry=rule.retry)
        return _with_estimate(found, run)
    told = [text for text in (status.reason, status.cause) if text]
    # What a set-up said before it failed is in the logs too, but where the job has its own elsewhere.
    of_setup = told[1:] if status.rank is None else []
    verdict = of_attempt(run.attempt_folder, _files_of_run(run), status.rank, told[:1] if of_setup else told)
    if of_setup and (verdict is None or verdict.sure == "unknown"):
        verdict = judge([Log(contract.RECORD_FILE, told)]) or verdict
    if hang and (verdict is None or verdict.sure == "unknown" or verdict.id in _AFTER_A_HANG):
        return verdict_on_hang(hang)
    if told and (verdict is None or verdict.id == LAUNCHER):
        lines = tuple(plain(text, contract.RECORD_FILE, number) for number, text in enumerate(told[1:], 2))
        fix = f"allranks logs RUN --rank {status.rank} shows all that it printed" if status.rank is not None else ""
        verdict = Diagnosis("", told[0], "unknown", status.rank, evidence=lines, fix=fix)
        if message := exit_message(run.attempt_folder, status.rank):
            rule = next(rule for rule in RULES if rule.id == "script-exit")
            cause = sentence(rule.cause, {"message": message})
            verdict = replace(verdict, id=rule.id, cause=cause, sure="certain", fix=rule.fix, retry=rule.retry)
    if verdict is None:
        return None
    if verdict.id == _OWN and verdict.sure == "certain" and _are_other_words(status.cause or "", verdict):
        # The script caught that exception, and exited by itself.
        last = plain(status.cause or "", contract.RECORD_FILE, 2)
        verdict = replace(verdict, sure="likely", evidence=(last, *verdict.evidence))
    host, when = end_of(run.attempt_folder, status.rank if verdict.rank is None else verdict.rank)
    return replace(_with_estimate(verdict, run), host=host if run.record.nnodes > 1 else None, when=when)


def _with_estimate(verdict: Diagnosis, run: Run) -> Diagnosis:
    """Add what ``allranks estimate`` put into the run's plan, where memory was too little."""
    rows = read_json(run.folder / contract.PLAN_FILE).get("reasons", ()) if verdict.id in _OF_MEMORY else ()
    size = next((row["value"] for row in rows if row["subject"] == estimate.SUBJECT), None)
    return replace(verdict, cause=f"{verdict.cause}; allranks estimate: {size} per rank") if size else verdict


def _are_other_words(last: str, verdict: Diagnosis) -> bool:
    """Return whether a rank's last words are no exception's, nor those that a verdict rests on."""
    return bool(last) and not (last.startswith(verdict.evidence[0].text) or rules_of(last))


def _files_of_run(run: Run) -> list[Path]:
    found = [path for folder in (run.attempt_folder, *run.tasks) for path in logs_in(folder)]
    return found + sorted(path for path in run.folder.glob("*.out") if path.is_file())


def of_files(paths: Sequence[Path]) -> Diagnosis | None:
    """Return the verdict on logs, which may be directories of them; None if nothing tells of a failure.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    files = [file for path in paths for file in _within(path)]
    return judge(logs_of(files))


def of_text(data: bytes) -> Diagnosis | None:
    """Return the verdict on the text of a pipe."""
    return judge([Log("-", split(data))])


def _within(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file() and not _NO_LOG.search(file.name))
        for count, file in enumerate(files):
            if count == _MOST_FILES:
                raise UsageError(
                    f"{path} has more than {_MOST_FILES} files", fix="name the directory of one run's logs"
                )
            yield file
    else:
        raise UsageError(f"there is no file or directory {path}")
