"""Directives of schedulers, and what PBS and Grid Engine do differently."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.model import Directive
from allranks.lint.parse import REMOTE
from allranks.lint.reading import View
from allranks.lint.rules.base import SBATCH, SRUN, Found, fatal, hint, is_expanded_there, likely
from allranks.lint.syntax import read_call, syntax_of

_QSUB = "qsub(1B) of OpenPBS 23.06"
_GE = "qsub(1) of Grid Engine 8.1.9"
#: What a misspelled first word of a directive looks like.
_ALMOST = re.compile(r"#\s?(?:SBACTH|SBTACH|SBATH|SABTCH|SBATCh|Sbatch|sbatch|SBACH|SBTCH|SBATCHH|PSB|pbs)\s+-")
_PATTERNS_GE = {"HOME", "USER", "JOB_ID", "JOB_NAME", "HOSTNAME", "TASK_ID", "SGE_TASK_ID"}


@likely(
    "AR401 directive-after-command",
    "{option}{others} after the first command: ignored",
    fix="move it above the first command",
    source=f"{SBATCH}: stops at the first line that is neither comment nor blank; {_QSUB}",
)
def _late(view: View) -> Iterator[Found]:
    late = [one for one in view.script.directives if not one.is_read and one.family == view.script.kind]
    if late:
        others = f" and {len(late) - 1} more" if len(late) > 1 else ""
        yield Found(late[0].at, {"option": _shown(late[0]), "others": others})


def _shown(directive: Directive) -> str:
    if directive.family != "slurm":
        return f"{directive.name} {directive.value}".strip()
    return f"--{directive.name}={directive.value}" if directive.value else f"--{directive.name}"


@likely(
    "AR402 variable-in-directive",
    "{value} is not expanded in a directive: the text is taken as it is",
    fix="write it out, use a pattern such as %j, or give it on the command line",
    source=f"{SBATCH}, filename pattern; {_QSUB}",
)
def _with_variable(view: View) -> Iterator[Found]:
    for directive in view.script.directives:
        names = re.findall(r"\$\{?(\w+)", directive.value)
        if not directive.is_read or not names or directive.family != view.script.kind:
            continue
        if directive.family == "grid_engine" and set(names) <= _PATTERNS_GE:
            continue
        if directive.family == "pbs" and directive.name not in ("-o", "-e", "-N", "-l"):
            continue
        yield Found(directive.value_at, {"value": directive.value})


@fatal(
    "AR403 first-line-missing",
    "sbatch refuses a script that does not start with #!",
    fix="#!/bin/bash as the first line",
    source=f"{SBATCH}: This does not look like a batch script",
)
def _no_first_line(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind == "slurm" and not script.shebang and any(directive.is_read for directive in script.directives):
        yield Found(script.directives[0].at)


@likely(
    "AR404 misspelled-directive",
    "{word} is a comment: the scheduler does not read the line",
    fix="#SBATCH, #PBS, in capitals and without a blank",
    source=SBATCH,
)
def _misspelled_word(view: View) -> Iterator[Found]:
    for at, text in view.script.comments:
        if _ALMOST.match(text) and view.script.kind != "plain":
            yield Found(at, {"word": text.split("-")[0].strip()})


@fatal(
    "AR405 blank-in-directive",
    "{option} gets the value =: sbatch refuses it, or ignores what follows",
    fix="{option}=VALUE, without blanks",
    source=SBATCH,
)
def _blank(view: View) -> Iterator[Found]:
    for directive in view.script.directives:
        if (
            directive.family == "slurm"
            and directive.is_read
            and (directive.value == "=" or directive.value.startswith("="))
        ):
            yield Found(directive.value_at, {"option": f"--{directive.name}"})


@fatal(
    "AR406 unknown-directive",
    "sbatch has no option {option}, and refuses the script",
    fix="sbatch --help lists the options",
    source=SBATCH,
)
def _unknown_option(view: View) -> Iterator[Found]:
    syntax = syntax_of("sbatch")
    assert syntax is not None
    for directive in view.script.directives:
        if directive.family != "slurm" or not directive.is_read:
            continue
        name = directive.name
        if re.fullmatch(r"[a-z][a-z-]+", name) and len(name) > 1 and not syntax.knows(f"--{name}"):
            starts = [known for known in syntax.valued | syntax.flags if known.startswith(f"--{name}")]
            if not starts:
                yield Found(directive.at, {"option": f"--{name}"})


@hint(
    "AR407 no-time-limit",
    "without {option} the job gets the limit of the queue: it waits longer, or blocks the node for days",
    fix="{option}, some more than the training takes",
    source=SBATCH,
)
def _no_limit(view: View) -> Iterator[Found]:
    script = view.script
    if not view.launches or not script.directives:
        return
    text = " ".join(directive.value for directive in script.options("-l"))
    has = {
        "slurm": bool(script.options("time")),
        "pbs": "walltime" in text,
        "grid_engine": bool(re.search(r"h_rt|s_rt", text)),
        "plain": True,
    }
    if not has[script.kind]:
        option = {"slurm": "--time", "pbs": "-l walltime", "grid_engine": "-l h_rt"}[script.kind]
        yield Found(script.directives[0].at, {"option": option})


@likely(
    "AR408 log-directory-made-too-late",
    "the scheduler opens its log in {directory} before this script creates the directory: the job fails without a word",
    fix="create it before sbatch",
    source=f"{SBATCH} --output",
    versions="Slurm before 23.02",
)
def _late_directory(view: View) -> Iterator[Found]:
    made = {
        word.shown.rstrip("/").removeprefix("./") for command in view.script.named("mkdir") for word in command.args
    }
    for directive in view.script.options("output", "error"):
        folder, slash, _ = directive.value.rpartition("/")
        if slash and folder.removeprefix("./") in made:
            yield Found(directive.value_at, {"directory": folder})


@hint(
    "AR409 log-directory",
    "where {directory} does not exist the job fails without a word",
    fix="create it before sbatch",
    source=f"{SBATCH} --output",
    versions="Slurm before 23.02",
)
def _directory(view: View) -> Iterator[Found]:
    made = {
        word.shown.rstrip("/").removeprefix("./") for command in view.script.named("mkdir") for word in command.args
    }
    for directive in view.script.options("output")[-1:]:
        folder, slash, _ = directive.value.rpartition("/")
        if slash and not folder.startswith("/") and folder not in (".", "..") and folder.removeprefix("./") not in made:
            yield Found(directive.value_at, {"directory": folder})


@likely(
    "AR410 pbs-starts-at-home",
    "PBS starts the script in the home directory, where {script} is not",
    fix='cd "$PBS_O_WORKDIR"',
    source=_QSUB,
)
def _starts_at_home(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind != "pbs" or script.options("-d", "-w"):
        return
    if any(script.named("cd", "pushd")) or re.search(
        r"--?(?:pwd|chdir)|-wdir", " ".join(" ".join(command.values) for command in script.commands)
    ):
        return
    for launch in view.launches:
        program = launch.program
        if program and program.parts[0].kind == "text" and not program.prefix.startswith(("/", "~")) and program.value:
            yield Found(launch.command.at, {"script": program.value})
            return


@likely(
    "AR411 grid-engine-starts-at-home",
    "Grid Engine starts the script in the home directory, where {script} is not",
    fix="#$ -cwd",
    source=_GE,
)
def _starts_at_home_ge(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind != "grid_engine" or script.options("-cwd", "-wd") or any(script.named("cd")):
        return
    for launch in view.launches:
        program = launch.program
        if program and program.value and not program.value.startswith(("/", "~")):
            yield Found(launch.command.at, {"script": program.value})
            return


def _resource_lists(view: View, word: str) -> list[Directive]:
    pattern = re.compile(rf"(?:^|,){word}=")
    return [directive for directive in view.script.options("-l") if pattern.search(directive.value)]


@likely(
    "AR412 chunks-on-one-node",
    "without place=scatter PBS may put all {chunks} chunks on one node",
    fix="#PBS -l place=scatter",
    source="pbs_resources(7B) of OpenPBS 23.06",
)
def _no_placement(view: View) -> Iterator[Found]:
    goes_out = any(command.name in REMOTE for command in view.script.commands)
    if view.script.kind != "pbs" or not (view.launches or goes_out):
        return
    text = " ".join(directive.value for directive in view.script.options("-l"))
    for directive in _resource_lists(view, "select")[:1]:
        match = re.search(r"select=(\d+)(?::(?!.*\+)|$)", directive.value)
        if match and int(match[1]) > 1 and not re.search(r"place=[^,\s]*(?:scatter|excl)", text):
            yield Found(directive.value_at, {"chunks": match[1]})


@fatal(
    "AR413 second-select",
    "PBS takes the first -l select only",
    fix="one -l select, with + between chunks",
    source="seen with OpenPBS 23.06",
)
def _second_select(view: View) -> Iterator[Found]:
    if view.script.kind == "pbs":
        for directive in _resource_lists(view, "select")[1:]:
            yield Found(directive.value_at)


@fatal(
    "AR414 nodes-and-select",
    "qsub refuses a job with both -l nodes and -l select",
    fix="-l select alone (OpenPBS, PBS Pro), or -l nodes alone (Torque)",
    source=_QSUB,
)
def _mixed(view: View) -> Iterator[Found]:
    nodes, selects = _resource_lists(view, "nodes"), _resource_lists(view, "select")
    if view.script.kind == "pbs" and nodes and selects:
        yield Found(nodes[0].value_at)


@fatal(
    "AR415 node-file-elsewhere",
    "PBS_NODEFILE is set on the first node only: here it is expanded on others, and empty",
    fix="expand it in the job script, or copy the file",
    source="pbsdsh(1B), pbs_environment of OpenPBS 23.06",
)
def _node_file_elsewhere(view: View) -> Iterator[Found]:
    for use in view.script.uses:
        if use.name != "PBS_NODEFILE" or use.level == 0:
            continue
        for command in view.script.commands:
            is_there = command.started_by("ssh", "pdsh", "pbsdsh", "pbs_tmrsh", "clush") is not None
            if is_there and any(
                part.at == use.at and is_expanded_there(part, command) for word in command.words for part in word.parts
            ):
                yield Found(use.at)
                break


@fatal(
    "AR416 lines-are-not-nodes",
    "the node file has {lines} lines for each node: this counts processes",
    fix='sort -u "$PBS_NODEFILE" | wc -l',
    source="qsub(1B), PBS_NODEFILE",
)
def _lines_as_nodes(view: View) -> Iterator[Found]:
    processes = view.resources.processes
    if not processes or processes < 2:
        return
    for command in view.script.named("wc"):
        reads = [word for word in command.args if word.names("PBS_NODEFILE")]
        reads += [word for operator, word in command.redirects if operator == "<" and word.names("PBS_NODEFILE")]
        if not reads:
            continue
        for assignment in view.script.assignments:
            is_it = any(
                part.kind == "command" and part.at <= command.at < part.at + len(part.text)
                for part in assignment.parts or ()
            )
            if is_it and re.search(r"N_?NODES|NUM_NODES|NODES$", assignment.name.upper()):
                yield Found(assignment.at, {"lines": processes})


@likely(
    "AR417 pbsdsh-has-no-path",
    "pbsdsh starts {program} with the daemon's environment: no PATH of yours, no modules, no exported variables",
    fix="pbsdsh -- bash -lc 'source env.sh; …', with absolute paths",
    source="pbsdsh(1B) of OpenPBS and Torque",
)
def _bare_pbsdsh(view: View) -> Iterator[Found]:
    for command in view.script.named("pbsdsh"):
        call = read_call(command)
        first = call.rest[0] if call and call.rest else None
        if (
            first is not None
            and first.value is not None
            and "/" not in first.value
            and first.value not in ("bash", "sh", "env", "hostname")
        ):
            yield Found(command.at, {"program": first.value})


@likely(
    "AR418 directive-twice",
    "{option} is {first} above and {last} here: the last one counts",
    fix="keep one",
    source=SBATCH,
)
def _twice(view: View) -> Iterator[Found]:
    if view.script.kind != "slurm":
        return
    seen: dict[str, Directive] = {}
    for directive in view.script.directives:
        if not directive.is_read:
            continue
        earlier = seen.get(directive.name)
        if earlier and earlier.value != directive.value and directive.name not in ("gres", "mail-type", "dependency"):
            yield Found(
                directive.at, {"option": f"--{directive.name}", "first": earlier.value, "last": directive.value}
            )
        seen[directive.name] = directive


@likely(
    "AR419 tasks-do-not-fit",
    "{tasks} tasks do not fit: nodes times --ntasks-per-node is {most}",
    fix="leave --ntasks out",
    source=f"{SBATCH} --ntasks-per-node: a maximum if --ntasks is given",
)
def _too_many_tasks(view: View) -> Iterator[Found]:
    script = view.script
    resources = view.resources
    per_node = next((directive for directive in script.options("ntasks-per-node")), None)
    if (
        not per_node
        or not per_node.value.isdecimal()
        or not script.option("nodes")
        or resources.tasks is None
        or resources.nodes is None
    ):
        return
    most = resources.nodes * int(per_node.value)
    if resources.tasks > most and "-" not in (script.option("nodes") or ""):
        yield Found(per_node.at, {"tasks": resources.tasks, "most": most})


@hint("AR420 time-in-minutes", "--time={value} is {value} minutes", fix="--time=HH:MM:SS", source=f"{SBATCH} --time")
def _bare_time(view: View) -> Iterator[Found]:
    script = view.script
    for directive in script.options("time") if script.kind == "slurm" else ():
        if directive.value.isdecimal() and 0 < int(directive.value) <= 96:
            yield Found(directive.value_at, {"value": directive.value})


@fatal(
    "AR421 walltime-in-seconds",
    "{value} is {value} seconds: the job ends before it begins to train",
    fix="HH:MM:SS",
    source=f"{_QSUB} -l walltime; {_GE} -l h_rt",
)
def _walltime_in_seconds(view: View) -> Iterator[Found]:
    for directive in view.script.options("-l"):
        match = re.search(r"(?:walltime|h_rt)=(\d{1,3})(?:,|$)", directive.value)
        if match and view.script.kind in ("pbs", "grid_engine"):
            yield Found(directive.value_at, {"value": match[1]})


@fatal(
    "AR422 invalid-gres",
    "invalid generic resource: {value}",
    fix="--gres=gpu:N, or gpu:TYPE:N",
    source=f"{SBATCH} --gres",
)
def _bad_gres(view: View) -> Iterator[Found]:
    for directive in view.script.options("gres"):
        value = directive.value
        if re.match(r"(?:gpus|GPU|gpu=|gpu\d|gpu:\w+=)", value):
            yield Found(directive.value_at, {"value": value})


@likely(
    "AR423 one-log-for-an-array",
    "all tasks of the array write to {log}, one over the other",
    fix="%A_%a in its name",
    source=f"{SBATCH}, filename pattern",
)
def _array_logs(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind != "slurm" or not script.options("array"):
        return
    for directive in script.options("output")[-1:]:
        if not re.search(r"%\d*[aj]", directive.value) and directive.value != "/dev/null":
            yield Found(directive.value_at, {"log": directive.value})


@likely(
    "AR424 nothing-reaches-steps",
    "--export=NONE holds for srun too: what this script exports does not reach the ranks",
    fix="export SLURM_EXPORT_ENV=ALL, or srun --export=ALL",
    source=f"{SBATCH} --export; {SRUN} SLURM_EXPORT_ENV",
)
def _exports_nothing(view: View) -> Iterator[Found]:
    script = view.script
    for directive in script.options("export"):
        if directive.value != "NONE" or "SLURM_EXPORT_ENV" in {assignment.name for assignment in script.assignments}:
            continue
        if any(word.value == "SLURM_EXPORT_ENV" for command in script.named("unset") for word in command.args):
            continue
        for command in script.named("srun"):
            call = read_call(command)
            if call and not call.get("--export") and not command.context.is_substitution:
                yield Found(directive.at)
                return


@likely(
    "AR425 export-without-all",
    "--export={value} leaves all other variables out, PATH and those that this script exports among them",
    fix="--export=ALL,{value}",
    source=f"{SRUN} --export",
)
def _exports_only(view: View) -> Iterator[Found]:
    for command in view.script.named("srun", "sbatch"):
        call = read_call(command)
        given = call.get("--export") if call else None
        value = given.value.shown if given and given.value else "ALL"
        if given and command.name == "srun" and "=" in value and not re.search(r"(?:^|,)(?:ALL|NONE)(?:,|$)", value):
            yield Found(given.word.at, {"value": value})


@fatal(
    "AR426 step-larger-than-job",
    "srun asks for {asked} nodes of a job of {nodes}: more processors requested than permitted",
    fix="--nodes=$SLURM_NNODES, or leave it out",
    source=f"{SRUN} --nodes",
)
def _step_larger(view: View) -> Iterator[Found]:
    nodes = view.resources.nodes
    if view.script.kind != "slurm" or nodes is None or "-" in (view.script.option("nodes") or ""):
        return
    for command in view.script.named("srun"):
        call = read_call(command)
        asked = call.number("--nodes") if call else None
        if asked and asked > nodes and view.script.options("nodes") and command.context.level == 0:
            yield Found(command.at, {"asked": asked, "nodes": nodes})


@fatal(
    "AR427 srun-inside-srun",
    "each task of the outer srun starts a step of its own, which waits for the resources of the outer one",
    fix="one srun",
    source=SRUN,
)
def _jobs_in_jobs(view: View) -> Iterator[Found]:
    if view.script.kind != "slurm":
        return
    for command in view.script.commands:
        if command.name in REMOTE and command.started_by("srun") is not None and command.name == "srun":
            yield Found(command.at)
