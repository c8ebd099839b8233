"""Options of the command line, made from the table in ``job.options``, and what they add up to."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks import contract
from allranks.cli import render
from allranks.cli.runs import runs_folder
from allranks.errors import UsageError
from allranks.job.options import OPTIONS, Option

if TYPE_CHECKING:
    from allranks.clusters.launch import Launch
    from allranks.job.load import LoadedJob

_JOB_FILE = "job.yaml"
_SCRIPT_ARGS = "allranks.script_args"
#: Key of ``ctx.meta`` for the words of a verb as they were typed.
TYPED = "allranks.typed"


class Seconds(click.FloatRange):
    """A number of seconds, up to a week: nobody waits for ever, or until no number."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=7 * 24 * 3600)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it; nan is within every range."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return seconds


def quick_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--quick`` and ``--full`` to a verb that checks."""
    text = "What takes seconds (the default), or all there is."
    return click.option("--quick/--full", "is_quick", default=True, help=text)(function)


def timeout_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--timeout`` to a verb that has ranks try what ranks do."""
    text = "How long ranks wait for each other, to meet and in each operation."
    return click.option("--timeout", metavar="SECONDS", type=Seconds(1), default=120, show_default=True, help=text)(
        function
    )


class JobCommand(click.Command):
    """A verb that takes a job: what follows ``--`` is the script's, whatever it looks like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the script's arguments aside, then parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_SCRIPT_ARGS] = tuple(args[at + 1 :])
            args = args[:at]
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        from allranks.cli.help_groups import sections

        for title, rows in sections(ctx, self.get_params(ctx)):
            with formatter.section(title):
                formatter.write_dl(rows)


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the target and all options of a job to a verb."""
    function = add_options(function, OPTIONS)
    function = click.option("--binary", metavar="PROGRAM", help="Run a program that is not a Python script.")(function)
    function = click.option("-m", "--module", metavar="NAME", help="Run a Python module, as python -m does.")(function)
    return click.argument("target", required=False, type=click.Path())(function)


def add_options(function: Callable[..., Any], options: Sequence[Option]) -> Callable[..., Any]:
    """Add options of a job to a verb."""
    for option in reversed(options):
        function = _click_option(option)(function)
    return function


def _click_option(option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = list(option.flags)
    if option.off_flag:
        names[0] = f"{names[0]}/{option.off_flag}"
    if option.is_flag:
        return click.option(*names, _key(option), is_flag=True, default=None, help=option.help)
    return click.option(
        *names,
        _key(option),
        metavar=option.metavar,
        multiple=option.multiple,
        default=None,
        help=option.help,
        shell_complete=partial(_complete, option),
    )


def _complete(option: Option, ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the words that an option takes, where it takes some: those of its help, or the names of clusters."""
    if option.path == "cluster":
        from allranks.job.load import cluster_names

        words = cluster_names(Path.cwd(), os.environ)
    else:
        words = [word for word in option.metavar.split("|") if "|" in option.metavar and word.islower()]
    return [word for word in words if word.startswith(incomplete)]


def _key(option: Option) -> str:
    return "option_" + option.path.replace(".", "__")


def script_args(ctx: click.Context) -> tuple[str, ...]:
    """Return the words that were typed after ``--``."""
    words: tuple[str, ...] = ctx.meta.get(_SCRIPT_ARGS, ())
    return words


def load(ctx: click.Context, values: dict[str, Any], *, needs_target: bool = True) -> LoadedJob:
    """Load the job that a verb was called with; unless ``needs_target``, it need not say what to run.

    Raises:
        JobError: something about it is wrong.
    """
    from allranks.job.load import load_job

    _note_variables()
    flags = flag_values(values)
    _take_hosts(flags)
    target = _target(values, flags)
    if _SCRIPT_ARGS in ctx.meta:
        flags["args"] = ctx.meta[_SCRIPT_ARGS]
    return load_job(target, flags=flags, environ=os.environ, cwd=Path.cwd(), needs_target=needs_target)


def _note_variables() -> None:
    """Note variables that look like ours, which nothing reads."""
    from allranks.job.variables import misspelt

    for name, near in misspelt(os.environ):
        render.talk(f"allranks: note: nothing reads {name}; did you mean {near}?")


def flag_values(values: dict[str, Any]) -> dict[str, object]:
    """Return the values of the options that were typed, by their place in the job."""
    return {option.path: value for option in OPTIONS if (value := values.get(_key(option))) not in (None, ())}


def _take_hosts(flags: dict[str, object]) -> None:
    """Let names of machines stand where the number of nodes does: they are the nodes, all of them."""
    from allranks.job.hosts import look_like_hosts, parse_hosts

    asked = str(flags.get("resources.nodes", ""))
    if look_like_hosts(asked):
        try:
            flags["resources.nodes"] = len(parse_hosts([asked]))
        except ValueError as error:
            raise UsageError(f"--nodes: {error}", fix="a number, 2:4, gpu1,gpu2, gpu[1-3] or ada@gpu7:2222") from error
        flags["resources.hosts"] = asked


def _target(values: dict[str, Any], flags: dict[str, object]) -> Path | None:
    """Note what is to run among the flags, or return the job file that says it."""
    for kind in ("module", "binary"):
        if values.get(kind):
            flags[kind] = values[kind]
    target = values["target"]
    if target is None:
        default = Path(_JOB_FILE)
        return default if default.is_file() and not (values.get("module") or values.get("binary")) else None
    if target.endswith((".yaml", ".yml")):
        return Path(target)
    flags["script"] = target
    return None


def launch_of(loaded: LoadedJob) -> Launch:
    """Return what is launched for a loaded job."""
    from allranks.clusters.launch import Launch
    from allranks.job.dump import dump_yaml
    from allranks.job.secrets import redacted

    return Launch(
        loaded.job,
        dump_yaml(redacted(loaded.job)),
        loaded.folder,
        runs_folder(loaded.job.runs.folder),
        contract.undecided(os.environ),
    )
