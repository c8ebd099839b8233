"""What `qsub` makes of its arguments, the script's directives, and the environment: a wish, or a refusal."""

from __future__ import annotations

import getopt
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pbs_standin.words import QSUB_USAGE, Flavour, RefusedError

OPTIONS = {
    "openpbs": "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz",
    "torque": "a:A:b:c:C:d:D:e:fF:hIj:k:l:m:M:nN:o:p:P:q:r:S:t:T:u:v:VW:w:xXz",
}
#: What `-j`, `-k` and `-r` take.
TAKEN = {
    "-j": {"oe", "eo", "n"},
    "-k": {"o", "e", "oe", "eo", "n", "do", "de", "doe", "deo", "od", "ed", "oed", "eod", "edo"},
    "-r": {"y", "n"},
}
#: Of the caller's environment, what a job gets as PBS_O_…
OWN = ("HOME", "LANG", "LOGNAME", "PATH", "MAIL", "SHELL", "TZ")
DEPENDENCIES = {"after", "afterok", "afternotok", "afterany", "before", "beforeok", "beforenotok", "beforeany", "on"}


@dataclass
class Call:
    """How a command was called: by whom, where, and with what."""

    command: str
    args: list[str]
    folder: str
    env: dict[str, str]
    host: str
    terminal: bool
    path: str


@dataclass
class Wish:
    """What a job shall be.

    Attributes:
        options: by letter; the command line comes before the script, and there what comes last.
        fixed: the options of the command line.
        resources: of `-l`; the command line comes before the script, and there what comes first.
        program: what to run instead of a script, after `--`.
        script: the text of the script, as it is at submission.
    """

    call: Call
    options: dict[str, str] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    resources: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)
    script: str = ""
    name: str = ""

    @property
    def attributes(self) -> dict[str, str]:
        """What `-W` says, by name."""
        return dict(part.partition("=")[::2] for part in self.options.get("-W", "").split("\n") if part)


def usage(words: str) -> RefusedError:
    """Refuse, with the whole usage."""
    return RefusedError(f"{words}\n{QSUB_USAGE.rstrip()}", 2)


def parsed(call: Call, flavour: Flavour) -> tuple[Wish, list[str]]:
    """Return the wish of a command line, and what is left of it: the script, if any."""
    args = call.args
    try:
        given, rest = getopt.getopt(args, OPTIONS[flavour.name])
    except getopt.GetoptError as error:
        raise usage(_of_getopt(error)) from None
    wish = Wish(call)
    _add(wish, given, flavour, is_script=False)
    if "--" in args[: len(args) - len(rest)]:
        wish.program, rest = rest, []
    if len(rest) > 1:
        raise RefusedError(QSUB_USAGE.rstrip(), 2)
    return wish, rest


def with_script(wish: Wish, text: str, flavour: Flavour) -> None:
    """Add the script and what its directives say."""
    wish.script = text
    for line in directives(text, wish.options.get("-C", "#PBS")):
        try:
            given, rest = getopt.getopt(shlex.split(line), OPTIONS[flavour.name])
        except (getopt.GetoptError, ValueError):
            rest = ["?"]
        if rest:
            raise RefusedError(f"directive error: {line} ", 1)
        _add(wish, given, flavour, is_script=True)


def directives(text: str, prefix: str = "#PBS") -> Iterator[str]:
    """Return what stands after the prefix, up to the first line that is neither empty nor a comment."""
    for line in text.splitlines():
        if line.strip().startswith(prefix):
            yield line.strip().removeprefix(prefix).strip()
        elif line.strip() and not line.lstrip().startswith(("#", ":")):
            return


def _of_getopt(error: getopt.GetoptError) -> str:
    if "requires argument" in error.msg:
        return f"option requires an argument -- '{error.opt}'"
    return f"invalid option -- '{error.opt}'"


