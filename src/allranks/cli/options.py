"""Options of the command line, made from the table in ``job.options``, and the job that they give."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allranks import contract
from allranks.cli import pasted_command, render
from allranks.cli.runs import runs_folder
from allranks.errors import JobError, UsageError
from allranks.job.options import OPTIONS, TARGETS, Option

if TYPE_CHECKING:
    from allranks.job.load import LoadedJob
    from allranks.launch.submit import Launch

_JOB_FILE = "job.yaml"
_SCRIPT_ARGS = "allranks.script_args"
_LOADED = "allranks.loaded"
_PYDANTIC_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
#: Key of ``ctx.meta`` for the words of a verb as they were typed.
TYPED = "allranks.typed"

#: Titles of the help, and prefixes of the paths of their options: the longest that matches counts.
_GROUPS = (
    ("Most used", ("cluster", "resources.nodes", "resources.gpus_per_node", "resources.time", "launch.nproc_per_node")),
    ("What to run", ("name", "workdir", "module", "binary")),
    ("Ranks", ("launch.",)),
    ("Nodes and network", ("resources.", "launch.master", "launch.interface")),
    ("SSH", ("resources.host", "resources.spares", "launch.attach", "sync.")),
    ("Environment", ("environment.",)),
    ("Schedulers", ("scheduler.", "retry.")),
    ("This command", ("",)),
)


class Seconds(click.FloatRange):
    """A number of seconds, up to a week."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=7 * 24 * 3600)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse nan too, which is within every range."""
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"invalid number of seconds: {value}.", param, ctx)
        return seconds


#: Options of the verbs that check.
quick_option = click.option(
    "--quick/--full", "is_quick", default=True, help="Run the quick checks only (the default), or all."
)
timeout_option = click.option(
    "--timeout",
    metavar="SECONDS",
    type=Seconds(1),
    default=120,
    show_default=True,
    help="Timeout of the rendezvous and of each operation.",
)


class ScriptCommand(click.Command):
    """A verb that takes a script: what follows ``--`` is the script's, whatever it looks like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the script's arguments aside, then parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_SCRIPT_ARGS] = tuple(args[at + 1 :])
            args = args[:at]
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)


class JobCommand(ScriptCommand):
    """A verb that takes a job."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse what is for another launcher, then parse the arguments.

        Raises:
            UsageError: another launcher's command line is given in place of a script.
        """
        if any(parameter.name == "target" for parameter in self.params) and not ctx.resilient_parsing:
            flags = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and each.is_flag]
            at = pasted_command.start_of(args, {word for each in flags for word in (*each.opts, *each.secondary_opts)})
            if at is not None:
                raise pasted_command.error_of(args[at:], ctx.command_path, args[:at])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the verb; an error about a value of a file names the line that gives it."""
        try:
            return super().invoke(ctx)
        except JobError as error:
            raise _placed(error, ctx.meta[_LOADED]) if _LOADED in ctx.meta else error from error.__cause__

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, each with those that it has in their order."""
        titles = {start: title for title, starts in _GROUPS for start in starts}
        found: dict[str, list[tuple[str, str]]] = {title: [] for title, _ in _GROUPS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row and isinstance(parameter, click.Option):
                path = (parameter.name or "").removeprefix("option_").replace("__", ".")
                found[titles[max(filter(path.startswith, titles), key=len)]].append(row)
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _placed(error: JobError, loaded: LoadedJob) -> JobError:
    """Return an error with the line of the file whose value it is about, if a file gives it."""
    key = error.key or error.what.partition(": ")[0]
    source = loaded.sources.get(key)
    if source is None or not source.kind.endswith("file"):
        return error
    return JobError(f"{source.where}: {error.what}", why=error.why, fix=error.fix, see=error.see)


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the target and all options of a job to a verb."""
    function = add_options(function, OPTIONS)
    function = click.option("--binary", metavar="PROGRAM", help="Run a program that is not a Python script.")(function)
    function = click.option("-m", "--module", metavar="NAME", help="Run a Python module, as python -m does.")(function)
    return click.argument("target", required=False, type=click.Path())(function)


def add_options(function: Callable[..., Any], options: Sequence[Option]) -> Callable[..., Any]:
    """Add options of a job to a verb."""
    for option in reversed(options):
        first, *others = option.flags
        names = [f"{first}/{option.off_flag}" if option.off_flag else first, *others, _key(option)]
        takes: dict[str, Any] = {"is_flag": True}
        if not option.is_flag:
            takes = {"metavar": option.metavar, "multiple": option.multiple}
            takes["shell_complete"] = partial(_complete, option)
        function = click.option(*names, default=None, help=option.help, **takes)(function)
    return function


