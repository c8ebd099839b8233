"""The machines of a training that a script starts over SSH, pdsh or mpirun."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allranks.convert.draft import Draft, home
from allranks.lint.launches import Launch
from allranks.lint.model import MPI, Command, Word
from allranks.lint.syntax import read_call

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}|\$\(\s*seq\s+(\d+)(?:\s+(\d+))?\s*\)|`\s*seq\s+(\d+)(?:\s+(\d+))?\s*`")
_FILE = re.compile(r"[$`(]+\s*(?:cat\s+|<\s*)([^\s|)`;&]+)\s*[)`]")


def take_hosts(draft: Draft, group: Sequence[Launch]) -> None:
    """Set the machines, if the script names them; else say where they are to be named."""
    if draft.kind != "local":
        return  # The scheduler chooses them.
    if file := group[0].call.get("--hostfile"):
        draft.kind = "ssh"
        draft.put("resources.hostfile", home(file.value.shown), file.at, f"--hostfile {file.value.shown}")
    starter = next((each.starter for each in group if each.starter), None)
    if starter is None or starter.name in ("srun", ""):
        return
    if starter.name in MPI:
        _of_mpi(draft, starter)
        return
    draft.kind = "pdsh" if starter.name == "pdsh" else "ssh"
    draft.put("workdir", "~", starter.at, f"{starter.name} starts in the home directory")
    hosts: dict[str, None] = {}
    for launch in group:
        if launch.starter is None:
            draft.not_taken(launch.command.at, "the first node is this machine: put its name first in hosts")
        else:
            hosts |= dict.fromkeys(_named(draft, launch.starter))
    if draft.kind == "pdsh":
        draft.put("cluster", "pdsh", starter.at, "pdsh")
    if hosts:
        draft.put("resources.hosts", [*hosts], starter.at, " ".join([starter.name, *hosts]))
    elif "resources.hostfile" not in draft.values:
        draft.not_taken(starter.at, "the machines are not in the script: resources.hosts, or --hosts")


def _of_mpi(draft: Draft, starter: Command) -> None:
    """Take the hosts of mpirun, if it has some."""
    given = read_call(starter).get("-H", "--hostfile")
    if given is None or not given.value.value:
        return
    draft.kind = "ssh"
    value, typed = given.value.value, f"{starter.name} {given.typed} {given.value.value}"
    if given.name == "-H":
        hosts = [host.partition(":") for host in value.split(",")]
        draft.put("resources.hosts", [name for name, _, _ in hosts], starter.at, typed)
        if len(slots := {count for _, _, count in hosts}) == 1 and (count := slots.pop()).isdecimal():
            draft.put("launch.nproc_per_node", int(count), starter.at, typed)
    else:
        draft.put("resources.hostfile", value, starter.at, typed)


def _named(draft: Draft, starter: Command) -> Iterator[str]:
    """Yield the hosts that a command reaches."""
    call = read_call(starter)
    words = [given.value for given in call.given if given.name == "-w"]
    if starter.name in ("ssh", "rsh", "dsh"):
        words = list(call.rest[:1])
    for word in words:
        if word.value is None:
            yield from _of_loop(draft, starter, word)
        elif word.value.startswith("^"):
            draft.put("resources.hostfile", home(word.value[1:]), starter.at, f"{starter.name} -w {word.value}")
        else:
            yield from re.split(r",(?![^\[\]]*\])", word.value)


def _of_loop(draft: Draft, starter: Command, word: Word) -> Iterator[str]:
    """Yield the hosts of a loop: its words, those of an array, numbers behind a name, or the lines of a file."""
    unknown = [part for part in word.parts if part.value is None]
    name = unknown[0].text
    assigned = draft.view.script.assignments
    array = next((each.items for each in assigned if each.items and f"{each.name}[" in name), None)
    if array and len(word.parts) == 1:
        yield from filter(None, (item.value for item in array))
        return
    if unknown[0].kind == "command" and (file := _FILE.search(unknown[0].text)):
        draft.put("resources.hostfile", home(file[1]), starter.at, unknown[0].text)
        return
    loop = next((each for each in starter.context.loops if each.variable == name), None)
    if loop is None and (reading := next((each for each in starter.context.loops if each.reads_input), None)):
        end = next((end for start, end in draft.view.script.statements if start <= reading.at < end), reading.at)
        if file := re.search(r"done\s*<\s*[\"']?([^\s\"'<>|;&]+)[\"']?$", draft.source(reading.at, end)):
            draft.put("resources.hostfile", home(file[1]), reading.at, f"while read … < {file[1]}")
    for item in loop.words if loop and len(unknown) == 1 else ():
        if item.value is not None:
            yield _with(word, item.value)
        elif numbers := _RANGE.fullmatch(item.shown):
            ends = [int(number) for number in numbers.groups() if number]
            first, last = ends if len(ends) == 2 else (1, ends[0])
            yield from (_with(word, str(number)) for number in range(first, min(last, first + 4096) + 1))
        elif file := _FILE.search(item.shown):
            draft.put("resources.hostfile", home(file[1]), starter.at, item.shown)


def _with(word: Word, value: str) -> str:
    """Fill a value into a word whose one part is not known."""
    return "".join(value if part.value is None else part.value for part in word.parts)
