"""Errors of the command line as ours: what was typed, and what to type instead."""

from __future__ import annotations

import re
import shlex
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import click

from allranks import contract
from allranks.cli.checkpoint import SAVED
from allranks.cli.options import TYPED, script_args
from allranks.cli.runs import runs_folder
from allranks.errors import UsageError
from allranks.job.options import OPTIONS
from allranks.job.problems import closest

#: Verbs that take a job, and with it arguments of the script.
_TAKES_A_JOB = ("run", "plan", "check", "estimate", "node")

#: Verbs that start something: a word that is merely like one of them is no reason to name it.
_STARTS = frozenset(["run", "resume", "node", "test", "shell"])

_REMOVE = "allranks prune removes old runs: allranks prune --older-than 30d"
_RUN = "allranks run starts a script: allranks run train.py --nproc-per-node 2 -- --lr 0.1"
#: Verbs of other tools, and ours for the same.
_VERBS_OF_OTHERS = {
    "start": "allranks run starts a job, allranks resume starts a run again",
    "launch": "allranks run starts a job",
    **dict.fromkeys(("torchrun", "python", "python3", "accelerate", "srun", "sbatch", "qsub"), _RUN),
    "submit": "allranks run submits a job and follows it, with --detach it returns at once",
    **dict.fromkeys(("attach", "tail", "follow"), "allranks logs -f follows a run"),
    **dict.fromkeys(("restart", "retry", "continue", "rerun"), "allranks resume starts a run again, from where it was"),
    **dict.fromkeys(("queue", "jobs", "history", "squeue", "sacct", "qstat"), "allranks ps lists the runs"),
    **dict.fromkeys(("show", "info", "describe", "inspect"), "allranks status shows a run"),
    **dict.fromkeys(("scancel", "qdel"), "allranks cancel ends a run"),
    "doctor": "allranks check",
    "diff": "allranks compare RUN RUN",
    **dict.fromkeys(("rm", "remove", "delete", "clean"), _REMOVE),
}

#: Words for the commands of ``checkpoint``.
_SAME = {"list": "ls", "show": "ls", "check": "verify", "save": "export", "convert": "export"}