def _complete(option: Option, ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the words of an option's metavar, or the names of clusters, to complete."""
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
    """Load the job that a verb was called with; unless ``needs_target``, it need not say what to run."""
    plugins = os.environ.get(_PYDANTIC_PLUGINS)
    os.environ[_PYDANTIC_PLUGINS] = "__all__"  # Else pydantic reads what every package has installed: 18 ms.
    from allranks.job.load import load_job
    from allranks.job.variables import misspelt

    os.environ.pop(_PYDANTIC_PLUGINS)
    if plugins is not None:
        os.environ[_PYDANTIC_PLUGINS] = plugins
    for name, near in misspelt(os.environ):
        render.talk(f"allranks: note: nothing reads {name}; did you mean {near}?")
    flags = flag_values(values)
    _take_hosts(flags)
    target = _target(values, flags)
    words = script_args(ctx)
    names_nothing = needs_target and target is None and not flags.keys() & {*TARGETS}
    if names_nothing and words and words[0].endswith(".py"):
        what, typed = f"no script is given: what follows -- is passed to it, {shlex.quote(words[0])} too", words[:1]
        raise UsageError(what, fix=f"{ctx.command_path} {shlex.join(typed)}{' -- ...' if words[1:] else ''}")
    if names_nothing and pasted_command.name_of(words):
        raise pasted_command.error_of(words, ctx.command_path, ctx.meta[TYPED])
    if _SCRIPT_ARGS in ctx.meta:
        flags["args"] = ctx.meta[_SCRIPT_ARGS]
    loaded = load_job(
        target,
        flags=flags,
        environ=os.environ,
        cwd=Path.cwd(),
        needs_target=needs_target,
        typed=ctx.meta.get(TYPED, ()),
    )
    ctx.meta[_LOADED] = loaded
    notes = (*_joined_variables(flags), *_joined_words(loaded), *_paths_elsewhere(script_args(ctx), loaded))
    for note in notes:
        render.talk(f"allranks: note: {note}")
    return loaded


def _joined_variables(flags: dict[str, Any]) -> Iterator[str]:
    """Yield a note for each ``--env A=1,B=2``, which is one variable here and two with other tools."""
    for pair in flags.get("environment.variables", ()):
        if match := re.match(r"(\w+)=[^,]*,([A-Z_][A-Z0-9_]*)=", pair):
            first, second = match.groups()
            yield f"all that follows {first}= is its value; for two variables: --env {first}=... --env {second}=..."


def _joined_words(loaded: LoadedJob) -> Iterator[str]:
    """Yield a note for each argument that is an option and its value in one word, which no parser takes apart."""
    for word in loaded.job.args:
        if match := re.match(r"(--[A-Za-z][\w-]*)\s+\S", word):
            name, is_typed = match[1], loaded.sources["args"].kind == "flag"
            two = f"{name} VALUE without quotes around both" if is_typed else f"[{name}, VALUE]"
            yield f"{name} and its value are one argument in args; for two, write {two}"


def _paths_elsewhere(words: Iterable[str], loaded: LoadedJob) -> Iterator[str]:
    """Yield a note for each argument of the script that is a path here, and none where the ranks start."""
    from allranks.plan.environment import workdir_of

    workdir = workdir_of(loaded.job, loaded.folder)
    for word in words:
        path = word.partition("=")[2] if word.startswith("--") else word
        if path and Path(path).exists() and not (workdir / path).exists():
            here = shlex.quote(str(Path(path).absolute()))
            yield f"{shlex.quote(path)} is not in {render.path(workdir)}, where the ranks start; here it is {here}"


def flag_values(values: dict[str, Any]) -> dict[str, object]:
    """Return the values of the options that were typed, by their place in the job."""
    return {option.path: value for option in OPTIONS if (value := values.get(_key(option))) not in (None, ())}


def _take_hosts(flags: dict[str, object]) -> None:
    """Take names of machines instead of a number of nodes: they are the hosts, and all of them take part."""
    from allranks.job.hosts import look_like_hosts, parse_hosts

    requested = str(flags.get("resources.nodes", ""))
    if requested.isalpha():
        where = "leave it out for this machine" if requested == "localhost" else f"--hosts {requested} for a machine"
        what = f"--nodes: invalid number of nodes: {requested!r}"
        raise UsageError(what, fix=f"{where}; --nodes takes a number, 2:4, or names such as gpu1,gpu2")
    if look_like_hosts(requested):
        try:
            flags["resources.nodes"] = len(parse_hosts([requested]))
        except ValueError as error:
            what, _, fix = str(error).partition("; ")
            known = "a number, 2:4, gpu1,gpu2, gpu[1-3] or ada@gpu7:2222"
            raise UsageError(f"--nodes: {what}", fix=fix or known) from error
        flags["resources.hosts"] = requested


def _target(values: dict[str, Any], flags: dict[str, object]) -> Path | None:
    """Return the job file; None if there is none. What else is to run is added to the flags."""
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
    from allranks.job.variables import redacted
    from allranks.job.yaml import dump_yaml
    from allranks.launch.submit import Launch

    return Launch(
        loaded.job,
        dump_yaml(redacted(loaded.job)),
        loaded.folder,
        runs_folder(loaded.job.runs.folder),
        contract.undecided(os.environ),
    )
