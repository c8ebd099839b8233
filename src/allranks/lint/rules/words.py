"""Quoting, word splitting and variables: what the program gets instead of what is written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from allranks.lint.parse import REMOTE
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, TORCHRUN, Edit, Found, fatal, hint, is_expanded_there, likely, torch_launches

#: Variables that a rank or its libraries read from the environment.
_FOR_RANKS = re.compile(
    r"MASTER_ADDR|MASTER_PORT|WORLD_SIZE|RANK|LOCAL_RANK|OMP_NUM_THREADS|(?:NCCL|TORCH_NCCL|GLOO|HF|WANDB)_\w+"
)
_SET_BY_TORCHRUN = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"}
#: Unused variables of a file that lists settings for others.
_MANY = 100
_TYPOGRAPHIC = re.compile("^[–—]|[“”‘’\u00a0]")
_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "GROUP_RANK")
_IN_SINGLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@fatal(
    "AR201 spaces-around-equals",
    "the shell runs a command named {name}: an assignment has no blanks around =",
    fix="{name}=value",
    source=f"{BASH}, Parameters",
)
def _spaced_assignment(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        first = command.args[0].prefix if command.args else ""
        if (
            command.name.isidentifier()
            and first.startswith("=")
            and not first.startswith("==")
            and command.words[0].value == command.name
        ):
            yield Found(command.at, {"name": command.name})


@fatal(
    "AR202 continued-line-is-cut",
    "the shell runs a command named {word}: the line above does not end in a backslash, and the options from here on "
    "are lost",
    fix="end each line of the command but the last in a backslash, with no blank after it and no comment line between",
    source=f"{BASH}, Quoting",
)
def _cut_line(view: View) -> Iterator[Found]:
    if view.script.broken:
        return  # What is not bash is read as something else.
    for command in view.script.commands:
        word = command.words[0] if command.words else None
        if word is not None and re.match(r"--?[A-Za-z]", word.prefix) and word.parts[0].is_verbatim:
            yield Found(command.at, {"word": word.shown})


@fatal(
    "AR203 quotes-in-a-variable",
    "quotes in the value of a variable are text: the program gets {word} with its quote, and the words are split at "
    "blanks",
    fix="use an array: ARGS=(--name 'my run'), and \"${{ARGS[@]}}\"",
    source=f"{BASH}, Word Splitting, Quote Removal",
)
def _literal_quotes(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            for part in word.parts:
                text = part.value or ""
                if part.quote or part.is_verbatim or part.kind != "text":
                    continue
                if re.match(r"(?:--?[\w-]+=)?([\"'])", text) and text.count('"') + text.count("'") == 1:
                    yield Found(word.at, {"word": text})
                    return


@fatal(
    "AR204 first-item-of-array",
    "${name} is the first word of the array alone; the others are lost",
    fix='"${{{name}[@]}}"',
    source=f"{BASH}, Arrays",
)
def _first_of_array(view: View) -> Iterator[Found]:
    arrays = {
        assignment.name for assignment in view.script.assignments if assignment.items and len(assignment.items) > 1
    }
    plain = {
        assignment.name for assignment in view.script.assignments if assignment.items is None and not assignment.parts
    }
    for launch in view.launches:
        for word in launch.command.words:
            for part in word.variables:
                if part.text in arrays - plain:
                    yield Found(part.at, {"name": part.text})


@fatal(
    "AR205 options-in-one-word",
    "the quotes make one word of {words} words: the program gets a single option that it does not know",
    fix='use an array and "${{ARGS[@]}}", or leave the quotes around the variable out',
    source=f"{BASH}, Word Splitting",
)
def _one_word(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            is_made = all(part.quote == '"' and not part.is_verbatim for part in word.parts)
            if is_made and re.match(r"--?[A-Za-z][^\"']*\s--?[A-Za-z]", word.shown):
                yield Found(word.at, {"words": len(word.shown.split())})


@likely(
    "AR206 tilde-in-quotes",
    "~ is not expanded in quotes: {word} names a directory called ~",
    fix='"$HOME/…"',
    source=f"{BASH}, Tilde Expansion",
)
def _quoted_tilde(view: View) -> Iterator[Found]:
    for command in view.script.named("cd", "source", ".", "mkdir", "python", "python3", "torchrun", "bash", "export"):
        for word in command.args:
            first = word.parts[0] if word.parts else None
            if (
                first
                and first.quote
                and first.text.startswith("~/")
                and first.kind == "text"
                and "-c" not in command.values
            ):
                yield Found(word.at, {"word": word.shown})


@likely(
    "AR207 variable-in-single-quotes",
    "${name} is not expanded in single quotes: the program gets the text ${name}",
    fix="use double quotes",
    source=f"{BASH}, Quoting",
)
def _single_quotes(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            for part in word.parts:
                names = _IN_SINGLE.findall(part.text) if part.quote == "'" and part.is_verbatim else []
                if names and view.script.sets(names[0]):
                    yield Found(part.at, {"name": names[0]})


@fatal(
    "AR208 blank-after-equals",
    "{option} gets an empty value, and {value} is taken for the script or for an argument",
    fix="leave the blank after = out",
    source="argparse of Python",
)
def _empty_value(view: View) -> Iterator[Found]:
    for launch in view.launches:
        args = launch.command.args
        for word, after in itertools.pairwise(args):
            value = word.value or ""
            is_gap = re.fullmatch(r"--[\w-]+=", value) and all(part.is_verbatim for part in word.parts)
            if is_gap and not after.prefix.startswith("-") and not word.parts[-1].quote and after.at > word.end:
                yield Found(word.at, {"option": value, "value": after.shown})


@fatal(
    "AR209 typographic-character",
    "{character} is no hyphen, quote or blank of ASCII: the shell takes it for a letter",
    fix="type it again: it comes from a word processor or web page",
    source=BASH,
)
def _typographic(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        if not (command.name in REMOTE or any(launch.command is command for launch in view.launches)):
            continue
        for word in command.words:
            for part in word.parts:
                match = _TYPOGRAPHIC.search(part.text) if part.kind == "text" and not part.quote else None
                if match:
                    yield Found(part.at, {"character": f"U+{ord(match[0]):04X}"})


@fatal(
    "AR210 windows-line-ends",
    "lines end in a carriage return: the interpreter of the first line is not found, and each last word has one at "
    "its end",
    fix="allranks lint --fix, or dos2unix",
    source="sbatch: Batch script contains DOS line breaks; execve(2)",
)
def _carriage_returns(view: View) -> Iterator[Found]:
    data = view.script.text.data
    first = data.find(b"\r\n")
    if first >= 0:
        edits = tuple(Edit(match.start(), match.start() + 1, b"") for match in re.finditer(rb"\r\n", data))
        yield Found(first, {}, edits)


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
    used = {use.name for use in script.uses}
    last = max(launch.command.order for launch in view.launches)
    for assignment in script.assignments:
        name = assignment.name
        if (
            assignment.is_prefix
            or assignment.level
            or name in script.exported
            or name in used
            or assignment.order > last
        ):
            continue
        if name in _SET_BY_TORCHRUN and all(launch.is_torch and launch.call for launch in view.launches):
            continue
        if _FOR_RANKS.fullmatch(name) and assignment.parts is not None:
            yield Found(assignment.at, {"name": name}, (Edit(assignment.at, assignment.at, b"export "),))


@likely(
    "AR212 misspelled-variable",
    "${name} is never set here, and {meant} is set and never used",
    fix="write ${meant}, or set {name}",
    source=BASH,
)
def _misspelled(view: View) -> Iterator[Found]:
    script = view.script
    if any(script.named("source", ".", "eval")):
        return  # What they set is not known.
    set_ = {assignment.name for assignment in script.assignments}
    used = {use.name for use in script.uses}
    unused = [name for name in set_ - used - script.exported if len(name) > 4]
    if len(unused) > _MANY:
        return
    seen: set[str] = set()
    for use in script.uses:
        name = use.name
        if (
            name in set_
            or name in seen
            or use.has_default
            or len(name) < 5
            or name.startswith(("SLURM_", "PBS_", "SGE_"))
        ):
            continue
        near = [
            other
            for other in unused
            if SequenceMatcher(None, name, other).ratio() > 0.88 and abs(len(name) - len(other)) < 2
        ]
        if len(near) == 1:
            seen.add(name)
            yield Found(use.at, {"name": name, "meant": near[0]})


@fatal(
    "AR213 rank-on-the-command-line",
    "the shell expands ${name} before torchrun sets it: it is empty, or the same for all ranks",
    fix='read os.environ["{name}"] in the training script',
    source=f"{TORCHRUN}, environment variables",
)
def _rank_on_command_line(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        for word in launch.command.args:
            for part in word.variables:
                if part.text in _RANK_VARIABLES and not view.script.sets(part.text) and not part.has_default:
                    is_local = part.text == "LOCAL_RANK"
                    if is_local or (
                        launch.call and launch.program and word.at > launch.program.at and view.script.kind == "slurm"
                    ):
                        yield Found(part.at, {"name": part.text})


@fatal(
    "AR214 host-of-the-batch-shell",
    "--local-addr is the first node's name on every node",
    fix="leave --local-addr out, or expand it on the node in single quotes",
    source=f"{TORCHRUN} --local-addr",
)
def _host_of_batch(view: View) -> Iterator[Found]:
    for launch in torch_launches(view):
        if launch.starter is None or launch.call is None or launch.tasks == 1 or launch.command.context.loops:
            continue
        given = launch.call.get("--local-addr")
        for part in given.value.parts if given and given.value else ():
            if part.kind == "command" and "hostname" in part.text and not is_expanded_there(part, launch.command):
                yield Found(part.at)


@likely(
    "AR215 bash-in-sh",
    "the first line names sh, which has no {what} where it is dash (Debian, Ubuntu)",
    fix="#!/bin/bash",
    source="dash(1)",
)
def _bashisms(view: View) -> Iterator[Found]:
    if not re.fullmatch(r"#!\s*/bin/(?:sh|dash)\b.*", view.script.shebang):
        return
    for command in view.script.commands:
        if command.context.level == 0 and command.name == "source":
            yield Found(command.at, {"what": "source"})
            return
    for assignment in view.script.assignments:
        if assignment.items is not None and assignment.level == 0:
            yield Found(assignment.at, {"what": "arrays"})
            return


@hint(
    "AR216 cd-not-checked",
    "if cd {directory} fails, the job runs on in another directory",
    fix="cd {directory} || exit 1, or set -e",
    source=BASH,
)
def _cd_unchecked(view: View) -> Iterator[Found]:
    if "errexit" in view.script.shell_options or view.script.kind == "plain":
        return
    for command in view.script.named("cd"):
        context = command.context
        is_checked = context.chain or context.is_conditional or context.is_condition or context.is_substitution
        target = command.args[0] if command.args else None
        is_sure = (
            target is None
            or target.names("PBS_O_WORKDIR", "SLURM_SUBMIT_DIR", "HOME")
            or target.prefix.startswith("..")
        )
        later = any(launch.command.order > command.order for launch in view.launches)
        if not is_checked and not is_sure and later and context.level == 0:
            yield Found(command.at, {"directory": target.shown if target else ""})
