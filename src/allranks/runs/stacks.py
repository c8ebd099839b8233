"""Where the ranks of a run stand: their agents are asked for stacks, which are read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from allranks import contract
from allranks.record.events import read_events
from allranks.record.files import read_failure, unwritable
from allranks.record.stacks import COLLECTIVE, RankStack, parse
from allranks.runs.record import Run

_POLL_SECONDS = 0.1
#: A dump is written in milliseconds: one that has not grown for so long is whole.
_QUIET_SECONDS = 0.3
#: A rank that holds the interpreter's lock for so long is shown without its collective.
_RECORDER_SECONDS = 5.0


@dataclass(frozen=True)
class Stacks:
    """The stacks of a run's ranks, at one time.

    Attributes:
        ranks: by rank.
        late: ranks that were asked and have written nothing.
        without: ranks that cannot show stacks: interpreters of their own, and other programs.
        silent: nodes whose agents have not answered.
        states: of late ranks that take no signal: ``stopped``, ``traced``, or ``held`` by the kernel.
    """

    ranks: tuple[RankStack, ...]
    late: tuple[int, ...]
    without: tuple[int, ...]
    silent: tuple[int, ...]
    states: dict[int, str] = field(default_factory=dict)


def ask(run: Run, seconds: float) -> Stacks:
    """Ask all agents of a run's newest attempt for the stacks of their ranks, and wait for them for so long.

    Raises:
        RunFolderError: the run's directory cannot be written.
    """
    nodes = sorted(run.attempt_folder.glob("node-*"))
    before = {log: _size(log) for folder in nodes for log in folder.glob(f"*{contract.STACKS_SUFFIX}")}
    wanted, deadline = _request(run.attempt_folder / contract.STACKS_REQUEST), time.monotonic() + seconds
    answers: dict[Path, dict[str, Any]] = {}
    while len(answers) < len(nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        answers |= {folder: pids for folder in nodes if (pids := _answer(folder, wanted)) is not None}
    asked, without = dict[Path, _Asked](), list[int]()
    for folder, pids in answers.items():
        for pid, rank in _ranks(folder).items():
            if not (answer := pids.get(str(pid))):
                continue  # It was started after the request.
            if answer["stack"]:
                log = folder / contract.rank_stacks(rank)
                asked[log] = _Asked(rank, _number(folder), before.get(log, 0), answer["state"], answer["recorder"])
            else:
                without.append(rank)
    _await_dumps(asked, deadline)
    stacks, late = dict[int, RankStack](), dict[int, str]()
    for log, each in asked.items():
        if stack := parse(_since(log, each.start), each.rank, each.node):
            stacks[each.rank] = stack
        else:
            late[each.rank] = each.state
    return Stacks(
        tuple(stacks[rank] for rank in sorted(stacks)),
        tuple(sorted(late)),
        tuple(sorted(without)),
        tuple(_number(folder) for folder in nodes if folder not in answers),
        {rank: late[rank] for rank in sorted(late) if late[rank]},
    )


class _Asked(NamedTuple):
    """A rank that was asked for its stack: what its file had before, whether it takes no signal, and has a recorder."""

    rank: int
    node: int
    start: int
    state: str
    has_recorder: bool


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


def _await_dumps(asked: Mapping[Path, _Asked], deadline: float) -> None:
    """Wait until what ranks write to their files is whole; those that take no signal write nothing."""
    react = {log: each for log, each in asked.items() if not each.state}
    sizes: dict[Path, int] = {}
    since = time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (found := {log: _size(log) for log in asked}) != sizes:
            sizes, since = found, now
        elif now > since + _QUIET_SECONDS and all(sizes[log] > each.start for log, each in react.items()):
            recorders = ((log, each.start) for log, each in react.items() if each.has_recorder)
            if now > since + _RECORDER_SECONDS or all(COLLECTIVE in _since(log, start) for log, start in recorders):
                return
        time.sleep(_POLL_SECONDS)


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


def _answer(folder: Path, wanted: int) -> dict[str, Any] | None:
    """Return the processes of a node's ranks, to which its agent has passed a request on; None if it has not yet."""
    try:
        answer = json.loads((folder / contract.STACKS).read_text())
    except (OSError, ValueError):
        return None
    return dict(answer["pids"]) if answer["request"] >= wanted else None


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
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise read_failure(log, error) from error
