"""``allranks report``: one HTML file that explains runs."""

from __future__ import annotations

import gc
from pathlib import Path

import click

from allranks.cli import render
from allranks.cli.runs import complete_run, find_each, folder_option, json_option
from allranks.errors import AllranksError, UsageError
from allranks.runs.comparison import read

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
def command(names: tuple[str, ...], output: str, trace: str | None, folder: str | None, as_json: bool) -> int:
    """Write a report on a run, or on several beside each other, as one HTML file: the newest here, or RUN.

    It shows how it ended and why, where the time went, speed and scaling, curves of all metrics, nodes and settings.
    The file needs no network and no other file, so it can be mailed. With --trace the attempts, ranks, restarts and
    checkpoints of each node go to a JSON file, which https://ui.perfetto.dev and chrome://tracing open.
    """
    gc.disable()  # It would go over all that is read again and again, which takes a third of the time.
    runs = find_each(folder, names or (None,))
    if trace is not None:
        from allranks.view.timeline import MARK, to_trace

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
