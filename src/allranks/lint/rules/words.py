"""Quoting and word splitting: what the program gets instead of what is written."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from allranks.lint.model import MPI, REMOTE, Part
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, Edit, Found, fatal, hint, likely

_TYPOGRAPHIC = re.compile("^[–—]|[“”‘’\u00a0]")
_FOR_BASH = re.compile(r"(?!#!)|#!.*\b(?:ba|da)?sh\b")
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)=")
_FUNCTION = re.compile(rb"^function[ \t]+\w+", re.MULTILINE)
_RANDOM = re.compile(r"\bRANDOM\b")
#: Directives of schedulers that are not known here.
_OF_A_SCHEDULER = re.compile(rb"^#(?:BSUB|PJM|OAR|COBALT|MSUB|JSUB)\s", re.MULTILINE)
_ONE_VARIABLE = re.compile(r"\$\{?[A-Z][A-Z0-9_]*\}?")
#: Commands that take files and directories.
_OF_FILES = ("cd", "source", ".", "mkdir", "conda", "mamba", "micromamba")
#: A backslash, a blank and a comment in a text of several lines, which the shell keeps all.
_CUT_IN_TEXT = re.compile(rb"^[^#\n]*[^\\#\n]\\(?=[ \t]+#)", re.MULTILINE)
#: ``[ -z "1" ]``: a word that is not empty, with no variable in it.
_CONSTANT = re.compile(rb"\[\[?\s+(?:!\s+)?-[nz]\s+(\"?\w+\"?|'\w+')\s+\]")
_IN_SINGLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@fatal(
    "AR201 spaces-around-equals",
    "the shell runs a command named {name}: an assignment has no blanks around =",
    fix="{name}=value",
    source=f"{BASH}, Parameters",
)
def _spaced_assignment(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        value = command.args[0] if command.args else None
        is_name = command.name.isidentifier() and command.words[0].value == command.name
        if is_name and value and not value.parts[0].quote and re.match(r"=(?!=)", value.prefix):
            yield Found(command.at, {"name": command.name})


@fatal(
    "AR222 equals-between-blanks",
    "{before} = {after} are three arguments",
    fix="{before}={after}",
    source=f"{BASH}, Word Splitting; hydra.cc, override grammar",
)
def _spaced_argument(view: View) -> Iterator[Found]:
    for launch in view.launches:
        words = launch.command.args
        for at, word in enumerate(words[1:-1], 1):
            if word.value == "=" and not word.parts[0].quote:
                yield Found(words[at - 1].at, {"before": words[at - 1].shown, "after": words[at + 1].shown})
                break


@fatal(
    "AR202 continued-line-is-cut",
    "{what}, and the options from here on are lost",
    fix="end each line of the command but the last in a backslash, with no blank after it and no comment line between",
    source=f"{BASH}, Quoting",
)
def _cut_line(view: View) -> Iterator[Found]:
    if view.script.broken:
        return  # Else other text is read as bash.
    for assignment in view.script.assignments:  # The parser takes --option=value for one.
        if assignment.name.startswith("-"):
            yield Found(assignment.at, {"what": _cut_before(assignment.name)})
            return
    is_found = False
    for command in view.script.commands:
        word = command.words[0] if command.words else None
        is_text = word is not None and (word.parts[0].is_verbatim or command.context.level > 0)
        if word is not None and is_text and re.match(r"--?[A-Za-z]", word.prefix):
            yield Found(command.at, {"what": _cut_before(word.shown)})
            is_found = True
    given = [word for launch in view.launches for word in launch.command.args if word.value in ("#", "\\")]
    of_values = [word.at for word in given if not any(part.is_verbatim or part.quote for part in word.parts)]
    cut = _CUT_IN_TEXT.search(view.script.text.data) if of_values else None
    for at in [*view.script.cut_by_comment, *([cut.end() - 1] if cut else [])][:1] if not is_found else ():
        yield Found(at, {"what": "a backslash before a blank is an argument, and continues no line"})


def _cut_before(word: str) -> str:
    return f"the shell runs a command named {word}: the line above does not end in a backslash"


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
    assigned = view.script.assignments
    arrays = {assignment.name for assignment in assigned if assignment.items and len(assignment.items) > 1}
    plain = {assignment.name for assignment in assigned if assignment.items is None and not assignment.parts}
    for launch in view.launches:
        for part in launch.command.variables:
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
        for word in command.args if "-c" not in command.values else ():
            first = word.first
            # A value may have had no quotes where it was set: that ~ is expanded.
            if first and first.quote and first.is_verbatim and first.text.startswith("~/") and word.at <= first.at:
                yield Found(word.at, {"word": word.shown})
    commands = [*view.script.named(*_OF_FILES), *(launch.command for launch in view.launches)]
    got = {word.first.text for each in commands for word in each.args if word.first and _keeps_tilde(word.first)}
    for assignment in view.script.assignments:
        value = assignment.parts[0] if assignment.parts else None
        # What is read of a value without quotes is the same.
        if value and value.text in got and view.script.text.data[value.at - 1 : value.at] in (b'"', b"'"):
            yield Found(value.at, {"word": "".join(part.shown for part in assignment.parts or ())})


def _keeps_tilde(part: Part) -> bool:
    """Return whether a part has a ~ that comes from a variable, and that no shell expands any more."""
    return part.text.startswith("~/") and not part.is_verbatim and (part.level == 0 or bool(part.quote))


@hint(
    "AR224 placeholder-is-a-redirection",
    "<{name}> is a redirection: the shell reads a file named {name}, and writes to what follows",
    fix="put the value in its place, in the script's variables",
    source=f"{BASH}, REDIRECTION",
)
def _placeholder(view: View) -> Iterator[Found]:
    data = view.script.text.data
    for command in view.script.commands:
        for operator, word in command.redirects if not command.context.level else ():
            before, name = data[word.at - 2 : word.at], data[word.at : word.end].decode("utf-8", "replace")
            after = data[word.end : word.end + 2]
            is_mark = operator == "<" and before[-1:] == b"<" and re.fullmatch(r"[A-Za-z][\w.-]*", name)
            if is_mark and after[:1] == b">" and (not before[:1].isspace() or after[1:] in (b" ", b":", b"/", b"\n")):
                yield Found(word.at - 1, {"name": name})


@likely(
    "AR207 variable-in-single-quotes",
    "${name} is not expanded in single quotes or after a backslash: the program gets the text ${name}",
    fix="use double quotes, and no backslash",
    source=f"{BASH}, Quoting",
)
def _single_quotes(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word in launch.command.args:
            for part in word.parts:
                is_in_value = part.kind == "text" and not part.is_verbatim and not part.quote
                is_read = (part.quote == "'" and part.is_verbatim) or is_in_value
                names = _IN_SINGLE.findall(part.text) if is_read else []
                is_all = part.quote == "'" and bool(_ONE_VARIABLE.fullmatch(part.text)) and len(word.parts) == 1
                if names and (view.script.sets(names[0]) or (is_all and not launch.command.context.level)):
                    yield Found(part.at, {"name": names[0]})
    for command in view.script.named("scontrol", *_OF_FILES):
        activates = command.first == "activate" or command.name not in ("conda", "mamba", "micromamba")
        for word in command.args if activates and not command.context.level else ():
            match = _IN_SINGLE.match(word.value or "")
            is_meant = match and (command.name != "scontrol" or match[1].startswith("SLURM_"))
            if match and is_meant and word.parts[0].kind == "text":
                yield Found(word.at, {"name": match[1]})


@fatal(
    "AR208 blank-after-equals",
    "{option} gets an empty value, and {value} is taken for the script or for an argument",
    fix="leave the blank after = out",
    source="argparse of Python",
)
def _empty_value(view: View) -> Iterator[Found]:
    for launch in view.launches:
        for word, after in itertools.pairwise(launch.command.args):
            option = word.value or ""
            is_verbatim = all(part.is_verbatim for part in word.parts)
            if not re.fullmatch(r"--[\w-]+=", option) or not is_verbatim or word.parts[-1].quote:
                continue
            if not after.prefix.startswith("-") and after.at > word.end:
                yield Found(word.at, {"option": option, "value": after.shown})


@fatal(
    "AR209 typographic-character",
    "{character} is no hyphen, quote or blank of ASCII: the shell takes it for a letter",
    fix="type it again: it comes from a word processor or web page",
    source=BASH,
)
def _typographic(view: View) -> Iterator[Found]:
    launchers = [launch.command for launch in view.launches]
    for command in view.script.commands:
        if command.name not in REMOTE and not any(launcher is command for launcher in launchers):
            continue
        for word in command.words:
            for part in word.parts:
                match = _TYPOGRAPHIC.search(part.text) if part.kind == "text" and not part.quote else None
                if match:
                    yield Found(part.at, {"character": f"U+{ord(match[0]):04X}"})


@likely(
    "AR227 bracket-without-a-blank",
    "[ ends at a word of its own: here it fails with missing ], as if the test were false",
    fix="a blank before ]",
    source="test(1)",
)
def _joined_bracket(view: View) -> Iterator[Found]:
    for start, end in view.script.tests:
        text = view.script.text.data[start:end]
        if text.startswith(b"[ ") and not text[-2:-1].isspace():
            yield Found(end - 1, {}, (Edit(end - 1, end - 1, b" "),))


@likely(
    "AR228 test-of-a-constant",
    "{word} is a text: -z of it is never true, and -n always",
    fix='"${name}"',
    source="test(1)",
)
def _constant_test(view: View) -> Iterator[Found]:
    for start, _ in view.script.tests:
        if match := _CONSTANT.match(view.script.text.data, start):
            word = match[1].decode()
            yield Found(match.start(1), {"word": word, "name": word.strip("\"'")})


@fatal(
    "AR210 windows-line-ends",
    "lines end in a carriage return, which becomes part of each last word: an interpreter in the first line is not "
    "found",
    fix="allranks lint --fix, or dos2unix",
    source="sbatch: Batch script contains DOS line breaks; execve(2)",
)
def _carriage_returns(view: View) -> Iterator[Found]:
    text = view.script.text
    ends = (match.start() for match in re.finditer(rb"\r\n", text.data))
    for _, of_file in itertools.groupby(ends, lambda at: text.file_of(at).start):
        edits = tuple(Edit(at, at + 1, b"") for at in of_file)
        yield Found(edits[0].start, {}, edits)


@likely(
    "AR220 commas-in-an-array",
    "words of an array are separated by blanks: the comma belongs to {word}",
    fix="leave the commas out",
    source=f"{BASH}, Arrays",
)
def _commas(view: View) -> Iterator[Found]:
    lists = [(each.items, each.at) for each in view.script.assignments if each.items]
    loops = {loop.at: loop.words for command in view.script.commands for loop in command.context.loops}
    for words, at in [*lists, *((words, at) for at, words in loops.items())]:
        values = [word.value or "" for word in words]
        is_list = len(values) > 1 and all(value.endswith(",") and "," not in value[:-1] for value in values[:-1])
        ends = [(word, word.parts[-1]) for word in words[:-1] if word.parts]
        if is_list and all(end.is_verbatim and not end.quote and word.at <= end.at < word.end for word, end in ends):
            yield Found(at, {"word": values[0]})


@likely(
    "AR215 bash-in-sh",
    "the first line names sh, which has no {what} where it is dash (Debian, Ubuntu)",
    fix="#!/bin/bash",
    source="dash(1)",
)
def _bashisms(view: View) -> Iterator[Found]:
    # On most clusters sh is bash.
    if (
        view.script.kind != "plain"
        or _OF_A_SCHEDULER.search(view.script.text.data)
        or not re.fullmatch(r"#!\s*(?:/usr)?/bin/(?:sh|dash)\b.*", view.script.shebang)
    ):
        return
    sources = [command.at for command in view.script.named("source") if command.context.level == 0]
    arrays = [each.at for each in view.script.assignments if each.items is not None and each.level == 0]
    randoms = [
        each.at
        for each in view.script.assignments
        if each.level == 0
        and any(part.kind in ("variable", "arithmetic") and _RANDOM.search(part.text) for part in each.parts or ())
    ]
    if sources:
        yield Found(sources[0], {"what": "source"})
    elif arrays:
        yield Found(arrays[0], {"what": "arrays"})
    elif randoms and not view.script.sets("RANDOM"):
        yield Found(randoms[0], {"what": "RANDOM"})
    elif match := _FUNCTION.search(view.script.text.data):
        yield Found(match.start(), {"what": "word function"})


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
        context, target = command.context, command.args[0] if command.args else None
        is_checked = context.chain or context.is_conditional or context.is_condition or context.is_substitution
        if target is None or is_checked or context.level:
            continue
        is_sure = target.names("PBS_O_WORKDIR", "SLURM_SUBMIT_DIR", "HOME") or target.prefix.startswith("..")
        if not is_sure and any(launch.command.order > command.order for launch in view.launches):
            yield Found(command.at, {"directory": target.shown})


@fatal(
    "AR218 assignment-as-program",
    "{starter} takes {word} for the program to start, and does not find it",
    fix="env {word} … in its place, or export {name} before",
    source="execve(2): srun, mpirun and nohup are no shells; bash(1), SIMPLE COMMANDS",
)
def _assignment_as_program(view: View) -> Iterator[Found]:
    for command, call in view.calls("srun", *MPI, "nohup", "exec", "nice", "setsid", "numactl"):
        word = call.rest[0] if call.rest else None
        before = command.words[max(0, len(command.words) - len(call.rest) - 1)]
        if word is None or (before is not command.words[0] and before.prefix.startswith("-") and command.name in MPI):
            continue  # An option that is not known may take it.
        if (match := _ASSIGNS.match(word.prefix)) and word.parts[0].is_verbatim and not word.parts[0].quote:
            yield Found(word.at, {"starter": command.name, "word": word.shown, "name": match[1]})
    # What a variable becomes is no assignment: CMD='LR=1 python train.py'; $CMD
    assigned = ((each.name, each.items) for each in view.script.assignments if each.items and len(each.items) > 1)
    lists = {name: items[0] for name, items in assigned if _ASSIGNS.match(items[0].prefix)}
    for command in view.script.commands:
        first = command.words[0] if command.words else None
        part = first.first if first else None
        is_by_env = bool(command.context.via) and command.context.via[-1].name in ("env", "sudo")
        if first is None or part is None or part.level != command.context.level or is_by_env:
            continue
        if part.is_verbatim and first.at <= part.at < first.end:
            continue  # It stands there.
        item = lists.get(part.text.removesuffix("[@]")) if part.kind == "variable" else None
        match = _ASSIGNS.match((item or first).prefix)
        if match and (item or (len(command.words) > 1 and not part.quote)):
            yield Found(command.at, {"starter": "the shell", "word": match.string, "name": match[1]})


@likely(
    "AR229 dollar-missing",
    "{program} gets the word {name}, not the number in it: it ends nothing, and waits for nothing",
    fix='"${name}"',
    source=f"{BASH}, kill and wait",
)
def _name_without_dollar(view: View) -> Iterator[Found]:
    for command in view.script.named("kill", "wait"):
        for word in command.args:
            name = word.value or ""
            if name.isidentifier() and f"SIG{name}" not in signal.Signals.__members__ and view.script.sets(name):
                yield Found(word.at, {"program": command.name, "name": name})


@fatal(
    "AR217 syntax-error",
    "bash cannot read {name}: {message}",
    fix="close what is open there: a quote, a bracket, if … fi, do … done; bash -n shows whether that was all",
    source=f"{BASH}, -n",
)
def _syntax_error(view: View) -> Iterator[Found]:
    for name, (at, data) in view.script.unparsed.items():
        if not all(map(_FOR_BASH.match, (view.script.shebang, data.decode("latin-1")))):
            continue
        # Our parser fails on a few scripts that are right. With -n bash reads all, and runs nothing.
        data = data.replace(b"\r\n", b"\n")
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                ["bash", "-n"], input=data, capture_output=True, timeout=5, check=False, env={"LC_ALL": "C"}
            )
            lines = [line for line in done.stderr.decode(errors="replace").splitlines() if "warning:" not in line]
            if done.returncode == 2 and lines:
                yield Found(at, {"name": name, "message": lines[0].removeprefix("bash: ")})
