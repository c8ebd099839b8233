"""The view that the user has chosen in ``allranks watch``, and the effect of each key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

#: What is shown larger, by key.
_PANES = {"l": "log", "n": "nodes", "e": "events"}
#: Keys that scroll, as most terminals send them: by how many lines, or by how many pages.
_LINES = {"\x1b[A": -1, "\x1bOA": -1, "\x1b[B": 1, "\x1bOB": 1}
_PAGES = {"\x1b[5~": -1, "\x1b[6~": 1}
#: How busy nodes are, how much of their memory is in use, how hot their GPUs are, and how slow their ranks.
MEASURES = ("use", "memory", "temperature", "step time")
_ENTER, _BACKSPACE, _ESCAPE = ("\r", "\n"), ("\x7f", "\b"), "\x1b"


@dataclass(frozen=True)
class Choice:
    """What is shown of a run.

    Attributes:
        pane: what has the whole screen: log, nodes, events, answer; empty: a part of each.
        pattern: only lines of the log that contain this are shown, in upper or lower case.
        measure: what a heat map of nodes shows: one of ``MEASURES``.
        rank: whose log is shown; None: of all.
        prompt: the key whose text is being typed: ``/``, ``r`` or ``c``; empty if none is.
        typed: that text.
        note: a sentence at the bottom, until the next key.
        answer: what the command of the last key has printed.
        several: whether there is a list of runs to go back to.
        top: how many lines of the pane come before the first that is shown; of log and events, after the last.
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
    top: int = 0


def scrolled(top: int, key: str, page: int, most: int) -> int:
    """Return the first line that is shown after an arrow key or PageUp and PageDown; other keys change nothing."""
    return max(0, min(most, top + _LINES.get(key, 0) + page * _PAGES.get(key, 0)))


def press(
    choice: Choice, key: str, ranks: int, *, has_ended: bool, page: int = 1, lines: int = 0
) -> tuple[Choice, str]:
    """Return the view after a key, and the action: ``quit``, ``back``, ``stacks``, ``cancel`` or none.

    The key is a character, or the control sequence of another key; the pane has so many ``lines``, and PageUp and
    PageDown scroll by a ``page`` of them.
    """
    choice = replace(choice, note="")
    if choice.prompt:
        return _typed(choice, key, ranks)
    if key == "q":
        return choice, "quit"
    if choice.pane and (key in _LINES or key in _PAGES):
        return replace(choice, top=_scrolled(choice, key, page, lines)), ""
    if key in _PANES:
        return replace(choice, pane="" if choice.pane == _PANES[key] else _PANES[key], top=0), ""
    if key == "m":
        following = (MEASURES.index(choice.measure) + 1) % len(MEASURES)
        return replace(choice, pane="nodes", measure=MEASURES[following]), ""
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


def _scrolled(choice: Choice, key: str, page: int, lines: int) -> int:
    """Scroll a pane; log and events are shown from their end on."""
    most = max(0, lines - page)
    if choice.pane in ("log", "events"):
        return most - scrolled(most - min(most, choice.top), key, page, most)
    return scrolled(choice.top, key, page, most)


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
        return replace(done, pattern=choice.typed, top=0), ""
    if choice.typed and int(choice.typed) >= ranks:
        return replace(done, note=f"there is no rank {choice.typed}: the run has {ranks}, counted from 0"), ""
    return replace(done, rank=int(choice.typed) if choice.typed else None, pane="log", top=0), ""
