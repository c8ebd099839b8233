"""Where the ranks of a run stand: their agents are asked for stacks, which are read."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.errors import RunFolderError
from allranks.record.events import read_events
from allranks.record.files import unwritable
from allranks.record.stacks import RankStack, parse
from allranks.runs.record import Run

_POLL_SECONDS = 0.1
#: A dump is written in milliseconds: one that has not grown for so long is whole.
_QUIET_SECONDS = 0.3


@dataclass(frozen=True)
class Stacks:
    """The stacks of a run's ranks, at one time.

    Attributes:
        ranks: by rank.
        late: ranks that were asked and have written nothing: the kernel holds them, as on a dead file server.
        without: ranks that cannot show stacks: interpreters of their own, and other programs.
        silent: nodes whose agents have not answered.
    """

    ranks: tuple[RankStack, ...]
    late: tuple[int, ...]
    without: tuple[int, ...]
    silent: tuple[int, ...]


def ask(run: Run, seconds: float) -> Stacks:
    """Ask all agents of a run's newest attempt for the stacks of their ranks, and wait for them for so long.

    Raises:
        RunFolderError: the run's directory cannot be written.
    """
    nodes = sorted(run.attempt_folder.glob("node-*"))
    before = {log: _size(log) for folder in nodes for log in folder.glob(f"*{contract.STACKS_SUFFIX}")}
    wanted, deadline = _request(run.attempt_folder / contract.STACKS_REQUEST), time.monotonic() + seconds
    answers: dict[Path, set[int]] = {}
    while len(answers) < len(nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        answers |= {folder: pids for folder in nodes if (pids := _answer(folder, wanted)) is not None}
    asked: dict[Path, tuple[int, int]] = {}
    without = []
    for folder, pids in answers.items():
        for pid, rank in _ranks(folder).items():
            if pid in pids:
                asked[folder / contract.rank_stacks(rank)] = (rank, _number(folder))
            else:
                without.append(rank)
    dumps = _dumps({log: before.get(log, 0) for log in asked}, deadline)
    found = [parse(dump, *asked[log]) for log, dump in dumps.items()]
    late = [rank for log, (rank, _) in asked.items() if log not in dumps]
    silent = [_number(folder) for folder in nodes if folder not in answers]
    return Stacks(
        tuple(sorted(found, key=lambda each: each.rank)), tuple(sorted(late)), tuple(sorted(without)), tuple(silent)
    )


def _request(path: Path) -> int:
    """Write a request, and return what identifies it."""
    try:
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.touch(0o600)
        now = max(time.time_ns(), before + 1_000_000_000)  # Some file systems keep whole seconds.
        os.utime(path, ns=(now, now))
        return path.stat().st_mtime_ns
    except OSError as error:
        raise unwritable(path, error) from error


def _dumps(logs: dict[Path, int], deadline: float) -> dict[Path, str]:
    """Return what ranks have written behind the sizes that their files had, once all of them are whole."""
    sizes: dict[Path, int] = {}
    since = time.monotonic()
    while time.monotonic() < deadline:
        now = {log: _size(log) for log in logs}
        if now != sizes:
            sizes, since = now, time.monotonic()
        elif time.monotonic() > since + _QUIET_SECONDS and all(now[log] > start for log, start in logs.items()):
            break
        time.sleep(_POLL_SECONDS)
    return {log: dump for log, start in logs.items() if (dump := _since(log, start))}


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("node-"))


def _ranks(folder: Path) -> dict[int, int]:
    """Return the ranks that a node has started last, by their process ids."""
    found: dict[int, int] = {}
    for event in read_events(folder / contract.AGENT_EVENTS):
        if event.kind == contract.RANKS_STARTED:
            found = {each["pid"]: each["rank"] for each in event.fields["ranks"]}
        elif event.kind == contract.RANK_EXITED:
            found.pop(event.fields["pid"], None)
    return found


def _answer(folder: Path, wanted: int) -> set[int] | None:
    """Return the processes to which a node's agent has passed a request on; None if it has not yet."""
    try:
        answer = json.loads((folder / contract.STACKS).read_text())
    except (OSError, ValueError):
        return None
    return {*answer["pids"]} if answer["request"] >= wanted else None


def _size(log: Path) -> int:
    try:
        return log.stat().st_size
    except OSError:
        return 0


def _since(log: Path, start: int) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            return stream.read().decode(errors="replace")
    except OSError as error:
        raise RunFolderError(f"cannot read {log}", why=error.strerror) from error