def _add(wish: Wish, given: Sequence[tuple[str, str]], flavour: Flavour, *, is_script: bool) -> None:
    """Add options, all of the command line or all of one directive."""
    options: dict[str, str] = {}
    resources: dict[str, str] = {}
    for letter, value in given:
        _check(letter, value, flavour)
        if letter == "-l":
            resources |= dict(part.partition("=")[::2] for part in value.split(",") if part)
        elif letter == "-W":
            options[letter] = "\n".join(filter(None, [options.get(letter, ""), *_split_attributes(value)]))
        else:
            options[letter] = value
    wish.options |= {letter: value for letter, value in options.items() if letter not in wish.fixed}
    wish.resources = {**resources, **wish.resources}
    if not is_script:
        wish.fixed = {*options}


def _split_attributes(text: str) -> list[str]:
    return re.split(r",(?=\w+=)", text)


def _check(letter: str, value: str, flavour: Flavour) -> None:
    if letter == "-N":
        if len(value) > flavour.longest_name:
            raise RefusedError("Job name is too long ", 2) if not flavour.is_torque else usage("illegal -N value")
        if not re.fullmatch(r"[A-Za-z0-9_.+-]+", value, re.ASCII) or (flavour.is_torque and not value[0].isalpha()):
            raise usage("illegal -N value")
    if letter in TAKEN and value not in TAKEN[letter]:
        raise usage(f"illegal {letter} value")
    if letter == "-J" and not _is_range(value):
        raise usage("illegal -J value")
    if letter == "-W":
        for part in _split_attributes(value):
            _check_attribute(*part.partition("=")[::2])


def _check_attribute(name: str, value: str) -> None:
    if not value:
        raise usage("illegal -W value")
    if name == "depend" and not all(
        part.partition(":")[0] in DEPENDENCIES and part.partition(":")[2] for part in value.split(",")
    ):
        raise usage("illegal -W value")
    if name not in {"depend", "umask", "block", "group_list", "stagein", "stageout", "sandbox", "x", "run_count"}:
        raise RefusedError(f"Undefined attribute  {name}", 154)


def _is_range(text: str) -> bool:
    parts = re.fullmatch(r"(\d+)-(\d+)(:\d+)?(%\d+)?", text)
    return bool(parts) and int(parts[1]) < int(parts[2])  # type: ignore[index]


def indices(text: str) -> list[int]:
    """Return the indices of an array: `0-7:2%1`, or Torque's `1,3-5`."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def variables(wish: Wish, queue: str, flavour: Flavour) -> dict[str, str]:
    """Return what a job's environment gets of the caller: PBS_O_…, and what -v and -V name."""
    call = wish.call
    env = call.env
    found = {f"PBS_O_{name}": env[name] for name in OWN if name in env and (flavour.is_torque or name != "LOGNAME")}
    found["PBS_O_WORKDIR"] = _workdir(env.get("PWD", ""), call.folder)
    if not flavour.is_torque:
        found["PBS_O_SYSTEM"] = "Linux"
    if "-V" in wish.options and flavour.is_torque:  # It does nothing in OpenPBS 23.06.06, by mistake.
        found |= {name: value for name, value in env.items() if not name.startswith("PBS_") and name != "_"}
    found |= _named(wish.options.get("-v", ""), env)
    found |= {"PBS_O_QUEUE": queue, "PBS_O_HOST": call.host}
    return found | ({"PBS_O_SERVER": "pbsctl"} if flavour.is_torque else {})


def _workdir(named: str, folder: str) -> str:
    """Return the directory by the name that the caller's shell has for it, if it is that directory."""
    try:
        return named if Path(named).samefile(folder) and named.startswith("/") else folder
    except OSError:
        return folder


def _named(text: str, env: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for part in re.findall(r"""(?:\\.|"[^"]*"|'[^']*'|[^,\\])+""", text):
        name, equals, value = part.partition("=")
        if not equals and name not in env:
            raise RefusedError("cannot send environment with the job", 1)
        value = re.sub(r"\\(.)", r"\1", value)
        found[name] = value.strip("\"'") if equals else env[name]
    return found
