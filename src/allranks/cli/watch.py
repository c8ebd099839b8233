"""``allranks watch``: runs live, on the full screen of a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import complete_run, find_unfinished, folder_option, runs_folder
from allranks.errors import UsageError
from allranks.runs.record import find, run_ids


@click.command("watch")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_run)
@click.option("--all", "show_all", is_flag=True, help="List all runs here, the newest first.")
@folder_option
def command(runs: tuple[str, ...], folder: str | None, show_all: bool) -> int:
    """Watch a run live on the full screen: the newest here that has not ended, or RUN; several as a list.

    It shows progress, metrics, nodes, events and the log. The keys stand at the bottom. After q the run continues.
    """
    if runs and show_all:
        raise UsageError("--all and RUN exclude each other", fix="allranks watch --all")
    if not (render.is_lively(sys.stdout) and sys.stdin and sys.stdin.isatty()):
        why = "stdin or stdout is not a terminal, or TERM is dumb"
        raise UsageError("watch needs a terminal", why=why, fix="allranks logs -f, or allranks status --json")
    where = runs_folder(folder)
    if len(runs) > 1:
        found = [*dict.fromkeys(find(where, name).folder for name in runs)]
        return _list(lambda: found)
    if show_all:
        return _list(lambda: [where / run_id for run_id in reversed(run_ids(where))])
    run = find_unfinished(folder, runs[0] if runs else None)
    from allranks.cli.screen import Screen

    with Screen() as screen:
        return screen.watch(run)


def _list(find_all: Callable[[], Sequence[Path]]) -> int:
    from allranks.cli.screen import Screen

    with Screen() as screen:
        return screen.watch_all(find_all)
