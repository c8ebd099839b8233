"""``allranks shell``: a shell on nodes that a scheduler is asked for."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from allranks.cli import render
from allranks.cli.options import JobCommand, add_options, load, script_args
from allranks.errors import LaunchError, UsageError
from allranks.job.options import OPTIONS

#: Of a batch job only: a shell has no log, no tasks of an array, and a person who sees its end.
_NOT_FOR_A_SHELL = ("scheduler.array", "scheduler.output", "scheduler.error")


def _shell_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        option
        for option in OPTIONS
        if option.path in ("name", "cluster")
        or (option.path.startswith(("resources.", "scheduler.")) and option.path not in _NOT_FOR_A_SHELL)
    ]
    return click.argument("target", metavar="[JOB.YAML]", required=False)(add_options(function, options))


@click.command("shell", cls=JobCommand, options_metavar="[OPTIONS]")
@_shell_options
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> NoReturn:
    """Wait for nodes of a cluster, and open a shell on the first of them.

    A job file (default: job.yaml here, if there is one) and the options say what to ask for, as for allranks run;
    in the shell, allranks run uses these nodes at once. What follows -- runs instead of the shell:

    \b
    allranks shell --on lab --nodes 2 --gpus-per-node 4 --time 1h
    allranks shell --on lab job.yaml -- nvidia-smi

    Ends with the shell's exit code, and gives the nodes back; Ctrl-C while it waits gives up.
    """
    from allranks.clusters.registry import kind_for

    target, words = values["target"], script_args(ctx)
    if target is not None and not target.endswith((".yaml", ".yml")):
        raise UsageError(f"{target} is not a job file", fix=f"what runs there follows --: -- {shlex.quote(target)} ...")
    loaded = load(ctx, values, needs_target=False)
    kind = kind_for(loaded, os.environ)
    asking = kind.shell_command(loaded.job, words, os.environ, terminal=sys.stdin.isatty())
    kind.reach(os.environ)
    render.talk(f"allranks: {shlex.join(asking)}")
    try:
        os.execvp(asking[0], asking)  # It takes the place of this command: its terminal, signals and exit code.
    except OSError as error:
        fix = f"run this where {asking[0]} is in PATH, such as the cluster's login node"
        raise LaunchError(f"{asking[0]} cannot be started", why=error.strerror, fix=fix) from error
