"""Where the ranks of a run stand: their agents are asked for stacks, which are read and grouped."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from allranks import contract
from allranks.errors import RunFolderError
from allranks.record.events import read_events
from allranks.record.files import unwritable
from allranks.runs.record import Run

_POLL_SECONDS = 0.1
#: A dump is written in milliseconds: one that has not grown for so long is whole.
_QUIET_SECONDS = 0.3
_THREAD = re.compile(r"(?:(Current) thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):$")
_OURS = re.compile(r"/allranks/agent/workers/script\.py$")
_FRAME = re.compile(r'  File "([^"]+)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class RankStack:
    """The stack of a rank's main thread, innermost frame first, and the number of its other threads."""

    rank: int
    node: int
    frames: tuple[Frame, ...]
    threads: int


@dataclass(frozen=True)
class Stacks:
    """The stacks of a run's ranks, at one time.

    Attributes:
        ranks: by rank.
        silent: nodes whose agents have not answered.
        without: ranks that cannot show stacks: interpreters of their own, and other programs.
    """

    ranks: tuple[RankStack, ...]
    silent: tuple[int, ...]
    without: tuple[int, ...]


def ask(run: Run, seconds: float) -> Stacks:
    """Ask all agents of a run's newest attempt for the stacks of their ranks, and wait for them for so long.

    Raises:
        RunFolderError: the run's directory cannot be written.
    """
    nodes = {folder: _ranks(folder) for folder in sorted(run.attempt_folder.glob("node-*"))}
    logs = {folder / contract.rank_stacks(rank): rank for folder, ranks in nodes.items() for rank in ranks.values()}
    before = {log: _size(log) for log in logs}
    request = run.attempt_folder / contract.STACKS_REQUEST
    try:
        request.touch(0o600)
        wanted = request.stat().st_mtime_ns
    except OSError as error:
        raise unwritable(request, error) from error
    deadline = time.monotonic() + seconds
    answers: dict[Path, set[int]] = {}
    while len(answers) < len(nodes) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        answers |= {folder: pids for folder in nodes if (pids := _answer(folder, wanted)) is not None}
    _await_quiet(list(logs), deadline)
    found, without = [], []
    for folder, pids in answers.items():
        for pid, rank in nodes[folder].items():
            log = folder / contract.rank_stacks(rank)
            dump = _since(log, before[log]) if pid in pids else ""
            if dump:
                found.append(parse(dump, rank, int(folder.name.removeprefix("node-"))))
            else:
                without.append(rank)
    silent = tuple(int(folder.name.removeprefix("node-")) for folder in nodes if folder not in answers)
    return Stacks(tuple(sorted(found, key=lambda each: each.rank)), silent, tuple(sorted(without)))


def parse(dump: str, rank: int, node: int) -> RankStack:
    """Return a rank's stack from what faulthandler wrote; the signal comes to the main thread."""
    frames: list[Frame] = []
    threads, is_main = 0, False
    for line in dump.splitlines():
        if thread := _THREAD.match(line):
            threads, is_main = threads + 1, bool(thread[1])
        elif is_main and (frame := _FRAME.match(line)):
            is_main = not _OURS.search(frame[1])  # Below the script is what has started it.
            frames += [Frame(frame[1], int(frame[2]), frame[3])] if is_main else []
    return RankStack(rank, node, tuple(frames), max(0, threads - 1))


def groups(ranks: tuple[RankStack, ...]) -> list[tuple[list[int], RankStack]]:
    """Return the ranks that stand at the same place, with the stack of one of them; the fewest first."""
    found: dict[tuple[Frame, ...], list[RankStack]] = {}
    for each in ranks:
        found.setdefault(each.frames, []).append(each)
    grouped = [([each.rank for each in same], same[0]) for same in found.values()]
    return sorted(grouped, key=lambda group: (len(group[0]), group[0]))


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
    return {*answer["pids"]} if answer["request"] == wanted else None


def _await_quiet(logs: list[Path], deadline: float) -> None:
    sizes, since = [*map(_size, logs)], time.monotonic()
    while time.monotonic() < min(since + _QUIET_SECONDS, deadline):
        time.sleep(_POLL_SECONDS)
        if (now := [*map(_size, logs)]) != sizes:
            sizes, since = now, time.monotonic()


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
