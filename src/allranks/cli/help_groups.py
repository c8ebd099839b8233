"""The groups in which the help shows the options of a job: what matters first, then by subject."""

from __future__ import annotations

from collections.abc import Iterable

import click

#: Titles, and the places in the job of their options, or how these begin: the longest that fits counts.
_GROUPS = (
    (
        "Most used",
        (
            "cluster",
            "resources.nodes",
            "resources.gpus_per_node",
            "resources.time",
            "launch.nproc_per_node",
        ),
    ),
    ("What to run", ("name", "workdir", "module", "binary")),
    ("Ranks", ("launch.",)),
    ("Nodes and network", ("resources.", "launch.master", "launch.interface")),
    ("SSH", ("resources.host", "resources.spares", "launch.attach", "sync.")),
    ("Environment", ("environment.",)),
    ("Slurm and PBS", ("scheduler.", "retry.")),
    ("This command", ("",)),
)


def sections(ctx: click.Context, parameters: Iterable[click.Parameter]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the options of a verb as the help shows them: title, and rows of names and text, in their order."""
    found: dict[str, list[tuple[str, str]]] = {title: [] for title, _ in _GROUPS}
    for parameter in parameters:
        row = parameter.get_help_record(ctx)
        if row and isinstance(parameter, click.Option):
            found[_title(parameter.name or "")].append(row)
    return [(title, rows) for title, rows in found.items() if rows]


def _title(name: str) -> str:
    path = name.removeprefix("option_").replace("__", ".")
    fitting = [(len(start), title) for title, starts in _GROUPS for start in starts if path.startswith(start)]
    return max(fitting)[1]
