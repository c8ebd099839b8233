"""``allranks watch``: runs live, on the full screen of a terminal."""

from __future__ import annotations

import sys

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
        named = [*dict.fromkeys(find(where, name).folder for name in runs)]
    elif not show_all:
        run = find_unfinished(folder, runs[0] if runs else None)
    from allranks.cli.screen import Screen

    with Screen() as screen:
        if len(runs) > 1:
            return screen.watch_all(lambda: named)
        if show_all:
            return screen.watch_all(lambda: [where / run_id for run_id in reversed(run_ids(where))])
        return screen.watch(run)
