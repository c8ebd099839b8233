"""``allranks logs``: the output of a run's ranks, merged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count

import click

from allranks import contract
from allranks.cli.live import Live
from allranks.cli.runs import run_arguments, runs_folder
from allranks.errors import UsageError
from allranks.job.units import parse_duration
from allranks.runs.lineform import LineForm
from allranks.runs.merge import MergedLogs
from allranks.runs.record import Run, find

_STATUS_SECONDS = 0.2
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


@click.command("logs")
@run_arguments
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", "-r", "ranks", multiple=True, metavar="N", help="Only this rank; may be given several times.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="Only this node; may be given several times.")
@click.option("--attempt", type=click.IntRange(min=0), metavar="N", help="Only this attempt; 0 is the first.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--since", metavar="TIME", help="Only lines that came since then: 10min ago, or a time as 2026-01-31T14:00."
)
@click.option("--grep", metavar="REGEX", help="Only lines that contain a match of this regular expression of Python.")
@click.option("--timestamps", "-t", is_flag=True, help="Put the local time at which it came before each line.")
@click.option("--json", "as_json", is_flag=True, help="Write each line as a JSON object, all to stdout.")
def command(
    run: str | None,
    runs_folder_: str | None,
    follow: bool,
    ranks: tuple[str, ...],
    nodes: tuple[str, ...],
    attempt: int | None,
    tail: int | None,
    since: str | None,
    grep: str | None,
    timestamps: bool,
    as_json: bool,
) -> int:
    """Show the output of a run's ranks, in the order in which it came.

    RUN is the run's id, the beginning of it, or its folder; default: the newest here. Of a run with several
    attempts the newest is shown, and with --follow those that come after it.
    """
    form = LineForm(
        0.0 if since is None else _time(since), None if grep is None else _pattern(grep), timestamps, as_json
    )
    found = find(runs_folder(runs_folder_), run)
    first = _attempt(found, attempt)
    if ranks and any(found.attempt_folder.glob(f"node-*/{contract.rank_log(contract.ALL_OF_A_NODE, 'out')}")):
        why = "torch's own launcher started them, and puts together what they say"
        raise UsageError("--rank: the ranks of this run have no logs of their own", why=why, fix="--node 0")
    there = sum(1 for _ in found.attempt_folder.glob("node-*"))  # Spares, and those that were lost, wrote as well.
    counted = max(there, found.record.nnodes)
    logs = _Logs(found, _numbers("--rank", ranks, found.world_size), _numbers("--node", nodes, counted), Live(form))
    if follow:
        logs.follow(first, attempt, tail)
    else:
        logs.show(first, tail)
    logs.live.check()
    return 0


def _time(text: str) -> float:
    """Return the time of ``--since``, in ms since 1970.

    Raises:
        UsageError: it is no time.
    """
    with suppress(ValueError, OverflowError):
        if text[-1:].isalpha() and not text.endswith("Z"):  # Not 14:00: that would be 14 minutes.
            return (time.time() - parse_duration(text)) * 1000
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000
    raise UsageError(
        f"invalid --since: {text!r}",
        why="expected a duration or a time",
        fix="--since 10min or --since 2026-01-31T14:00",
    )


def _pattern(text: str) -> re.Pattern[bytes]:
    """Return the pattern of ``--grep``.

    Raises:
        UsageError: it is no regular expression.
    """
    try:
        return re.compile(text.encode(errors="surrogateescape"))
    except re.error as error:
        raise UsageError(f"invalid --grep: {text!r}", why=f"it is not a regular expression: {error}") from error


def _attempt(run: Run, asked: int | None) -> int:
    """Return the number of the attempt to begin with.

    Raises:
        UsageError: the run has no such attempt.
    """
    newest = run.attempt
    if asked is not None and asked > newest:
        why = f"it has the attempts 0 to {newest}" if newest else "it has only attempt 0"
        raise UsageError(f"--attempt: the run has no attempt {asked}", why=why)
    return newest if asked is None else asked


@dataclass(frozen=True)
class _Logs:
    """The logs of a run: of these ranks and nodes, or of all, and where they are shown."""

    run: Run
    ranks: set[int] | None
    nodes: set[int] | None
    live: Live

    def show(self, attempt: int, tail: int | None) -> None:
        """Show what there is of an attempt."""
        from allranks.clusters.registry import load_kind

        if not self.run.record.status.state.is_final:
            load_kind(self.run.record.kind).bring(self.run)
        merged = self._merge(attempt, tail)
        merged.finish()
        self.live.end_tail(merged)

    def follow(self, first: int, last: int | None, tail: int | None) -> None:
        """Show attempts until the last has ended, or else the run has: a scheduler may begin another attempt."""
        ended = _Ended(self.run)
        for attempt in count(first):
            self._follow(self._merge(attempt, tail if attempt == first else None), attempt, ended)
            if attempt == last or self.run.attempt <= attempt:
                break

    def _merge(self, attempt: int, tail: int | None) -> MergedLogs:
        return self.live.merge(self.run, ranks=self.ranks, nodes=self.nodes, tail=tail, attempt=attempt)

    def _follow(self, merged: MergedLogs, attempt: int, ended: Callable[[], bool]) -> None:
        from allranks.runs.follow import follow

        def step(action: Callable[[], None]) -> None:
            action()
            self.live.draw(merged)
            self.live.check()

        merged.pump()
        self.live.end_tail(merged)
        try:
            follow(merged, lambda: ended() or self.run.attempt > attempt, time.sleep, around=step)
        finally:
            self.live.wipe()


def _numbers(flag: str, given: tuple[str, ...], count: int) -> set[int] | None:
    """Return the numbers in ``--rank 0,2-3``.

    Raises:
        UsageError: it is no number, or the run has no such rank or node.
    """
    found: set[int] = set()
    for part in ",".join(given).split(",") if given else ():
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"{flag}: {part!r} is no number", fix=f"{flag} 3, {flag} 0-3 or {flag} 0,2")
        if last >= count:
            missing = max(first, count)
            raise UsageError(f"{flag}: the run has no {flag[2:]} {missing}", why=f"it has {count}, counted from 0")
        found |= set(range(first, last + 1))
    return found or None


class _Ended:
    """Tells whether a run has ended; looks only now and then, and by one object: it may look less often still."""

    def __init__(self, run: Run) -> None:
        from allranks.clusters.registry import load_kind

        self._run, self._kind = run, load_kind(run.record.kind)
        self._next = 0.0
        self._ended = False

    def __call__(self) -> bool:
        from allranks.clusters.settle import settled

        if not self._ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _STATUS_SECONDS
            self._run = settled(self._run, self._kind)
            self._ended = self._run.record.status.state.is_final
        return self._ended
