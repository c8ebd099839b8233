"""Errors of the command line as ours: what was typed, and what to type instead."""

from __future__ import annotations

import shlex

import click

from allranks.cli.options import TYPED
from allranks.errors import UsageError
from allranks.job.problems import closest

#: Verbs that take a job, and with it arguments of the script.
_TAKES_A_JOB = ("run", "plan")


def from_click(failure: click.ClickException) -> UsageError:
    """Make our error from one of click's, with the way out that fits."""
    message = failure.format_message().rstrip(".").replace("\n", " ")
    what = message[:1].lower() + message[1:]
    if isinstance(failure, click.NoSuchOption):
        what = f"no such option {_as_typed(failure)}"
    return UsageError(what, fix=_fix(failure))


def unknown_verb(word: str, verbs: list[str]) -> UsageError:
    """Make the error for a verb that does not exist."""
    if word.endswith((".py", ".yaml", ".yml")):
        fix = f"allranks run {shlex.quote(word)}"
    elif near := closest(word, verbs):
        fix = f"did you mean allranks {near}?"
    else:
        fix = f"the commands are {', '.join(verbs)}; allranks --help says what they do"
    return UsageError(f"no such command {shlex.quote(word)}", fix=fix)


def _fix(failure: click.ClickException) -> str:
    context = failure.ctx if isinstance(failure, click.UsageError) else None
    path = context.command_path if context else "allranks"
    takes_a_job = bool(context and context.info_name in _TAKES_A_JOB)
    if isinstance(failure, click.NoSuchOption) and context:
        return _of_option(_as_typed(failure), context, takes_a_job)
    if takes_a_job and "extra argument" in failure.message:
        return f"the script's own arguments follow --: {path} train.py -- ..."
    return f"{path} --help"


def _as_typed(failure: click.NoSuchOption) -> str:
    """Return an option with the underscores that were typed: it may be the script's, and spelled so there."""
    typed = failure.ctx.meta.get(TYPED, ()) if failure.ctx else ()
    words = (word.partition("=")[0] for word in typed)
    return next((word for word in words if word.replace("_", "-") == failure.option_name), failure.option_name)


def _of_option(name: str, context: click.Context, takes_a_job: bool) -> str:
    known = [word for parameter in context.command.get_params(context) for word in parameter.opts]
    near = closest(name, [word for word in known if word.startswith("--")])
    meant = f"did you mean {near}?" if near else ""
    if not takes_a_job:
        return meant or f"{context.command_path} --help"
    moved = f"{name} is the script's, put it after --: {context.command_path} ... -- {name}"
    return f"{meant} If {moved}" if meant else f"if {moved}"
