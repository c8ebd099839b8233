"""``allranks schema``: the JSON Schema of the job file."""

from __future__ import annotations

import click

from allranks.cli import render


@click.command("schema")
def command() -> int:
    """Print the JSON Schema of the job file, for editors."""
    from allranks.job.schema import job_schema

    render.as_json(job_schema())
    return 0