_NOT_NEEDED = "not needed: leave it out"
_RANKS = "--nproc-per-node N is the number of ranks on each node"
_NODE_RANK = "allranks node starts one node of a job: allranks node train.py --nodes 2 --node-rank 0"
_SHOWN = f"{_NOT_NEEDED}; the output of all ranks is shown and kept, allranks logs --rank N shows one rank's"
#: Options of torchrun, accelerate, deepspeed, mpirun and srun, and ours for the same.
_OPTIONS_OF_OTHERS = {
    **dict.fromkeys(("--tee", "-t", "--redirects", "-r", "--local-ranks-filter"), _SHOWN),
    **dict.fromkeys(
        ("--standalone", "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--monitor-interval", "--start-method"),
        _NOT_NEEDED,
    ),
    "--rdzv-endpoint": f"{_NOT_NEEDED}, or name the place to meet with --master-addr and --master-port",
    "--log-dir": "logs of all ranks are kept in the run's directory, which --runs-folder places",
    "--no-python": "--binary PROGRAM",
    **dict.fromkeys(("--node-rank", "--machine-rank"), _NODE_RANK),
    **dict.fromkeys(("-n", "--num-processes", "--ntasks-per-node", "--num-gpus"), _RANKS),
    "--ntasks": "--nodes and --nproc-per-node say how many ranks there are",
    "--num-machines": "--nodes N",
    "--main-process-ip": "--master-addr ADDRESS",
    "--main-process-port": "--master-port PORT",
    **dict.fromkeys(("-G", "--gres"), "--gpus-per-node N"),
    **dict.fromkeys(
        ("--begin", "--comment", "--dependency", "--licenses", "--nice"),
        "--directive=--NAME=VALUE passes a line on to the scheduler",
    ),
    "--cpus-per-task": "--cpus-per-node N, which the ranks of a node share",
    **dict.fromkeys(("-H", "--host", "--hosts"), "--nodes HOST,HOST starts ranks on these machines over SSH"),
    **dict.fromkeys(("--multi-gpu", "--cpu"), f"{_NOT_NEEDED}; all GPUs are used, or the CPU if there is none"),
    **dict.fromkeys(
        ("--config-file", "--use-deepspeed", "--use-fsdp", "--dynamo-backend"),
        "set it in the script: Accelerator(...) takes what accelerate config would set, DeepSpeed and FSDP as plugins",
    ),
    "--gpu-ids": "write CUDA_VISIBLE_DEVICES=0,1 before the command: it chooses the GPUs",
    "--mixed-precision": 'write allranks.init(precision="bf16") in the script',
}
_ONE_AT_A_TIME = "one run at a time: allranks ps --state running names them, allranks cancel RUN ends one"
_KILLS = "leave it out: ranks that do not leave in time are killed"
_BOTH = "leave it out: stdout and stderr are shown together; --timestamps --grep Error narrows it down"
_NO_QUESTION = "leave it out: prune asks nothing; --dry-run shows what it would remove"
#: Options of our own verbs that people expect elsewhere: by verb and option.
_NOT_HERE = {
    **dict.fromkeys((("cancel", name) for name in ("--force", "-f", "--signal", "-s", "-9", "--now")), _KILLS),
    **dict.fromkeys((("logs", name) for name in ("--stderr", "--stdout", "--err", "--out")), _BOTH),
    **dict.fromkeys((("prune", name) for name in ("--yes", "-y", "--force", "-f")), _NO_QUESTION),
    **dict.fromkeys((("prune", "--all"), ("prune", "-a")), "--keep 0 removes all runs that have ended"),
    **dict.fromkeys((("status", "--follow"), ("status", "-f")), "allranks watch, or allranks logs -f"),
    **dict.fromkeys((("cancel", "--all"), ("cancel", "-a")), _ONE_AT_A_TIME),
    **dict.fromkeys((("ps", "--all"), ("ps", "-a")), "all runs are listed, in every state; -n 1000 lists more than 20"),
    ("why", "--rank"): "leave it out: why finds the rank that failed first; allranks logs --rank N shows one rank",
    ("schema", "--json"): "leave it out: a schema is JSON",
    ("run", "--dry-run"): "allranks plan shows what would be executed, and starts nothing",
    ("ps", "--since"): "ps lists the newest 20 runs: -n 50 lists more; logs --since 1h shows the last hour of a run",
    ("ps", "--on"): "leave it out: the runs of all clusters are listed",
    **dict.fromkeys((("ps", "--watch"), ("ps", "-w")), "allranks watch --all"),
    **dict.fromkeys((("status", "--watch"), ("status", "-w")), "allranks watch"),
}
_AS_STARTED = "a run is resumed as it was started; allranks run starts another one, with other options"
#: What to write in place of words that a verb does not take.
_NO_WORDS = {
    "resume": _AS_STARTED,
    "prune": "--keep N or --older-than 30d chooses runs; of a single one, remove the directory: rm -r runs/RUN",
    "logs": "one run at a time: allranks logs RUN; --rank 0,1 names ranks",
    "ps": "leave it out: --state running lists the runs in a state, allranks status RUN shows one",
}
#: A number for options that got none.
_EXAMPLE = 20
#: Names that people give a run with: it is an argument of these verbs.
_RUN_OPTIONS = ("--run", "--run-id", "--id", "--job", "--job-id", "-j")
#: What click says in errors of its own, where it keeps no more than the text.
_UNEXPECTED = re.compile(r"Got unexpected extra arguments? \((.*)\)", re.DOTALL)
_NO_COMMAND = re.compile(r"No such command '(.*?)'.*", re.DOTALL)


def from_click(failure: click.ClickException, command: click.Command, words: list[str]) -> UsageError:
    """Make our error from one of click's, with the way out that fits; the words were typed after the command."""
    message = failure.format_message().rstrip(".").replace("\n", " ")
    what, why, fix = message[:1].lower() + message[1:], None, _fix(failure)
    if isinstance(failure, click.NoSuchOption):
        what = f"no such option {_as_typed(failure)}"
    elif isinstance(failure, click.BadOptionUsage):
        what, why, fix = _bad_option(failure.option_name, command, words)
    elif isinstance(failure, click.MissingParameter) and failure.param:
        what = f"{_spelling(failure.param)} is missing"
        if failure.ctx and isinstance(failure.param.type, click.Choice):
            fix = f"{failure.ctx.command_path} {failure.param.type.choices[0]}"
        elif failure.ctx and failure.param.name == "folder":
            fix = f"{failure.ctx.command_path} {SAVED}"
        elif failure.ctx and failure.param.name == "target":
            fix = f"{failure.ctx.command_path} FOLDER model.safetensors"
    elif isinstance(failure, click.BadParameter) and failure.param:
        name, kind = _spelling(failure.param), failure.param.type
        typed, is_, _ = failure.message.partition(" is not ")
        what = f"{name}: cannot be {typed}" if is_ else f"{name}: {failure.message.rstrip('.')}"
        if isinstance(kind, click.Choice):
            *others, last = kind.choices
            why = f"it must be {', '.join(others)} or {last}"
            near = closest(typed.strip("'"), kind.choices)
            fix = f"did you mean {near}?" if near else _with_value(failure.param, kind.choices[0], failure.ctx)
        elif kind.name.startswith(("integer", "float")):
            why = f"it must be {_number(kind)}" if is_ else None
            default = failure.param.default
            usual = default if isinstance(default, int | float) and default > 0 else getattr(kind, "min", 0) or _EXAMPLE
            fix = _with_value(failure.param, f"{usual:g}", failure.ctx)
        elif failure.param.name == "folder" and name == "FOLDER":
            fix = "name a directory; allranks init without one writes here, for a train.py that is here too"
    elif extra := _UNEXPECTED.fullmatch(message):
        what, context = f"unexpected argument: {extra[1]}", getattr(failure, "ctx", None)
        fix = _NO_WORDS.get(context.info_name or "", fix) if context else fix
    elif word := _NO_COMMAND.fullmatch(message):
        what = f"no such command {word[1]}"
    return UsageError(what, why=why, fix=fix)


