"""Values that a script computes before its training: the lines that do so go with the training's command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.convert.draft import Draft
from allranks.lint.model import Script, Word

#: Commands that give each rank the same answer.
_READING = ": [ awk basename bc cat cut dirname echo expr grep head printf sed seq tail test tr wc export"
_READS = frozenset(_READING.split())


def lines_of_values(draft: Draft, words: Sequence[Word], own: frozenset[str]) -> list[str] | None:
    """Return the statements from which words of the training get their values; each rank runs them.

    What prints the time is kept in ``environment.setup``, which runs once, and exported to them.

    Args:
        own: variables that say who a rank is: nothing of them is computed here.

    Returns:
        None if ranks may get other values than the script, or if a loop or an argument of the script has them.
    """
    script, start = draft.view.script, words[0].at
    if not all(_commands(script, word.at, word.end) <= _READS for word in words):
        return None
    names = {name for word in words for name in _names(draft, word.at, word.end)}
    lines: list[str] = []
    once: dict[int, str] = {}
    of_once: set[str] = set()
    known: set[str] = set()
    for first, end in reversed([span for span in script.statements if span[1] <= start]):
        sets = {each.name for each in script.assignments if first <= each.at < end and not each.is_prefix}
        if not sets & (names | of_once):
            continue
        commands, source = _commands(script, first, end), draft.source(first, end)
        uses = _names(draft, first, end)
        if sets & of_once or not commands <= _READS:
            if not commands <= _READS | {"date"} or not re.match(r"(export\s+)?\w+=", source):
                return None
            of_once |= uses
            once[first] = f"export {source.removeprefix('export ')}" if sets & names else source
        else:
            names |= uses
            lines.insert(0, source)
        known |= sets
    read = names | of_once
    if any(name.isdecimal() or name in ("@", "*", "RANDOM", *own) for name in read):
        return None
    if any(draft.is_set_here(name) for name in read - known):
        return None
    for at, line in sorted(once.items()):
        draft.add_line("setup", line, at)
        draft.changed(at, f"{line.removeprefix('export ')}: environment.setup computes it once, for all ranks")
    return lines


def _names(draft: Draft, start: int, end: int) -> set[str]:
    """Return the variables that a part of the script reads, those in subscripts too."""
    uses = {use.name for use in draft.view.script.uses if start <= use.at < end}
    return uses | set(re.findall(r"\[\$?\{?([A-Za-z_]\w*)", draft.source(start, end)))


def _commands(script: Script, start: int, end: int) -> set[str]:
    return {each.name for each in script.commands if start <= each.at < end}
