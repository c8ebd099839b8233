"""``allranks logs``: the output of a run's ranks, merged."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from datetime import time as datetime_time
from functools import partial
from itertools import count
from pathlib import Path

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.live import AFTER_LINES, Live, News
from allranks.cli.runs import report_verdict, run_arguments, runs_folder
from allranks.errors import UsageError
from allranks.job.units import parse_duration
from allranks.logs.lineform import LineForm
from allranks.logs.merge import MergedLogs, follow
from allranks.runs.agents import HappenedInJobs
from allranks.runs.hangs import newest
from allranks.runs.record import Run, find

_STATUS_SECONDS = 0.2
#: 9:30, 14:00 or 14:00:30.
_CLOCK = re.compile(r"\d{1,2}:\d{2}(?::\d{2})?", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


@click.command("logs")
@run_arguments
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the run ends.")
@click.option("--rank", "-r", "ranks", multiple=True, metavar="N", help="Only this rank; may be given several times.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="Only this node; may be given several times.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="Only this attempt; 1 is the first.")
@click.option("--tail", "-n", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only lines that came since then: 10min ago, 14:00 (today, or else yesterday), or 2026-01-31T14:00.",
)
@click.option("--grep", metavar="REGEX", help="Only lines that contain a match of this regular expression of Python.")
@click.option("--timestamps", "-t", is_flag=True, help="Put the local time at which it came before each line.")
@click.option("--json", "as_json", is_flag=True, help="Write each line as a JSON object, all to stdout.")
def command(
    run: str | None,
    folder: str | None,
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

    RUN is the run's id, the beginning of it, or its directory; default: the newest here. Of a run with several
    attempts the newest is shown, and with --follow those that come after it.
    """
    try:
        pattern = None if grep is None else re.compile(grep.encode(errors="surrogateescape"))
    except re.error as error:
        why = f"it is not a regular expression: {error}"
        fix = f"for that text itself: --grep {shlex.quote(re.escape(grep or ''))}"
        raise UsageError(f"invalid --grep: {grep!r}", why=why, fix=fix) from error
    form = LineForm(0.0 if since is None else _time(since), pattern, timestamps, as_json)
    found = find(runs_folder(folder), run)
    newest = found.attempt  # Counted from 0, as directories are; people count from 1.
    if attempt is not None and attempt > newest + 1:
        why = f"it has the attempts 1 to {newest + 1}" if newest else "it has only attempt 1"
        raise UsageError(f"--attempt: the run has no attempt {attempt}", why=why, fix="leave it out for the newest")
    first = newest if attempt is None else attempt - 1
    if ranks and any(found.attempt_folder.glob(f"node-*/{contract.rank_log(contract.ALL_OF_A_NODE, 'out')}")):
        why = "torch's own launcher started them, and puts together what they say"
        raise UsageError("--rank: the ranks of this run have no logs of their own", why=why, fix="--node 0")
    there = sum(1 for _ in found.attempt_folder.glob("node-*"))  # Spares, and those that were lost, wrote as well.
    counted = max(there, found.record.nnodes)
    live = Live(form)
    merge = partial(
        live.merge, found, ranks=_numbers("--rank", ranks, found.world_size), nodes=_numbers("--node", nodes, counted)
    )
    if follow:
        ended, news = _Ended(found), News(_from_now_on(found), found, live)
        had_ended = ended()
        for number in count(first):  # A scheduler may start another attempt.
            _follow(live, merge(number, tail=tail if number == first else None), number, ended, news)
            if attempt is not None or found.attempt <= number:
                break
        status = ended.run.record.status
        if status.state.is_final and not had_ended:
            reason = f": {render.one_line(status.reason)}" if status.reason else ""
            render.talk(f"allranks: {found.record.id} ended: {status.state.value}{reason}")
        if status.state.is_final:
            report_verdict(ended.run)
    else:
        if not found.record.status.state.is_final:
            from allranks.clusters.registry import load_kind

            load_kind(found.record.kind).fetch(found)
        merged = merge(first, tail=tail)
        merged.finish()
        live.end_tail(merged)
        if not (found.tasks or _has_output(found.folder / contract.attempt_dir(first))):  # Tasks are not read here.
            from allranks.launch.refresh import settled

            yet = "" if settled(found).record.status.state.is_final else " yet"
            render.talk(f"allranks: note: {found.record.id} has printed nothing{yet}")
    live.check()
    return 0