def _with_value(parameter: click.Parameter, value: str, context: click.Context | None) -> str:
    """Return a parameter with a value that it takes, as it is typed."""
    if isinstance(parameter, click.Option):
        return f"{_spelling(parameter)} {value}"
    return f"{context.command_path if context else 'allranks'} {value}"


def _bad_option(name: str, command: click.Command, words: list[str]) -> tuple[str, str | None, str]:
    """Return what is wrong with an option that lacks a value or has one too many: click's error names no verb."""
    path = ["allranks"]
    for word in words:
        inner = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if inner:
            path, command = [*path, word], inner
    options = (each for each in command.params if isinstance(each, click.Option))
    option = next((each for each in options if name in (*each.opts, *each.secondary_opts)), None)
    is_flag = option is not None and option.is_flag
    fix = f"{name} alone" if is_flag else f"{name} {option.metavar}" if option and option.metavar else ""
    what = f"{name} takes no value" if is_flag else f"{name} needs a value"
    return what, option.help if option else None, f"{fix}; " * bool(fix) + f"{' '.join(path)} --help"


def _number(kind: click.ParamType[Any]) -> str:
    """Return which numbers an option takes, as ``a whole number from 1 to 8``."""
    name = "a whole number" if kind.name.startswith("integer") else "a number"
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if getattr(kind, "min_open", False):
        return f"{name} above {least:g}"
    if least is None:
        return name if most is None else f"{name}, at most {most:g}"
    return f"{name}, at least {least:g}" if most is None else f"{name} from {least:g} to {most:g}"


def _spelling(parameter: click.Parameter) -> str:
    """Return a parameter as messages name it: ``--last``, ``FOLDER``."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.metavar or (parameter.name or "").upper()


def unknown_verb(word: str, verbs: list[str]) -> UsageError:
    """Make the error for a verb that does not exist."""
    if word.endswith((".py", ".yaml", ".yml")):
        fix = f"allranks run {shlex.quote(word)}"
    elif word and (runs_folder(None) / word / contract.RECORD_FILE).is_file():
        run = shlex.quote(word)
        return UsageError(f"{run} is a run, and a command must come first", fix=f"allranks status {run}")
    elif word in _VERBS_OF_OTHERS:
        fix = _VERBS_OF_OTHERS[word]
    elif near := closest(word, [verb for verb in verbs if verb not in _STARTS]):
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
    if takes_a_job and context and "extra argument" in failure.message:
        return _of_extra_words(context)
    if isinstance(failure, click.UsageError) and (word := _NO_COMMAND.fullmatch(failure.message.rstrip("."))):
        assert isinstance(failure.ctx, click.Context) and isinstance(failure.ctx.command, click.Group)
        if near := _SAME.get(word[1]) or closest(word[1], failure.ctx.command.commands):
            return f"did you mean {path} {near}?"
    return f"{path} --help"


def _of_extra_words(context: click.Context) -> str:
    """Return what to type for words after the target: they are the script's, or a path with spaces is not quoted."""
    typed, target = context.meta[TYPED], context.params["target"]
    if target.endswith((".yaml", ".yml")) and (script := next((word for word in typed if word.endswith(".py")), None)):
        name = shlex.quote(script)
        return f"{target} names its script: write script: {name} there, or leave {target} out: allranks run {name}"
    for start, end in combinations(range(len(typed) + 1), 2):
        if end - start > 1 and Path(path := " ".join(typed[start:end])).is_file():
            words = [*context.command_path.split(), *typed[:start], path, *typed[end:]]
            return f"put a path with spaces in quotes: {shlex.join(words)}"
    for flag, name, value in zip(typed, typed[1:], typed[2:], strict=False):
        if flag == "--env" and "=" not in name and not value.startswith("-") and not Path(value).is_file():
            return f"a variable and its value are one word: --env {shlex.quote(f'{name}={value}')}"
    line = f"{context.command_path} train.py -- ..."
    if Path(target).is_file():
        line = _moved(context, typed.index(target) + 1)
    return f"the script's own arguments follow --: {line}"


