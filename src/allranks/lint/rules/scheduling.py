"""Directives of schedulers, and what Slurm makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from allranks.lint.model import REMOTE, Directive
from allranks.lint.reading import View
from allranks.lint.rules.base import QSUB, SBATCH, SRUN, Found, fatal, hint, likely
from allranks.lint.syntax import SYNTAX, read_call
from allranks.lint.unwrap import SHELLS

#: What a misspelled first word of a directive looks like.
_ALMOST = re.compile(r"#\s?(S[A-Z]{3,7}|SBATCh|Sbatch|sbatch|PSB|pbs)\s+-")
#: Options of plugins that many sites have: Shifter, and Slurm's of SenseTime.
_OF_PLUGINS = {"image", "module", "volume", "quotatype"}
#: Options whose value is a number above 0.
_NUMBERS = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
#: So many empty values make it a form, for somebody to fill in.
_TEMPLATE = 3
_HERE = re.compile(rb"<<-?[ \t]*[A-Za-z_]")
#: Names that Grid Engine replaces in a path, whatever follows them.
_PATTERNS_GE = ("HOME", "USER", "JOB_ID", "JOB_NAME", "HOSTNAME", "TASK_ID", "SGE_TASK_ID")
#: A place in a template that something is put in.
_PLACEHOLDER = re.compile(r"<\w[\w -]*>|\{\{?\w+\}?\}|\{%")


@likely(
    "AR401 directive-after-command",
    "{late} after the first command: ignored",
    fix="move it above the first command",
    source=f"{SBATCH}: stops at the first line that is neither comment nor blank; {QSUB}",
)
def _late(view: View) -> Iterator[Found]:
    late = [one for one in view.script.directives if not one.is_read and one.family == view.script.kind]
    if late:
        others = f" and {len(late) - 1} more" if len(late) > 1 else ""
        yield Found(late[0].at, {"late": f"{_shown(late[0])}{others}"})


def _shown(directive: Directive) -> str:
    if directive.family != "slurm":
        return f"{directive.name} {directive.value}".strip()
    return f"--{directive.name}={directive.value}" if directive.value else f"--{directive.name}"


def _is_of_torque(view: View, directive: Directive) -> bool:
    """Return whether a directive names a log for Torque, which expands variables in it; OpenPBS does not."""
    return directive.name in ("-o", "-e") and any("nodes=" in each.value for each in view.script.options("-l"))


@likely(
    "AR402 variable-in-directive",
    "{value} is not expanded in a directive: the text is taken as it is",
    fix="write it out, use a pattern such as %j, or give it on the command line",
    source=f"{SBATCH}, filename pattern; {QSUB}",
)
def _with_variable(view: View) -> Iterator[Found]:
    for directive in view.script.read:
        names = re.findall(r"\$\{?(\w+)", directive.value)
        is_pattern = directive.family == "grid_engine" and all(name.startswith(_PATTERNS_GE) for name in names)
        is_free_text = directive.family == "pbs" and directive.name not in ("-o", "-e", "-N", "-l")
        is_pattern = is_pattern or (set(names) <= {"PBS_JOBID", "PBS_JOBNAME"} and _is_of_torque(view, directive))
        # $1 in a here-document is the argument of the script that writes it; the grammar does not tell.
        is_filled_in = all(map(str.isdecimal, names)) and _HERE.search(view.script.text.data, 0, directive.at)
        if names and not is_pattern and not is_free_text and not is_filled_in:
            yield Found(directive.value_at, {"value": directive.value})


@fatal(
    "AR403 first-line-missing",
    "sbatch refuses a script that does not start with #!",
    fix="#!/bin/bash as the first line",
    source=f"{SBATCH}: This does not look like a batch script",
)
def _no_first_line(view: View) -> Iterator[Found]:
    script = view.script
    is_damaged = b"#!" in script.text.data.partition(b"\n")[0]  # x#!/bin/bash
    if any(_PLACEHOLDER.search(directive.value) for directive in script.directives):
        return  # A template, which something else may put a first line before.
    if script.kind == "slurm" and not script.shebang and (script.read or (is_damaged and script.directives)):
        yield Found(0 if is_damaged else script.directives[0].at)


@likely(
    "AR404 misspelled-directive",
    "{word} is no directive: the scheduler does not read the line",
    fix="#SBATCH, #PBS, in capitals and without a blank",
    source=SBATCH,
)
def _misspelled_word(view: View) -> Iterator[Found]:
    for command in view.script.named("SBATCH", "!#SBATCH"):
        if command.first.startswith("-"):
            yield Found(command.at, {"word": command.name})
    for at, text in view.script.comments:
        match = _ALMOST.match(text)
        if at >= view.script.text.size or not match or view.script.kind == "plain":
            continue
        if match[1] == "SBATCH" or (
            match[1].startswith("S") and not get_close_matches(match[1].upper(), ["SBATCH"], 1, 0.8)
        ):
            continue
        is_usage = re.match(r"#\s?(?:sbatch|pbs)\s", text) and re.search(r"\s[^-\s][^\s=]*\.\w+\s*$", text)
        if not is_usage:  # # sbatch --output=log train.sh
            yield Found(at, {"word": text.split("-")[0].strip()})


@fatal(
    "AR405 blank-in-directive",
    "{option} gets the value =: sbatch refuses it, or ignores what follows",
    fix="{option}=VALUE, without blanks",
    source=SBATCH,
)
def _blank(view: View) -> Iterator[Found]:
    for directive in view.script.read:
        if directive.family == "slurm" and directive.value.startswith("="):
            yield Found(directive.value_at, {"option": f"--{directive.name}"})


@fatal(
    "AR406 unknown-directive",
    "sbatch has no option {option}, and refuses the script",
    fix="did you mean {near}? sbatch --help lists the options",
    source=SBATCH,
)
def _unknown_option(view: View) -> Iterator[Found]:
    syntax = SYNTAX["sbatch"]
    for directive in view.script.read if view.script.kind == "slurm" else ():
        option = f"--{directive.name}"
        is_known = syntax.knows(option) or any(known.startswith(option) for known in syntax.valued | syntax.flags)
        if is_known or directive.name in _OF_PLUGINS or not re.fullmatch(r"--[a-z][a-z-]+", option):
            continue
        # A site may have options of its own: only what looks like one of Slurm's is certain.
        for near in get_close_matches(option, sorted(syntax.valued | syntax.flags), n=1, cutoff=0.75):
            yield Found(directive.at, {"option": option, "near": near})


@fatal(
    "AR435 number-left-out",
    "{option}= has no number, and sbatch refuses the script",
    fix="{option}=N, or no such line",
    source=f"{SBATCH}: is not a valid node count, Invalid numeric value",
)
def _left_out(view: View) -> Iterator[Found]:
    empty = [each for each in view.script.read if each.family == "slurm" and each.name in _NUMBERS and not each.value]
    for directive in empty if len(empty) < _TEMPLATE else ():
        yield Found(directive.at, {"option": f"--{directive.name}"})


@hint(
    "AR407 no-time-limit",
    "without {option} the job gets the limit of the queue: it waits longer, or blocks the node for days",
    fix="{option}, some more than the training takes",
    source=SBATCH,
)
def _no_limit(view: View) -> Iterator[Found]:
    script = view.script
    if not view.launches or not script.directives or script.kind == "plain":
        return
    lists = " ".join(directive.value for directive in script.options("-l"))
    has_limit, option = {
        "slurm": (bool(script.options("time")), "--time"),
        "pbs": ("walltime" in lists, "-l walltime"),
        "grid_engine": ("h_rt" in lists or "s_rt" in lists, "-l h_rt"),
    }[script.kind]
    if not has_limit:
        yield Found(script.directives[0].at, {"option": option})


@likely(
    "AR418 directive-twice",
    "{option} is {first} above and {last} here: the last one counts",
    fix="keep one",
    source=SBATCH,
)
def _twice(view: View) -> Iterator[Found]:
    seen: dict[str, str] = {}
    for directive in view.script.read if view.script.kind == "slurm" else ():
        first = seen.get(directive.name, directive.value)
        if first != directive.value and directive.name not in ("gres", "mail-type", "dependency"):
            yield Found(directive.at, {"option": f"--{directive.name}", "first": first, "last": directive.value})
        seen[directive.name] = directive.value


@likely(
    "AR419 tasks-do-not-fit",
    "--ntasks={tasks} does not fit: {why}",
    fix="leave --ntasks out",
    source=f"{SBATCH} --ntasks-per-node: a maximum if --ntasks is given; can't run 1 processes on 2 nodes",
)
def _too_many_tasks(view: View) -> Iterator[Found]:
    tasks, nodes = view.resources.tasks, view.resources.nodes
    if tasks is None or nodes is None or "-" in (view.script.option("nodes") or "-"):
        return
    for directive in view.script.options("ntasks-per-node")[:1]:
        if directive.value.isdecimal() and tasks > nodes * int(directive.value):
            most = nodes * int(directive.value)
            yield Found(directive.at, {"tasks": tasks, "why": f"nodes times --ntasks-per-node is {most}"})
    if 0 < tasks < nodes:
        why = f"Slurm gives no node without a task, so {tasks} of the {nodes}"
        yield Found(view.script.options("ntasks")[-1].at, {"tasks": tasks, "why": why})
    elif nodes and tasks % nodes and view.started_by("srun") and not view.script.option("ntasks-per-node"):
        why = f"{nodes} nodes get unequal numbers of tasks"
        yield Found(view.script.options("ntasks")[-1].at, {"tasks": tasks, "why": why})


@hint("AR420 time-in-minutes", "--time={value} is {value} minutes", fix="--time=HH:MM:SS", source=f"{SBATCH} --time")
def _bare_time(view: View) -> Iterator[Found]:
    script = view.script
    for directive in script.options("time") if script.kind == "slurm" else ():
        if directive.value.isdecimal() and 0 < int(directive.value) <= 96:
            yield Found(directive.value_at, {"value": directive.value})


@fatal(
    "AR422 invalid-gres",
    "invalid generic resource: {value}",
    fix="--gres=gpu:N, or gpu:TYPE:N",
    source=f"{SBATCH} --gres",
)
def _bad_gres(view: View) -> Iterator[Found]:
    for directive in view.script.options("gres"):
        if re.match(r"(?:gpus|GPU|gpu=|gpu\d|gpu:\w+=)", directive.value):
            yield Found(directive.value_at, {"value": directive.value})


@likely(
    "AR423 one-log-for-an-array",
    "all tasks of the array write to {log}, one over the other",
    fix="%A_%a in its name",
    source=f"{SBATCH}, filename pattern",
)
def _array_logs(view: View) -> Iterator[Found]:
    script = view.script
    for directive in script.options("output")[-1:] if script.kind == "slurm" and script.options("array") else ():
        if not re.search(r"%\d*[aj]", directive.value) and directive.value != "/dev/null":
            yield Found(directive.value_at, {"log": directive.value})


@likely(
    "AR424 nothing-reaches-steps",
    "--export=NONE holds for srun too: what this script exports does not reach the ranks",
    fix="export SLURM_EXPORT_ENV=ALL, or srun --export=ALL",
    source=f"{SBATCH} --export; {SRUN} SLURM_EXPORT_ENV",
)
def _exports_nothing(view: View) -> Iterator[Found]:
    script, variable = view.script, "SLURM_EXPORT_ENV"
    if script.sets(variable) or any(variable in command.values for command in script.named("unset")):
        return
    is_step = any(not call.get("--export") and not step.context.is_substitution for step, call in view.calls("srun"))
    none = [directive for directive in script.options("export") if directive.value == "NONE"]
    for directive in none[:1] if is_step else ():
        yield Found(directive.at)


@likely(
    "AR425 export-without-all",
    "--export={value} leaves all other variables out, PATH and those that this script exports among them",
    fix="--export=ALL,{value}",
    source=f"{SRUN} --export",
)
def _exports_only(view: View) -> Iterator[Found]:
    for _, call in view.calls("srun"):
        given = call.get("--export")
        value = given.value.shown if given else ""
        if given and "=" in value and not re.search(r"(?:^|,)(?:ALL|NONE)(?:,|$)", value):
            yield Found(given.at, {"value": value})


@fatal(
    "AR426 step-larger-than-job",
    "srun asks for {asked} nodes of a job of {nodes}: more processors requested than permitted",
    fix="--nodes=$SLURM_NNODES, or leave it out",
    source=f"{SRUN} --nodes",
)
def _step_larger(view: View) -> Iterator[Found]:
    nodes, option = view.resources.nodes, view.script.option("nodes")
    if nodes is None or option is None or "-" in option:
        return
    for command, call in view.calls("srun"):
        asked = call.number("--nodes")
        if asked and asked > nodes and command.context.level == 0:
            yield Found(command.at, {"asked": asked, "nodes": nodes})


@fatal(
    "AR427 srun-inside-srun",
    "each task of the outer srun starts a step of its own, which waits for the resources of the outer one",
    fix="one srun",
    source=SRUN,
)
def _jobs_in_jobs(view: View) -> Iterator[Found]:
    for command in view.script.named("srun") if view.script.kind == "slurm" else ():
        if command.started_by("srun"):
            yield Found(command.at)


@fatal(
    "AR428 time-with-a-unit",
    "sbatch refuses --time={value}: invalid time specification",
    fix="--time=HH:MM:SS, or D-HH:MM:SS",
    source=f"{SBATCH} --time",
)
def _time_with_a_unit(view: View) -> Iterator[Found]:
    script = view.script
    for directive in script.options("time") if script.kind == "slurm" else ():
        if re.fullmatch(r"(?:\d+-)?(?:[\d.:]+ *[A-Za-z]+)+", directive.value):
            yield Found(directive.value_at, {"value": directive.value})


@fatal(
    "AR430 first-line-of-another-language",
    "the first line has {program} read this script, whose text is for a shell",
    fix="#!/bin/bash as the first line",
    source="execve(2)",
)
def _other_language(view: View) -> Iterator[Found]:
    program = re.search(r"\b(?:python|perl|ruby)[\d.]*", view.script.shebang)
    names = {command.name for command in view.top_commands}
    is_shell = names & {"srun", "module", "export", "source", "torchrun"} and not names & {"import", "from", "use"}
    if view.script.kind != "plain" and program and is_shell:
        yield Found(view.script.directives[0].at, {"program": program[0]})


@likely(
    "AR431 terminal-in-a-batch-script",
    "a batch script has no terminal: the shell that {command} starts gets no input, and ends at once",
    fix="salloc for work by hand; in a batch script the commands themselves",
    source=f"{SRUN} --pty; {SBATCH}, description",
)
def _shell_in_a_job(view: View) -> Iterator[Found]:
    if view.script.kind == "plain":
        return
    for command, call in view.calls("srun"):
        program = (call.rest[0].value or "").rpartition("/")[2] if call.rest else ""
        is_alone = all(word.prefix in ("-i", "-l", "--login") for word in call.rest[1:])
        if call.get("--pty") and program in SHELLS and is_alone and not command.has_input:
            yield Found(command.at, {"command": "srun --pty"})
    piped = {name for command in view.script.commands for name in command.context.pipe}
    for command in view.script.named(*SHELLS):
        root, is_alone = command.root, all(word.prefix in ("-i", "-l", "--login") for word in command.args)
        has_input = command.has_input or root.has_input or {command.name, root.name} & piped
        is_other = command.context.is_substitution or command.started_by(*REMOTE, "docker", "podman")
        if is_alone and not has_input and not is_other:
            yield Found(root.at, {"command": root.name})


@likely(
    "AR432 step-of-another-job",
    "srun --jobid={job} starts the step in that job, whatever this one has",
    fix="leave --jobid out, or --jobid=$SLURM_JOB_ID",
    source=f"{SRUN} --jobid",
)
def _other_job(view: View) -> Iterator[Found]:
    for command, call in view.calls("srun") if view.script.kind == "slurm" else ():
        given = call.get("--jobid")
        if given and given.value.is_literal and given.value.number and not command.context.level:
            yield Found(given.at, {"job": given.value.number})


@likely(
    "AR433 docker-wants-a-terminal",
    "docker {verb} -it needs a terminal, which a batch job has none of: the input device is not a TTY",
    fix="docker {verb} without -t",
    source="docker.com: docker run, --tty",
)
def _docker_terminal(view: View) -> Iterator[Found]:
    for command in view.script.named("docker", "nvidia-docker") if view.script.kind != "plain" else ():
        starter = command.started_by("srun")
        has_terminal = (starter is not None and read_call(starter).get("--pty")) or command.started_by("script")
        flags = "".join(word[1:] for word in command.values if re.fullmatch(r"-[dit]+", word))
        if command.first in ("run", "exec") and {"i", "t"} <= set(flags) and not has_terminal:
            yield Found(command.at, {"verb": command.first})
