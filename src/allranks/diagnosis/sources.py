"""Where logs come from: a run of ours, files and directories of anybody, or a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from allranks import contract
from allranks.diagnosis.hangs import verdict as verdict_on_hang
from allranks.diagnosis.model import Diagnosis
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.text import Log, plain, read, split
from allranks.diagnosis.verdict import judge
from allranks.errors import RunFolderError, UsageError
from allranks.logs.cause import tail
from allranks.record.events import read_events
from allranks.runs.hangs import newest
from allranks.runs.record import Run
from allranks.runs.status import State

#: Files of a directory that are read at most, and the bytes of all of them together.
_MOST_FILES, _BUDGET = 10_000, 1 << 25
#: Bytes of each file that are read at least, and at most.
_LEAST, _MOST = 1 << 15, 1 << 23
#: A rank in a log's name: of ours, of torchrun --log-dir (``attempt_0/3/stderr.log``), and as people name them.
_RANK_IN_NAME = re.compile(
    r"rank[-_.]?(\d+)|(?:^|/)(\d+)/(?:stdout|stderr|error)\.(?:log|json)$|[-_.](?:task|t)(\d+)[-_.]"
)
#: Files that are no logs.
_NO_LOG = re.compile(r"\.(?:pyc?|pth?|ckpt|safetensors|bin|np[yz]|zip|gz|ya?ml)$")
#: What a launcher says of a rank that has ended: the agents' own report says more.
_LAUNCHER = "launcher-report"
#: What ranks say that have waited for too long: which rank they waited for, their agents have seen.
_AFTER_A_HANG = ("rendezvous-timeout", "store-timeout", "nccl-timeout", "gloo-timeout")
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
    if rule := next((rule for rule in RULES if rule.id == _BY_STATE.get(status.state)), None):
        line = plain(status.reason or f"{run.record.cluster}: {status.native}", contract.RECORD_FILE, 1)
        return Diagnosis(rule.id, rule.cause, "certain", evidence=(line,), fix=rule.fix, retry=rule.retry)
    files = _files_of_run(run)
    own = [path for path in files if status.rank is not None and path.stem == f"rank-{status.rank}"]
    told = [text for text in (status.reason, status.cause) if text]
    report = Log(contract.RECORD_FILE, told, status.rank)
    verdict = None
    for logs in (_logs(own), [report], _logs(files)):
        if verdict is None or verdict.sure == "unknown":
            verdict = judge(logs, status.rank) or verdict
    if hang and (verdict is None or verdict.sure == "unknown" or verdict.id in _AFTER_A_HANG):
        return verdict_on_hang(hang)
    if told and (verdict is None or verdict.id == _LAUNCHER):
        lines = tuple(report.line(at) for at in range(1, len(told)))
        fix = f"allranks logs RUN --rank {status.rank} shows all that it printed" if status.rank is not None else ""
        verdict = Diagnosis("", told[0], "unknown", status.rank, evidence=lines, fix=fix)
    if verdict is None:
        return None
    host, when = _end(run, status.rank if verdict.rank is None else verdict.rank)
    return replace(verdict, host=host if run.record.nnodes > 1 else None, when=when)


def _files_of_run(run: Run) -> list[Path]:
    folders = [run.attempt_folder, *run.tasks]
    found = [path for folder in folders for path in folder.glob("node-*/*") if path.suffix in (".err", ".out", ".log")]
    return sorted(found) + sorted(path for path in run.folder.glob("*.out") if path.is_file())


def _end(run: Run, rank: int | None) -> tuple[str | None, float | None]:
    """Return on which host a rank ended and when, as its agent has recorded it; without an agent the host alone."""
    attempt = run.attempt_folder
    events = [event for folder in attempt.glob("node-*") for event in read_events(folder / contract.AGENT_EVENTS)]
    ends = [event for event in events if event.kind == contract.RANK_EXITED and event.rank == rank]
    if ends:  # One for each restart.
        last = max(ends, key=lambda event: float(event.fields["ended"]))
        return last.host, last.fields["ended"]
    hosts = dict(enumerate(tail(attempt / contract.HOSTS)))
    logs = attempt.glob(f"node-*/{contract.rank_log(rank, 'err')}") if rank is not None else ()
    return next((hosts.get(int(log.parent.name.removeprefix("node-"))) for log in logs), None), None


def of_files(paths: Sequence[Path]) -> Diagnosis | None:
    """Return the verdict on logs, which may be directories of them; None if nothing tells of a failure.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    files = [file for path in paths for file in _within(path)]
    return judge(_logs(files))


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


def _logs(paths: Sequence[Path]) -> Iterator[Log]:
    most = min(_MOST, max(_LEAST, _BUDGET // max(1, len(paths))))
    for path in paths:
        named = _RANK_IN_NAME.search(path.as_posix())
        rank = next((int(group) for group in named.groups() if group), None) if named else None
        try:
            yield read(path, most, rank)
        except OSError as error:
            raise RunFolderError(f"cannot read {path}", why=error.strerror) from error
