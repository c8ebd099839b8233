"""``allranks metrics``: runs as OpenMetrics text."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import complete_run, find_each, find_unfinished, folder_option
from allranks.errors import AllranksError, RunFolderError, UsageError


@click.command("metrics")
@click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=complete_run)
@click.option("-o", "--output", metavar="FILE", help="File to replace, for the node exporter: it ends with .prom.")
@folder_option
def command(names: tuple[str, ...], output: str | None, folder: str | None) -> int:
    """Write the state, steps, metrics and use of nodes of runs as OpenMetrics text, for Prometheus.

    RUN is by default the newest here that has not ended, or the newest if all have. With -o the text is in the older
    format of Prometheus, and the file is replaced at once, as the textfile collector of the node exporter needs both.
    """
    from allranks.launch.refresh import settled
    from allranks.record.files import write_atomically
    from allranks.view.openmetrics import to_text

    if output is not None and not output.endswith(".prom"):
        fix = "give it a name that ends with .prom"
        raise UsageError(f"-o {output}: the node exporter reads no such file", why="it reads *.prom", fix=fix)
    runs = find_each(folder, names) if names else [settled(find_unfinished(folder, None))]
    if output is None:
        render.data(to_text(runs).rstrip("\n"))
        return 0
    try:
        write_atomically(Path(output), to_text(runs, has_end=False), 0o644)  # The exporter is another user.
    except RunFolderError as error:
        raise AllranksError(error.what, why=error.why, fix="-o in a directory that you may write to") from error
    return 0