def _from_now_on(run: Run) -> HappenedInJobs:
    """Return a reader of what happens to a run from now on; a hang that it is in is shown at once."""
    happened = HappenedInJobs(run.folder)
    happened.news()
    if hang := newest(run.attempt_folder):
        render.talk(f"allranks: {run.record.id}: {render.one_line(hang.notice)}")
    return happened


def _has_output(attempt: Path) -> bool:
    """Return whether a rank of an attempt has printed anything, selected or not."""
    return any(log.stat().st_size for stream in ("out", "err") for log in attempt.glob(f"node-*/*.{stream}"))


def _follow(live: Live, merged: MergedLogs, attempt: int, ended: _Ended, news: News) -> None:
    run = ended.run

    def step(action: Callable[[], None]) -> None:
        news.report(AFTER_LINES)
        action()
        live.draw(merged)
        live.check()

    merged.pump()
    live.end_tail(merged)
    try:
        follow(merged, lambda: ended() or run.attempt > attempt, time.sleep, around=step)
        news.report()
    finally:
        live.wipe()


def _time(text: str) -> float:
    """Return the time of ``--since``, in ms since 1970."""
    with suppress(ValueError, OverflowError):
        if text[-1:].isalpha() and not text.endswith("Z"):  # Not 14:00: that would be 14 minutes.
            return (time.time() - parse_duration(text)) * 1000
        if _CLOCK.fullmatch(text):
            return last_time(text, datetime.now()).timestamp() * 1000
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000
    fix = "--since 10min, --since 14:00 or --since 2026-01-31T14:00"
    raise UsageError(f"invalid --since: {text!r}", why="expected a duration or a time", fix=fix)


def last_time(clock: str, now: datetime) -> datetime:
    """Return when a clock showed this last: today, or yesterday if it is later than now."""
    today = datetime.combine(now.date(), datetime_time.fromisoformat(clock.zfill(5)))
    return today if today <= now else today - timedelta(days=1)


def _numbers(flag: str, given: tuple[str, ...], count: int) -> set[int] | None:
    """Return the numbers in ``--rank 0,2-3``, of which the run has ``count``."""
    found: set[int] = set()
    for part in ",".join(given).split(",") if given else ():
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(
                f"{flag}: invalid number: {part!r}", fix=f"{flag} 3, {flag} 0-3 or {flag} 0,2; all without it"
            )
        if last >= count:
            missing = max(first, count)
            what, why = f"{flag}: the run has no {flag[2:]} {missing}", f"it has {count}, counted from 0"
            there = f"0-{count - 1}" if count > 1 else "0"
            raise UsageError(what, why=why, fix=f"{flag} {there}, or leave it out for all")
        found |= set(range(first, last + 1))
    return found or None


class _Ended:
    """Returns whether a run has ended; queries now and then, through one object, which may query less often still.

    Attributes:
        run: with its status as it was last seen.
    """

    def __init__(self, run: Run) -> None:
        from allranks.clusters.registry import load_kind

        self.run, self._kind = run, load_kind(run.record.kind)
        self._next = 0.0
        self._ended = False

    def __call__(self) -> bool:
        from allranks.launch.refresh import settled

        if not self._ended and time.monotonic() >= self._next:
            self._next = time.monotonic() + _STATUS_SECONDS
            self.run = settled(self.run, self._kind)
            self._ended = self.run.record.status.state.is_final
        return self._ended
