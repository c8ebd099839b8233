"""What a person at ``allranks watch`` has chosen to see, and what each key changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: What is shown larger, by key.
_PANES = {"l": "log", "n": "nodes", "e": "events"}
_ENTER, _BACKSPACE, _ESCAPE = ("\r", "\n"), ("\x7f", "\b"), "\x1b"


@dataclass(frozen=True)
class Choice:
    """What is shown of a run.

    Attributes:
        pane: what has the whole screen: log, nodes, events, answer; empty: a part of each.
        pattern: only lines of the log that contain this are shown, in upper or lower case.
        measure: what a heat map of nodes shows: how busy they are, or how much of their memory is in use.
        rank: whose log is shown; None: of all.
        prompt: the key whose text is being typed: ``/``, ``r`` or ``c``; empty if none is.
        typed: that text.
        note: a sentence at the bottom, until the next key.
        answer: what the command of the last key has printed.
        several: whether there is a list of runs to go back to.
    """

    pane: str = ""
    pattern: str = ""
    measure: str = "use"
    rank: int | None = None
    prompt: str = ""
    typed: str = ""
    note: str = ""
    answer: Sequence[str] = ()
    several: bool = False


def press(choice: Choice, key: str, ranks: int, *, has_ended: bool) -> tuple[Choice, str]:
    """Return what is shown after a key, and what is to be done: ``quit``, ``back``, ``stacks``, ``cancel`` or nothing.

    Args:
        choice: what is shown.
        key: a character, or the control sequence of another key.
        ranks: how many the run has.
        has_ended: whether the run has ended.
    """
    choice = replace(choice, note="")
    if choice.prompt:
        return _typed(choice, key, ranks)
    if key == "q":
        return choice, "quit"
    if key in _PANES:
        return replace(choice, pane="" if choice.pane == _PANES[key] else _PANES[key]), ""
    if key == "m":
        return replace(choice, pane="nodes", measure="memory" if choice.measure == "use" else "use"), ""
    if key in ("/", "r"):
        return replace(choice, prompt=key, typed=""), ""
    if key in ("s", "c") and has_ended:
        return replace(choice, note="the run has ended"), ""
    if key == "c":
        return replace(choice, prompt=key, typed=""), ""
    if key == "s":
        return replace(choice, note="waiting for the stacks of all ranks"), "stacks"
    if key in (_ESCAPE, "b", *_BACKSPACE):
        if choice == (plain := Choice(several=choice.several)):
            return choice, "back" if choice.several else ""
        return plain, ""
    return choice, ""


def _typed(choice: Choice, key: str, ranks: int) -> tuple[Choice, str]:
    """Take a key of a text that is being typed, or of the answer to a question."""
    done = replace(choice, prompt="", typed="")
    if choice.prompt == "c":
        yes = key in ("y", "Y")
        return replace(done, note="cancelling the run" if yes else "not cancelled"), "cancel" if yes else ""
    if key == _ESCAPE:
        return done, ""
    if key in _BACKSPACE:
        return replace(choice, typed=choice.typed[:-1]), ""
    if key not in _ENTER:
        is_wanted = key.isdecimal() if choice.prompt == "r" else key.isprintable()
        return replace(choice, typed=choice.typed + key) if is_wanted else choice, ""
    if choice.prompt == "/":
        return replace(done, pattern=choice.typed), ""
    if choice.typed and int(choice.typed) >= ranks:
        return replace(done, note=f"there is no rank {choice.typed}: the run has {ranks}, counted from 0"), ""
    return replace(done, rank=int(choice.typed) if choice.typed else None, pane="log"), ""
