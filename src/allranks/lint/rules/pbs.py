"""What PBS and Grid Engine do with a script, and Slurm does not."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.model import REMOTE, Directive
from allranks.lint.reading import View
from allranks.lint.rules.base import QSUB, Found, fatal, likely

_GE = "qsub(1) of Grid Engine 8.1.9"


def _relative_script(view: View) -> Iterator[Found]:
    """Find the first launch of a script by a relative path, in a script that stays in its first directory."""
    for launch in view.launches if not any(view.script.named("cd")) else ():
        program = launch.program
        if program and program.value and program.parts[0].kind == "text" and not program.value.startswith(("/", "~")):
            yield Found(launch.command.at, {"script": program.value})
            return


@likely(
    "AR410 pbs-starts-at-home",
    "PBS starts the script in the home directory, where {script} is not",
    fix='cd "$PBS_O_WORKDIR"',
    source=QSUB,
)
def _starts_at_home(view: View) -> Iterator[Found]:
    script = view.script
    moves = any(each.value == "wd" for each in script.options("-l"))  # Of NCI's PBS.
    moves = moves or any(re.search(r"--?(?:pwd|chdir)|-wdir", command.text) for command in script.commands)
    if script.kind == "pbs" and not script.options("-d", "-w") and not moves and not any(script.named("pushd")):
        yield from _relative_script(view)


@likely(
    "AR411 grid-engine-starts-at-home",
    "Grid Engine starts the script in the home directory, where {script} is not",
    fix="#$ -cwd",
    source=_GE,
)
def _starts_at_home_ge(view: View) -> Iterator[Found]:
    if view.script.kind == "grid_engine" and not view.script.options("-cwd", "-wd"):
        yield from _relative_script(view)


def _resource_lists(view: View, word: str) -> list[Directive]:
    """Return the directives of PBS that request resources by this word."""
    lists = view.script.options("-l") if view.script.kind == "pbs" else ()
    return [directive for directive in lists if re.search(rf"(?:^|,){word}=", directive.value)]


def _counts_nodes(view: View) -> bool:
    """Return whether the script counts the nodes that it got, so that it works with each number of them."""
    counts = any(command.name == "uniq" or "-u" in command.values for command in view.script.named("sort", "uniq"))
    return counts and "PBS_NODEFILE" in view.script.used


@likely(
    "AR412 chunks-on-one-node",
    "without place=scatter PBS may put all {chunks} chunks on one node",
    fix="#PBS -l place=scatter",
    source="pbs_resources(7B) of OpenPBS 23.06",
)
def _no_placement(view: View) -> Iterator[Found]:
    starts = bool(view.launches) or any(command.name in REMOTE for command in view.script.commands)
    text = " ".join(directive.value for directive in view.script.options("-l"))
    if not starts or re.search(r"place=[^,\s]*(?:scatter|excl)", text) or _counts_nodes(view):
        return
    for directive in _resource_lists(view, "select")[:1]:
        # Of nodes whose parts are not named, a site gives whole ones; and few have more than four GPUs, or 64 cores.
        whole = r"ngpus=(?:[4-9]|\d\d)|ncpus=(?:3[2-9]|[4-9]\d|\d{3})"
        match = re.search(rf"select=(\d+):(?!.*\+)(?!.*(?:{whole}))(?=.*(?:cpus|gpus|mem)=)", directive.value)
        if match and int(match[1]) > 1:
            yield Found(directive.value_at, {"chunks": match[1]})


@fatal(
    "AR413 second-select",
    "PBS takes the first -l select only",
    fix="one -l select, with + between chunks",
    source="seen with OpenPBS 23.06",
)
def _second_select(view: View) -> Iterator[Found]:
    for directive in _resource_lists(view, "select")[1:]:
        yield Found(directive.value_at)


@fatal(
    "AR414 nodes-and-select",
    "qsub refuses a job with both -l nodes and -l select",
    fix="-l select alone (OpenPBS, PBS Pro), or -l nodes alone (Torque)",
    source=QSUB,
)
def _mixed(view: View) -> Iterator[Found]:
    nodes = _resource_lists(view, "nodes")
    if nodes and _resource_lists(view, "select"):
        yield Found(nodes[0].value_at)


@fatal(
    "AR415 node-file-elsewhere",
    "PBS_NODEFILE is set on the first node only: here it is expanded on others, and empty",
    fix="expand it in the job script, or copy the file",
    source="pbsdsh(1B), pbs_environment of OpenPBS 23.06",
)
def _node_file_elsewhere(view: View) -> Iterator[Found]:
    starters = ("ssh", "pdsh", "pbsdsh", "pbs_tmrsh", "clush")
    remote = [command for command in view.script.commands if command.started_by(*starters)]
    parts = ((command, part) for command in remote for word in command.words for part in word.parts)
    expanded = {part.at for command, part in parts if command.is_expanded_there(part)}
    for use in view.script.uses:
        if use.name == "PBS_NODEFILE" and use.level and use.at in expanded:
            yield Found(use.at)


@fatal(
    "AR416 lines-are-not-nodes",
    "the node file has {lines} lines for each node: this counts processes",
    fix='sort -u "$PBS_NODEFILE" | wc -l',
    source="qsub(1B), PBS_NODEFILE",
)
def _lines_as_nodes(view: View) -> Iterator[Found]:
    lines = view.resources.processes or 0
    for command in view.script.named("wc") if lines > 1 else ():
        read = [*command.args, *(word for operator, word in command.redirects if operator == "<")]
        if not any(word.names("PBS_NODEFILE") for word in read):
            continue
        for assignment in view.script.assignments:
            counts = [part for part in assignment.parts or () if part.kind == "command"]
            is_it = any(part.at <= command.at < part.at + len(part.text) for part in counts)
            if is_it and re.search(r"N_?NODES|NUM_NODES|NODES$", assignment.name.upper()):
                yield Found(assignment.at, {"lines": lines})


@likely(
    "AR417 pbsdsh-has-no-path",
    "pbsdsh starts {program} with the daemon's environment: no PATH of yours, no modules, no exported variables",
    fix="pbsdsh -- bash -lc 'source env.sh; …', with absolute paths",
    source="pbsdsh(1B) of OpenPBS and Torque",
)
def _bare_pbsdsh(view: View) -> Iterator[Found]:
    for command, call in view.calls("pbsdsh"):
        program = call.rest[0].value if call.rest else None
        if program is not None and "/" not in program and program not in ("bash", "sh", "env", "hostname"):
            yield Found(command.at, {"program": program})


@fatal(
    "AR429 pbsdsh-option-of-torque",
    "pbsdsh of OpenPBS and PBS Pro has no {option}, which is Torque's: it shows its usage, and starts nothing",
    fix="leave it out, and request mpiprocs=1 for one line of the node file on each node; -n INDEX names one",
    source="src/cmds/pbsdsh.c of OpenPBS",
)
def _option_of_torque(view: View) -> Iterator[Found]:
    for command, call in view.calls("pbsdsh") if _resource_lists(view, "select") else ():
        for option in ("-u", "-h", "-e", "-E"):
            if call.get(option):
                yield Found(command.at, {"option": option})


@fatal(
    "AR421 walltime-in-seconds",
    "{value} is {value} seconds: the job ends before it begins to train",
    fix="HH:MM:SS",
    source=f"{QSUB} -l walltime; {_GE} -l h_rt",
)
def _walltime_in_seconds(view: View) -> Iterator[Found]:
    for directive in view.script.options("-l") if view.script.kind in ("pbs", "grid_engine") else ():
        if match := re.search(r"(?:walltime|h_rt)=(\d{1,3})(?:,|$)", directive.value):
            yield Found(directive.value_at, {"value": match[1]})
