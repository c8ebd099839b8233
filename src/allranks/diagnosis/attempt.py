"""The verdict on an attempt, from its directory: what the supervisor of a batch job can have on its node too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from allranks import contract
from allranks.diagnosis.certainty import OF_THE_SCRIPT
from allranks.diagnosis.model import Diagnosis, Level
from allranks.diagnosis.rules import RULES, gpu
from allranks.diagnosis.text import Log, read
from allranks.diagnosis.verdict import judge
from allranks.errors import RunFolderError
from allranks.logs.cause import tail
from allranks.record.events import read_events

#: Bytes of all logs together that are read.
_BUDGET = 1 << 25
#: Bytes of each file that are read at least, and at most.
_LEAST, _MOST = 1 << 15, 1 << 23
#: A rank in a log's name: of ours, of torchrun --log-dir (``attempt_0/3/stderr.log``), and as people name them.
_RANK_IN_NAME = re.compile(
    r"rank[-_.]?(\d+)|(?:^|/)(\d+)/(?:stdout|stderr|error)\.(?:log|json)$|[-_.](?:task|t)(\d+)[-_.]"
)
#: What a launcher says of a rank that has ended: the agents' own report says more.
LAUNCHER = "launcher-report"
_RULES = {rule.id: rule for rule in RULES}
#: Failures of GPUs, and what their nodes say of those.
_OF_GPUS = frozenset(rule.id for rule in gpu.RULES) | {"cuda-out-of-memory", "cuda-memory-of-others"}
_OF_A_GPU = re.compile(r"GPU \S+: ")


def of_attempt(
    attempt: Path, files: Sequence[Path], rank: int | None = None, reported: Sequence[str] = ()
) -> Diagnosis | None:
    """Return the verdict on an attempt; None if nothing in it tells of a failure.

    Args:
        attempt: its directory.
        files: the logs of its ranks, and others that may tell more.
        rank: the rank that failed first, if known: its log is read before those of all others.
        reported: what is known of its end.
    """
    own = [path for path in files if rank is not None and path.stem == f"rank-{rank}"]
    report = Log(contract.RECORD_FILE, reported, rank)
    verdict = None
    for logs in (logs_of(own), [report], logs_of(files)):
        if verdict is None or verdict.sure == "unknown":
            verdict = judge(logs, rank) or verdict
    return _with_facts(verdict, _facts(attempt, rank))


def logs_in(attempt: Path) -> list[Path]:
    """Return the logs of an attempt's ranks."""
    return sorted(path for path in attempt.glob("node-*/*") if path.suffix in (".err", ".out", ".log"))


def end_of(attempt: Path, rank: int | None) -> tuple[str | None, float | None]:
    """Return on which host a rank ended and when, as its agent has recorded it; without an agent the host alone."""
    events = [event for folder in attempt.glob("node-*") for event in read_events(folder / contract.AGENT_EVENTS)]
    ends = [event for event in events if event.kind == contract.RANK_EXITED and event.rank == rank]
    if ends:  # One for each restart.
        last = max(ends, key=lambda event: float(event.fields["ended"]))
        return last.host, last.fields["ended"]
    hosts = dict(enumerate(tail(attempt / contract.HOSTS)))
    logs = attempt.glob(f"node-*/{contract.rank_log(rank, 'err')}") if rank is not None else ()
    return next((hosts.get(int(log.parent.name.removeprefix("node-"))) for log in logs), None), None


def _facts(attempt: Path, rank: int | None) -> Log:
    """Return what the node of a rank has recorded of its failure."""
    for path in attempt.glob(f"node-*/{contract.AGENT_EVENTS}"):
        lines: list[str] = []
        ranks: set[int] = set()
        for event in read_events(path):
            if event.kind == contract.RANKS_STARTED:  # What is before it is of an earlier failure.
                lines, ranks = [], {each["rank"] for each in event.fields.get("ranks", ())}  # None: without our agent.
            elif event.kind == contract.NODE_FACTS:
                lines += event.fields["lines"]
        if lines and rank in ranks:
            return Log(str(path), lines, rank)
    return Log("", [])


def _with_facts(verdict: Diagnosis | None, facts: Log) -> Diagnosis | None:
    """Return the verdict on what ranks wrote, or a better one by what the node knows.

    A fact may have nothing to do with the failure: it replaces neither an exception of the script nor a cause that is
    certain, except that a GPU that has failed explains all errors of CUDA.
    """
    if verdict and verdict.id in _OF_GPUS:
        lines = [facts.line(at) for at, text in enumerate(facts.texts) if _OF_A_GPU.match(text)]
        verdict = replace(verdict, evidence=(*verdict.evidence[:1], *lines, *verdict.evidence[1:]))
    found = judge([facts], facts.rank)
    if found is None or verdict is None or found.sure == "unknown":
        return verdict or found
    if verdict.sure == "unknown":
        return found
    new, old = _RULES[found.id], _RULES[verdict.id]
    is_open = (verdict.sure == "likely" and verdict.id not in OF_THE_SCRIPT) or (
        verdict.id in _OF_GPUS and new.level is Level.OUTSIDE
    )
    if is_open and (new.level < old.level or new is old or old.id in new.explains):
        return replace(found, evidence=(*found.evidence[:1], *verdict.evidence), followed=verdict.followed)
    return verdict


def logs_of(paths: Sequence[Path]) -> Iterator[Log]:
    """Yield logs one after the other: what was written since the last restart, and as much as all together may have."""
    since = _written_before({path.parent for path in paths})
    most = min(_MOST, max(_LEAST, _BUDGET // max(1, len(paths))))
    for path in paths:
        named = _RANK_IN_NAME.search(path.as_posix())
        rank = next((int(group) for group in named.groups() if group), None) if named else None
        try:
            yield read(path, most, rank, since.get(path, 0))
        except OSError as error:
            raise RunFolderError(f"cannot read {path}", why=error.strerror) from error


def _written_before(folders: Iterable[Path]) -> dict[Path, int]:
    """Return how much was in the logs of ranks, in their nodes' directories, when their last generation started."""
    found = {}
    for folder in folders:
        for event in read_events(folder / contract.AGENT_EVENTS):
            if event.kind != contract.RANKS_STARTED:
                continue
            for rank in event.fields.get("ranks") or ():  # None: without our agent.
                for stream, size in rank.get("written", {}).items():
                    found[folder / contract.rank_log(rank["rank"], stream)] = int(size)
    return found
