"""Directories of a job: where its logs go, and where its script runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from allranks.lint.model import Directive
from allranks.lint.reading import View
from allranks.lint.rules.base import SBATCH, Found, fatal, hint

#: Patterns in the name of a log that stand for the number of the job.
_OF_JOB = re.compile("%[jJA]")
#: Names of variables that hold the directory that a job is submitted from, most often.
_OF_PROJECT = re.compile(r"^\$(?:PWD$|.*(?:SUBMIT|ROOT|REPO|PROJECT|WORK|BASE|CODE))")
#: How a bash script finds its own directory, and what says that it knows of the one it was submitted from.
_OF_SCRIPT = re.compile(r"dirname[^)]*(?:BASH_SOURCE|\$\{?0)")
_SUBMITTED_FROM = {"slurm": "SLURM_SUBMIT_DIR", "pbs": "PBS_O_WORKDIR", "grid_engine": "SGE_O_WORKDIR"}
_KNOWS = re.compile(rb"_SUBMIT_DIR|_O_WORKDIR|scontrol show job")
_VARIABLE = re.compile(r"\$\{?(\w+)")


def _made(view: View) -> set[str]:
    """Return the directories that the script makes, with those above them."""
    words = (word.shown for command in view.script.named("mkdir") for word in command.args)
    folders = [PurePath(_in_project(word)) for word in words if word[:1] not in ("", "-", "/")]
    return {str(each) for folder in folders for each in (folder, *folder.parents) if each.parts}


def _in_project(path: str) -> str:
    """Return a path below the directory that a job is most often submitted from, without that at its start."""
    variable, _, rest = path.partition("/")
    if variable[1:].isidentifier() and _OF_PROJECT.search(variable):
        return rest
    command, _, rest = path.rpartition(")/")
    return rest if command.startswith("$(") and command.endswith(("pwd", "rev-parse --show-toplevel")) else path


def _log_folders(view: View, *names: str) -> list[tuple[Directive, str]]:
    """Return the directives that name a log in a directory, with that."""
    return [(each, each.value.rpartition("/")[0]) for each in view.script.options(*names) if "/" in each.value]


@hint(
    "AR408 log-directory-made-too-late",
    "the scheduler opens its log before this script runs, and {directory} is not there then: the job fails without a "
    "word",
    fix="create it before sbatch, with no number of the job in its name",
    source=f"{SBATCH} --output",
    versions="Slurm before 23.02",
)
def _late_directory(view: View) -> Iterator[Found]:
    for directive, folder in _log_folders(view, "output", "error"):
        if folder.removeprefix("./") in _made(view) or _OF_JOB.search(folder):
            yield Found(directive.value_at, {"directory": folder})


@hint(
    "AR409 log-directory",
    "where {directory} does not exist the job fails without a word",
    fix="create it before sbatch",
    source=f"{SBATCH} --output",
    versions="Slurm before 23.02",
)
def _directory(view: View) -> Iterator[Found]:
    for directive, folder in _log_folders(view, "output")[-1:]:
        is_there = folder.startswith("/") or folder in (".", "..") or folder.removeprefix("./") in _made(view)
        if not is_there and not _OF_JOB.search(folder):  # That is AR408.
            yield Found(directive.value_at, {"directory": folder})


@fatal(
    "AR434 directory-of-the-copied-script",
    "the scheduler runs a copy of this script from its spool directory: {what} there, not beside yours",
    fix="${variable}, the directory that it was submitted from",
    source="slurm.schedmd.com/faq.html; qsub(1B), PBS_O_WORKDIR; qsub(1), SGE_O_WORKDIR",
)
def _spooled(view: View) -> Iterator[Found]:
    script = view.script
    if script.kind == "plain" or _KNOWS.search(script.text.data):
        return
    holders: set[str] = set()

    def is_beside(text: str) -> bool:
        return bool(_OF_SCRIPT.search(text)) or not holders.isdisjoint(_VARIABLE.findall(text))

    for assignment in script.assignments:
        if is_beside("".join(part.shown for part in assignment.parts or ())):
            holders.add(assignment.name)
    started = [(launch.command, launch.call.rest[:1], "the training script is looked for") for launch in view.launches]
    whats = {"cd": "cd goes", **dict.fromkeys(("source", ".", "bash", "sh"), "the shell script is looked for")}
    read = [(each, each.args, whats[each.name]) for each in script.named(*whats) if not each.context.is_substitution]
    for command, words, what in sorted([*read, *started], key=lambda each: each[0].order):
        around = command.context
        is_sure = not (around.level or around.is_conditional or around.is_condition or around.chain == "||")
        if words and is_sure and is_beside(words[0].shown):
            yield Found(words[0].at, {"what": what, "variable": _SUBMITTED_FROM[script.kind]})
            return
