"""``allranks logs``: the output of a run's ranks, merged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import click

from allranks.cli.live import Live
from allranks.cli.runs import run_arguments, runs_folder
from allranks.errors import UsageError
from allranks.runs.merge import MergedLogs
from allranks.runs.record import Run, find

_STATUS_SECONDS = 0.2
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


@click.command("logs")
@run_arguments
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", "-r", "ranks", multiple=True, metavar="N", help="Only this rank; may be given several times.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="Only this node; may be given several times.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
def command(
    run: str | None,
    runs_folder_: str | None,
    follow: bool,
    ranks: tuple[str, ...],
    nodes: tuple[str, ...],
    tail: int | None,
) -> int:
    """Show the output of a run's ranks, in the order in which it came.

    RUN is the run's id, the beginning of it, or its folder; default: the newest here.
    """
    found = find(runs_folder(runs_folder_), run)
    live = Live()
    merged = live.merge(
        found,
        ranks=_numbers("--rank", ranks, found.record.world_size),
        nodes=_numbers("--node", nodes, found.record.nnodes),
        tail=tail,
    )
    if not follow:
        merged.finish()
        live.end_tail(merged)
    else:
        _follow(found, live, merged)
    live.check()
    return 0


def _follow(run: Run, live: Live, merged: MergedLogs) -> None:
    from allranks.runs.follow import follow

    def step(action: Callable[[], None]) -> None:
        action()
        live.draw(merged)
        live.check()

    merged.pump()
    live.end_tail(merged)
    try:
        follow(merged, _Ended(run), time.sleep, around=step)
    finally:
        live.wipe()


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
    """Tells whether a run has ended; looks at its record only now and then."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next = 0.0
        self._ended = False

    def __call__(self) -> bool:
        from allranks.clusters.settle import settled

        if not self._ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _STATUS_SECONDS
            self._run = settled(self._run)
            self._ended = self._run.record.status.state.is_final
        return self._ended
