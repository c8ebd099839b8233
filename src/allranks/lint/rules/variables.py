"""Variables of the environment and of schedulers: what ranks see of them, and where they are empty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache

from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, TORCHRUN, Edit, Found, fatal, likely
from allranks.lint.scheduler_variables import VARIABLES, WITHOUT_BARS

#: Variables that a rank or its libraries read from the environment.
_FOR_RANKS = re.compile(
    r"MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|OMP_NUM_THREADS|PYTHONPATH|(?:NCCL|TORCH_NCCL|GLOO|HF|WANDB)_\w+"
)
_SET_BY_TORCHRUN = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
#: Unused variables of a file that lists settings for others.
_MANY = 100
#: An argument without which the shell ends.
_REQUIRED = re.compile(rb"\d+:?\?")
_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "GROUP_RANK")


@likely(
    "AR211 not-exported",
    "{name} is set for this shell only: the ranks do not see it, unless the environment has it already",
    fix="export {name}=…",
    source=f"{BASH}, Environment",
)
def _not_exported(view: View) -> Iterator[Found]:
    script = view.script
    if not view.launches or "allexport" in script.shell_options:
        return
    passed_on = script.exported | script.used | (_SET_BY_TORCHRUN if view.torchrun_alone else set())
    last = max(launch.command.order for launch in view.launches)
    for assignment in script.assignments:
        is_plain = not assignment.is_prefix and not assignment.level and assignment.parts is not None
        if not is_plain or assignment.order > last or assignment.name in passed_on:
            continue
        # A scheduler exports the devices that it gives.
        is_devices = assignment.name == "CUDA_VISIBLE_DEVICES" and script.kind == "plain"
        if is_devices or _FOR_RANKS.fullmatch(assignment.name):
            yield Found(assignment.at, {"name": assignment.name}, (Edit(assignment.at, assignment.at, b"export "),))


@likely(
    "AR223 unset-python-path",
    "set -u ends the script here where PYTHONPATH is not set, as in most shells",
    fix="${{PYTHONPATH:-}} in the place of $PYTHONPATH",
    source=f"{BASH}, set -u",
)
def _unset_path(view: View) -> Iterator[Found]:
    script = view.script
    setters = [command.order for command in script.named("source", ".", "eval", "module", "ml")]
    first = min([*setters, *(each.order for each in script.assigned("PYTHONPATH"))], default=0)
    if "nounset" not in script.shell_options or len(script.text.files) > 1:
        return
    for use in script.uses:
        if use.name == "PYTHONPATH" and not use.level and not use.has_default and use.order <= first:
            yield Found(use.at)
            return


@likely(
    "AR212 misspelled-variable",
    "${name} is never set here, and {meant} is set and never used",
    fix="write ${meant}, or set {name}",
    source=BASH,
)
def _misspelled(view: View) -> Iterator[Found]:
    script = view.script
    if view.runs_more:
        return
    assigned = {assignment.name for assignment in script.assignments}
    # NAME=${NAME:-1} is no use of it.
    own = {(each.name, part.at) for each in script.assignments for part in each.parts or ()}
    used = {use.name for use in script.uses if (use.name, use.at) not in own}
    unused = [name for name in assigned - used - script.exported if len(name) > 4]
    if len(unused) > _MANY:
        return
    seen = assigned.copy()
    for use in script.uses:
        name = use.name
        if name in seen or use.has_default or len(name) < 5 or name.startswith(("SLURM_", "PBS_", "SGE_")):
            continue
        alike = [other for other in unused if abs(len(name) - len(other)) < 2]
        near = [other for other in alike if SequenceMatcher(None, name, other).ratio() > 0.88]
        if len(near) == 1:
            seen.add(name)
            yield Found(use.at, {"name": name, "meant": near[0]})


@likely(
    "AR225 never-set",
    "${name} is set nowhere here, and {option} gets nothing",
    fix="set {name}, or take it from the arguments: {name}=${{1:?}}",
    source=BASH,
)
def _never_set(view: View) -> Iterator[Found]:
    launches = [launch for launch in view.launches if not launch.command.context.function and not view.runs_more]
    for given in [given for launch in launches for given in launch.call.given]:
        part = given.value.first if given.value and len(given.value.parts) == 1 else None
        is_own = part is not None and part.kind == "variable" and bool(re.fullmatch(r"[a-z]\w+", part.text))
        if (
            part
            and is_own
            and part.value is None
            and not (part.level or part.has_default or view.script.sets(part.text))
        ):
            yield Found(part.at, {"name": part.text, "option": given.typed})


@likely(
    "AR219 variable-of-no-scheduler",
    "no scheduler sets ${name}: it is empty",
    fix="${meant}",
    source="slurm.schedmd.com/sbatch.html, srun.html, environment variables; qsub(1B), ENVIRONMENT",
)
def _no_such_variable(view: View) -> Iterator[Found]:
    script = view.script
    odd = [use for use in script.uses if use.name.startswith(("SLURM_", "PBS_")) and use.name not in VARIABLES]
    if not odd or view.runs_more:
        return
    for use in odd:
        meant = WITHOUT_BARS.get(use.name.replace("_", "")) or next(iter(_near(use.name)), "")
        if meant and not use.has_default and not script.sets(use.name) and not view.is_printed(use.at):
            yield Found(use.at, {"name": use.name, "meant": meant})


@cache
def _near(name: str) -> list[str]:
    return get_close_matches(name, sorted(VARIABLES), n=1, cutoff=0.94)


@likely(
    "AR221 local-outside-a-function",
    "bash knows local in a function only: here it fails, and {name} is not set",
    fix="leave local out",
    source=f"{BASH}, local",
)
def _local_at_the_top(view: View) -> Iterator[Found]:
    for command in view.script.named("local"):
        if not command.context.function and not command.context.level:
            names = [each.name for each in view.script.assignments if command.at < each.at < command.end]
            yield Found(command.at, {"name": names[0] if names else command.first})


@fatal(
    "AR213 rank-on-the-command-line",
    "the shell expands ${name} before torchrun sets it: it is empty, or the same for all ranks",
    fix='read os.environ["{name}"] in the training script',
    source=f"{TORCHRUN}, environment variables",
)
def _rank_on_command_line(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        for word in launch.command.args:
            for part in word.variables:
                if part.text not in _RANK_VARIABLES or view.script.sets(part.text) or part.has_default:
                    continue
                is_argument = launch.program is not None and word.at > launch.program.at
                if part.text == "LOCAL_RANK" or (is_argument and view.script.kind == "slurm"):
                    yield Found(part.at, {"name": part.text})


@fatal(
    "AR214 host-of-the-batch-shell",
    "--local-addr is the first node's name on every node",
    fix="leave --local-addr out, or expand it on the node in single quotes",
    source=f"{TORCHRUN} --local-addr",
)
def _host_of_batch(view: View) -> Iterator[Found]:
    for launch, given in view.torchrun_given("--local-addr"):
        if launch.starter is None or launch.tasks == 1 or launch.command.context.loops:
            continue
        for part in given.value.parts:
            if part.kind == "command" and "hostname" in part.text and not launch.command.is_expanded_there(part):
                yield Found(part.at)


@likely(
    "AR226 shift-of-too-few",
    "an argument that may be left out: with fewer than {count} shift {what}",
    fix="shift $(($# < {count} ? $# : {count}))",
    source=f"{BASH}, shift",
)
def _shift(view: View) -> Iterator[Found]:
    given = [use for use in view.script.uses if use.name.isdecimal() and use.has_default]
    script, data = view.script, view.script.text.data
    optional = {int(use.name): use.order for use in given if not _REQUIRED.match(data[use.at :].lstrip(b"${"))}
    if "#" in script.used or any(each.name == "set" and "--" in each.values for each in script.commands):
        return  # It counts its arguments.
    for command in script.named("shift"):
        around = command.context
        count = command.args[0].number if command.args else 1
        is_sure = not (around.level or around.function or around.loops or around.is_conditional or around.chain)
        if not is_sure or not any(place <= (count or 0) and at < command.order for place, at in optional.items()):
            return
        if "errexit" in script.shell_options:
            yield Found(command.at, {"count": count, "what": "fails, and set -e ends the script"})
        elif count != 1 and any(use.name in "@*" and use.order > command.order for use in script.uses):
            yield Found(command.at, {"count": count, "what": "does nothing, and $@ still has those that are given"})
        return