def _moved(context: click.Context, start: int) -> str:
    """Write the command as it was typed, with all from the word at ``start`` that is not ours behind ``--``."""
    typed, parameters = context.meta[TYPED], context.command.get_params(context)
    options = {name: each for each in parameters if isinstance(each, click.Option) for name in each.opts}
    own, args, words = list(typed[:start]), list[str](), iter(typed[start:])
    for word in words:
        name, _, value = word.partition("=")
        option = options.get(name.replace("_", "-") if name.startswith("--") else name)
        (own if option else args).append(word)
        if option and not option.is_flag and not value:
            own += islice(words, 1)
    return shlex.join([*context.command_path.split(), *own, "--", *args, *script_args(context)])


def _as_typed(failure: click.NoSuchOption) -> str:
    """Return an option with the underscores that were typed, since it may be an option of the script."""
    typed = failure.ctx.meta.get(TYPED, ()) if failure.ctx else ()
    words = (word.partition("=")[0] for word in typed)
    name = failure.option_name
    is_short = not name.startswith("--")  # Of -np, say, click names the first letter alone.
    return next((word for word in words if word.replace("_", "-")[: 2 if is_short else None] == name), name)


def _without_option(name: str, context: click.Context) -> str | None:
    """Return the line for a target that was typed behind an option; None if that is not what was typed."""
    typed = context.meta[TYPED]
    targets = [word for word in typed if word.endswith((".py", ".yaml", ".yml"))]
    at = next((at for at, word in enumerate(typed) if word.startswith(name)), 0)
    value = typed[at + 1] if at + 1 < len(typed) else ""
    others = [word for word in targets if word != value and (word.endswith(".py") or not value.endswith(".py"))]
    if others or value not in targets:
        return None
    own = [word for word in (*typed[:at], *typed[at + 2 :]) if word not in targets]
    args = script_args(context)
    return shlex.join([*context.command_path.split(), value, *own, *(["--", *args] if args else [])])


def _only_in_a_file(name: str) -> str | None:
    """Return the path of the one key of the job file that an option is named after, and no option gives; else None."""
    from allranks.job.spec import Job  # Only this mistake needs it.

    key = name.lstrip("-").replace("-", "_")
    paths = [f"{above}.{key}" for above, section in Job.sections().items() if key in section.model_fields]
    return paths[0] if len(paths) == 1 and all(option.path != paths[0] for option in OPTIONS) else None


def _of_option(name: str, context: click.Context, takes_a_job: bool) -> str:
    if context.info_name == "resume" and name in (flag for option in OPTIONS for flag in option.flags):
        return _AS_STARTED
    known = [word for parameter in context.command.get_params(context) for word in parameter.opts]
    others = _OPTIONS_OF_OTHERS if "--nproc-per-node" in known else {}
    spelled = name.replace("_", "-") if name.startswith("--") else name[:2]
    meant = _NOT_HERE.get((context.info_name or "", name), "") or others.get(spelled, "")
    if name in _RUN_OPTIONS and any(parameter.name in ("run", "runs") for parameter in context.command.params):
        meant = f"name the run without an option: {context.command_path} RUN"
    if not meant and takes_a_job and (line := _without_option(name, context)):
        return f"name it without an option: {line}"
    if not meant and takes_a_job and (path := _only_in_a_file(spelled)):
        section, _, key = path.rpartition(".")
        meant = f"the job file alone gives it: write {key} under {section}"
    if not meant and (near := closest(name, [word for word in known if word.startswith("--")])):
        meant = f"did you mean {near}?"
    if not takes_a_job or meant.startswith(_NOT_NEEDED):
        return meant or f"{context.command_path} --help"
    typed = context.meta[TYPED]
    at = next((at for at, word in enumerate(typed) if word.startswith(name)), 0)
    scripts = [place for place, word in enumerate(typed) if word.endswith(".py")]
    targets = scripts or [place for place, word in enumerate(typed) if word.endswith((".yaml", ".yml"))]
    if not targets or targets[0] < at:
        line = _moved(context, targets[0] + 1 if targets else at)
    else:
        end = at + 2 if at + 1 < targets[0] and not typed[at + 1].startswith("-") else at + 1
        words = [*typed[:at], *typed[end:], "--", *typed[at:end], *script_args(context)]
        line = shlex.join([*context.command_path.split(), *words])
    moved = f"{name} is the script's, put it after --: {line}"
    return f"{meant}{'' if meant.endswith('?') else '.'} If {moved}" if meant else f"if {moved}"
