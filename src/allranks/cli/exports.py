"""Verbs that write runs for other programs: ``allranks metrics`` and ``report``."""

from __future__ import annotations

from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import complete_run, find_each, find_unfinished, folder_option, json_option
from allranks.errors import AllranksError, RunFolderError, UsageError


@click.command("metrics")
@click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=complete_run)
@click.option("-o", "--output", metavar="FILE", help="File to replace, for the node exporter: it ends with .prom.")
@folder_option
def metrics(names: tuple[str, ...], output: str | None, folder: str | None) -> int:
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


#: How a report starts: a file that does not is somebody's own, and stays.
_MARK = "<!doctype html>\n<!-- allranks report"


@click.command("report")
@click.argument("names", nargs=-1, metavar="[RUN...]", shell_complete=complete_run)
@click.option(
    "-o", "--output", metavar="FILE", default="report.html", show_default=True, help="File to write; - is stdout."
)
@click.option("--trace", metavar="FILE", help="Write the timeline for Perfetto instead; - is stdout.")
@folder_option
@json_option
def report(names: tuple[str, ...], output: str, trace: str | None, folder: str | None, as_json: bool) -> int:
    """Write a report on a run, or on several beside each other, as one HTML file: the newest here, or RUN.

    It shows how it ended and why, where the time went, speed and scaling, curves of all metrics, nodes and settings.
    The file needs no network and no other file, so it can be mailed. With --trace the attempts, ranks, restarts and
    checkpoints of each node go to a JSON file, which https://ui.perfetto.dev and chrome://tracing open.
    """
    import gc

    from allranks.runs.comparison import read

    gc.disable()  # It would go over all that is read again and again, which takes a third of the time.
    runs = find_each(folder, names or (None,))
    if trace is not None:
        from allranks.view.trace import MARK, to_trace

        what, output, mark, text = "timeline of", trace, MARK, to_trace(runs)
    else:
        from allranks.view.report import to_data, to_page

        data = to_data([read(run) for run in runs])
        if as_json:
            render.as_json(data)
            return 0
        what, mark, text = "report on", _MARK, to_page(data)
    if output == "-":
        render.data(text)
    else:
        _write(Path(output), f"{text.rstrip()}\n", mark)
        render.talk(f"allranks: {what} {', '.join(run.record.id for run in runs)}: {output}")
    return 0


def _write(path: Path, text: str, mark: str) -> None:
    """Write a file; one that is there and does not start with the mark of its kind stays."""
    try:
        if path.is_file() and not path.read_text(encoding="utf-8", errors="replace").startswith(mark):
            why = "it was not written by allranks report"
            raise UsageError(f"{path} is left as it is", why=why, fix="another file name")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "another path, that you may write to"
        raise AllranksError(f"cannot write {path}", why=error.strerror, fix=fix) from error
