"""The arguments of the script itself, ``$1`` and so on: those that convert is given for it, and those that it lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from allranks.lint.model import Assignment, Command, Part, Script, Word

_FUNCTION = re.compile(rb"(?:function\s+)?[\w-]+\s*(?:\(\s*\))?\s*\{")
_VARIABLE = re.compile(rb"\$\{?(\w+)")
_ALL = re.compile(rb"\"?\$(?:[@*]|\{[@*](?::(\d+))?\})\"?")


def give_arguments(script: Script, arguments: Sequence[str]) -> None:
    """Put values in the place of ``$1``, ``$@`` and so on, unless the script moves them under a condition."""
    if arguments and (shifts := _shifts(script)) is not None:
        given = _Given(script, arguments, shifts)
        script.commands = [given.command(each) for each in script.commands]
        script.assignments = [given.assignment(each) for each in script.assignments]


def missing_arguments(script: Script, arguments: Sequence[str]) -> list[str]:
    """Return the names of the script's arguments that it reads outside of functions, and that it is not given."""
    data, shifts = script.text.data, _shifts(script)
    functions = [span for span in script.statements if _FUNCTION.match(data[slice(*span)])]
    numbers: set[int] = set()
    for use in script.uses:
        is_needed = not use.has_default or data[use.at : use.at + 12].lstrip(b"${").lstrip(b"0123456789")[:2] == b":?"
        is_own = _is_own(script, use.at) and not any(start <= use.at < end for start, end in functions)
        if re.fullmatch(r"[1-9]\d*", use.name) and is_needed and is_own and shifts is not None:
            numbers.add(int(use.name) + _shifted(shifts, use.at))
    return [f"${number}" for number in sorted(numbers) if number > len(arguments)]


def _shifts(script: Script) -> list[tuple[int, int]] | None:
    """Return where ``shift`` stands, and by how many; None if what it, ``getopts`` or ``set --`` moves is not known."""
    found = []
    for each in script.named("shift", "getopts", "set"):
        if each.name == "set" and "--" not in each.values:
            continue
        context, number = each.context, each.args[0].number if each.args else 1
        if each.name != "shift" or context.is_conditional or context.loops or context.function or number is None:
            return None
        found.append((each.at, number))
    return found


def _shifted(shifts: Sequence[tuple[int, int]], at: int) -> int:
    return sum(number for place, number in shifts if place < at)


def _is_own(script: Script, at: int) -> bool:
    """Return whether a place is in the script itself, not in a file that it reads."""
    return script.text.file_of(at) is script.text.files[0]


class _Given:
    """Puts the values of arguments into words."""

    def __init__(self, script: Script, arguments: Sequence[str], shifts: Sequence[tuple[int, int]]) -> None:
        self.script, self.arguments, self.shifts = script, arguments, shifts

    def command(self, command: Command) -> Command:
        if command.context.function or not _is_own(self.script, command.at):
            return command
        context = replace(command.context, via=tuple(map(self.command, command.context.via)))
        words = tuple(one for word in command.words for one in self._word(word))
        return replace(command, words=words, sets=tuple(map(self.assignment, command.sets)), context=context)

    def assignment(self, given: Assignment) -> Assignment:
        return given if given.parts is None else replace(given, parts=tuple(map(self._part, given.parts)))

    def _word(self, word: Word) -> Iterator[Word]:
        found = _ALL.fullmatch(self.script.text.data[word.at : word.end])
        if found and len(word.parts) == 1:
            first = int(found[1] or 1) - 1 + _shifted(self.shifts, word.at)
            for one in self.arguments[first:]:
                yield replace(word, parts=(replace(word.parts[0], kind="text", text=one, value=one),))
        else:
            yield replace(word, parts=tuple(map(self._part, word.parts)))

    def _part(self, part: Part) -> Part:
        if part.kind != "variable" or not re.fullmatch(r"[1-9]\d*", part.text):
            return part
        found, at = _VARIABLE.match(self.script.text.data, part.at), part.at
        if found and not found[1].isdigit():  # A variable that it was assigned to, perhaps before a shift.
            at = max((each.at for each in self.script.assigned(found[1].decode()) if each.at < at), default=at)
        place = int(part.text) - 1 + _shifted(self.shifts, at)
        if place >= len(self.arguments):
            return part
        return replace(part, kind="text", text=self.arguments[place], value=self.arguments[place])
