"""Requests the stacks of a run's ranks from its agents, and reads them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from allranks import contract
from allranks.record.events import read_events
from allranks.record.files import read_failure, unwritable
from allranks.record.stacks import COLLECTIVE, RankStack, parse
from allranks.runs.record import Run

_POLL_SECONDS = 0.1
#: A dump takes milliseconds to write: one that has not grown for this long is complete.
_QUIET_SECONDS = 0.3
#: A rank that holds the GIL for this long is shown without its collective.
_RECORDER_SECONDS = 5.0


@dataclass(frozen=True)
class Stacks:
    """The stacks of a run's ranks at one time.

    Attributes:
        ranks: the stacks, by rank.
        late: ranks that have not answered the request.
        without: ranks that cannot write stacks: plain interpreters, and other programs.
        silent: nodes whose agents have not answered.
        states: states of late ranks that handle no signal: ``stopped``, ``traced``, or ``held`` by the kernel.
    """

    ranks: tuple[RankStack, ...]
    late: tuple[int, ...]
    without: tuple[int, ...]
    silent: tuple[int, ...]
    states: dict[int, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON has them."""
        return {**asdict(self), "ranks": [stack.to_json() for stack in self.ranks]}


def ask(run: Run, seconds: float) -> Stacks:
    """Request the stacks of all ranks of a run's newest attempt, and wait at most ``seconds`` for them.

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
                continue  # The node started after the request.
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
    """A requested stack: size of the rank's file before, whether the rank handles no signal, and has a recorder."""

    rank: int
    node: int
    start: int
    state: str
    has_recorder: bool


def _request(path: Path) -> int:
    """Write a request, and return its id."""
    try:
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.touch(0o600)
        now = max(time.time_ns(), before + 1_000_000_000)  # Some file systems store whole seconds.
        os.utime(path, ns=(now, now))
        return path.stat().st_mtime_ns
    except OSError as error:
        raise unwritable(path, error) from error


def _await_dumps(asked: Mapping[Path, _Asked], deadline: float) -> None:
    """Wait until the ranks' dumps are complete; ranks that handle no signal write none."""
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
    """Return the ranks of a node's last generation by process id."""
    found: dict[int, int] = {}
    for event in read_events(folder / contract.AGENT_EVENTS):
        if event.kind == contract.RANKS_STARTED:
            found = {each["pid"]: each["rank"] for each in event.fields["ranks"]}
        elif event.kind == contract.RANK_EXITED:
            found.pop(event.fields["pid"], None)
    return found


def _answer(folder: Path, wanted: int) -> dict[str, Any] | None:
    """Return the agent's answer to request ``wanted``; None if there is none yet."""
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
