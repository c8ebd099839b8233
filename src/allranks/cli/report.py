"""``allranks report``: one HTML file that explains runs."""

from __future__ import annotations

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
@folder_option
@json_option
def command(names: tuple[str, ...], output: str, folder: str | None, as_json: bool) -> int:
    """Write a report on a run, or on several beside each other, as one HTML file: the newest here, or RUN.

    It shows how it ended and why, where the time went, speed and scaling, curves of all metrics, nodes and settings.
    The file needs no network and no other file, so it can be mailed.
    """
    from allranks.view.report import to_data, to_page

    runs = find_each(folder, names or (None,))
    data = to_data([read(run) for run in runs])
    if as_json:
        render.as_json(data)
    elif output == "-":
        render.data(to_page(data))
    else:
        _write(Path(output), to_page(data))
        render.talk(f"allranks: report on {', '.join(run.record.id for run in runs)}: {output}")
    return 0


def _write(path: Path, page: str) -> None:
    try:
        if path.is_file() and not path.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
            raise UsageError(f"{path} is left as it is", why="it is not a report of allranks", fix="give another -o")
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise AllranksError(f"cannot write {path}", why=error.strerror) from error
