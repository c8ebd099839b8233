"""Which lines of a log tell of a failure, by the rules."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath

from allranks.diagnosis import cuda_memory
from allranks.diagnosis.languages import in_english
from allranks.diagnosis.model import Line, Match, Rule
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.text import Log
from allranks.logs.cause import is_foreign

#: Of a long log so many telling lines at its beginning and at its end are looked at.
_MOST = 1500
#: How far before an exception's own line its traceback may begin, and before any line what belongs to it.
_TRACEBACK, _NEAR = 200, 30
#: Warnings and notes, of which most are harmless: they count where nothing else was found.
_NOTE = re.compile(
    r"\w*Warning: |\[[WI](?:\d{3,4})? |^[WI]\d{4} (?!.*death signal)|^[WI] |[Rr]etry(?!.*exceeded)|cached"
    r"|^\w+: warning: |is not compatible with the current PyTorch|memory limit at some point"
    r"|^wandb: |create TMPDIR|[Ff]all(?:ing|s)? ?back|\b[Ss]kipping\b(?!.*e-[1-9]\d+$)|Couldn't connect to the Hub"
    r"|[Ll]oss\w*'?\"? ?[=:]? ?(?:nan|NaN|inf)\b(?!.*(?:[Ss]top|Error))"
    r"|\b(?:WARNING|WARN|INFO|DEBUG)\b(?<!NCCL WARN)|successfully reached monitoredBarrier, but"
)
_FRAME = re.compile(r'\s*(?:\| *)?File "([^"]+)", line (\d+)')
#: Lines of source that a traceback shows.
_SOURCE = re.compile(r"    +(?!what\(\))(?:raise |return |[\w.]+\(|if |for |with )")
#: A line of source that raises an exception: its class, and the beginning of its message.
_RAISE = re.compile(r"\s+raise ((?:\w+\.)*[A-Z]\w*)\((?:[fr]*[\"'])?(.*)")
#: An exception's own line, in a traceback that was printed with a margin.
_INDENTED = re.compile(r"( +)((?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?::.*)?)$")
#: What Python says of exceptions that end nothing, and of what an ended process has left.
_IGNORED = re.compile(r"Exception ignored in|Error in atexit")
_LEFT = re.compile(r"resource_tracker: ")
#: Where Python finds that the process at the other end is gone, and with what.
_AT_THE_OTHER_END = re.compile(
    r'.*multiprocessing/connection\.py", line \d+, in (?:SocketClient|_recv|_send|recv\w*|send\w*)$'
)
_IS_GONE = re.compile(r"(?:FileNotFound|ConnectionRefused|ConnectionReset|BrokenPipe|EOF)Error\b")
#: What torch.utils.data and DataParallel put above the original traceback of an exception in a worker.
_HANDED_ON = re.compile(r"\w+: Caught (\w+) in ")
#: How the report of a C++ exception starts, and its message.
_TERMINATED, _MESSAGE = re.compile(r"terminate called after throwing"), re.compile(r"\s*what\(\): ")
#: What stands between the tracebacks of one exception and of that which it caused.
_GOES_ON = re.compile(r"The above exception was the direct cause|During handling of the above exception")
#: Rules of any exception, which are the last.
_OF_ANY_SCRIPT = ("script-exception", "library-exception")
_BY_ID = {rule.id: rule for rule in RULES}


def matches(log: Log) -> list[Match]:
    """Return the matches in a log, in its order; each line has at most one."""
    telling = log.telling if len(log.telling) <= 2 * _MOST else log.telling[:_MOST] + log.telling[-_MOST:]
    found = (_match(log, at) for at in telling)
    return [match for match in found if match]


def _match(log: Log, at: int) -> Match | None:
    line = log.line(at)
    text = _completed(log, at, line.text)
    if _SOURCE.match(text) or _LEFT.search(text):
        return None
    fitting = [rule for rule in rules_of(text) if _is_there(log, at, rule)]
    if not fitting or _is_ignored(log, at) or _is_of_another_end(log, at) or _is_said_below(log, at):
        return None
    rule = fitting[0]
    named = captured(rule, text)
    if rule.id == "cuda-out-of-memory":
        name, numbers = cuda_memory.reason(line.text)
        rule, named = _BY_ID[name], named | numbers
    is_note = bool(_NOTE.search(line.text))
    ends = _ends_in_worker(log, at, line)
    place, is_own = _place(log, log.line(ends[-1]), ends[-1])
    if not place:
        place, is_own = _place(log, line, at)
    return Match(rule, log.line(ends[0]), named, place, ends[0], is_note, is_own)


@lru_cache(maxsize=1 << 12)  # Ranks often write the same.
def rules_of(text: str) -> tuple[Rule, ...]:
    """Return the rules that match a line, the nearest to the root first; any exception's comes last."""
    text = in_english(text)
    fitting = [rule for rule in RULES if _fits(rule, text)]
    explained = {name for rule in fitting for name in rule.explains}
    fitting = [rule for rule in fitting if rule.id not in explained]
    return tuple(sorted(fitting, key=lambda rule: (rule.id in _OF_ANY_SCRIPT, rule.level)))


def _fits(rule: Rule, text: str) -> bool:
    if not any(pattern.search(text) for pattern in rule.compiled):
        return False
    return not (rule.exception and rule.exception.search(text))


def _is_there(log: Log, at: int, rule: Rule) -> bool:
    """Return whether what stands above a line is what a rule asks for."""
    if rule.near and not _has_near(log, at, rule.near):
        return False
    return not rule.inside or bool(re.search(rule.inside, _frame_above(log, at)))


def _completed(log: Log, at: int, text: str) -> str:
    """Return a line; of an exception that lacks its message, with what the traceback shows of it.

    An AssertionError often has none, a log may have been cut before the last line of its traceback, and a logger may
    have indented all of it.
    """
    if text == "AssertionError":
        above = (log.line(number).text.strip() for number in range(at - 1, max(-1, at - 4), -1))
        return next((f"{text}: {shown}" for shown in above if shown.startswith("assert")), text)
    if (indented := _INDENTED.match(text)) and (frame := _frame_above(log, at)):
        is_outside = len(frame) - len(frame.lstrip()) > len(indented[1])
        return indented[2] if is_outside else text
    raised = _RAISE.match(text)
    if raised and not any(log.texts[number].strip() for number in range(at + 1, len(log.texts))):
        return f"{raised[1]}: {raised[2]}"  # It is the last line.
    return text


def _frame_above(log: Log, at: int) -> str:
    """Return the nearest frame above a line, as far as the lines of its source; empty if there is none."""
    above = (log.line(number).text for number in range(at - 1, max(-1, at - 5), -1))
    return next((text for text in above if _FRAME.match(text)), "")


def _is_said_below(log: Log, at: int) -> bool:
    """Return whether a line tells of a C++ exception of which the next one is the message."""
    if at + 1 == len(log.texts) or not _TERMINATED.search(log.texts[at]):
        return False
    message = log.line(at + 1).text
    return bool(_MESSAGE.match(message) and rules_of(message))


def _has_near(log: Log, at: int, pattern: str) -> bool:
    """Return whether a line, or one before it in the same traceback, holds a match."""
    for text in reversed(log.texts[max(0, at - _NEAR) : at + 1]):
        if re.search(pattern, text):
            return True
        if "Traceback (most recent call last)" in text:
            return False
    return False


def _is_ignored(log: Log, at: int) -> bool:
    """Return whether a line ends the traceback of an exception that Python has ignored."""
    for number in range(at - 1, max(0, at - _TRACEBACK), -1):
        text = log.line(number).text
        if text.startswith("Traceback "):
            return bool(_IGNORED.match(log.line(number - 1).text))
        if not text.startswith(" "):
            return False
    return False


def _is_of_another_end(log: Log, at: int) -> bool:
    """Return whether a line tells that the process at the other end is gone: of why, it says nothing."""
    if not _IS_GONE.match(log.line(at).text):
        return False
    return bool(_AT_THE_OTHER_END.match(_frame_above(log, at)))


def captured(rule: Rule, text: str) -> dict[str, str]:
    """Return what the rule's first pattern that matches has captured, by names without their numbers."""
    text = in_english(text)
    for pattern in rule.compiled:
        if found := pattern.search(text):
            return {name.rstrip("0123456789"): value for name, value in found.groupdict().items() if value}
    return {}


def _ends_in_worker(log: Log, at: int, line: Line) -> list[int]:
    """Return where the exceptions end that a worker has handed on, if a line repeats such a one; else its own place."""
    ends: list[int] = []
    if handed_on := _HANDED_ON.match(line.text):
        original = re.compile(rf"(?:\w+\.)*{handed_on[1]}(?:: |$)(?!Caught )")
        for number in range(at + 1, min(at + _TRACEBACK, len(log.texts))):
            last = log.line(number)
            if last.rank == line.rank and original.match(last.text):
                ends.append(number)
                if not any(_GOES_ON.search(text) for text in log.texts[number + 1 : number + 4]):
                    break
    return ends or [at]


def _place(log: Log, end: Line, at: int) -> tuple[str, bool]:
    """Return the innermost frame in the user's code of the traceback that a line ends, and whether none is below it.

    The frame as ``train.py:88``, empty if there is none.
    """
    is_innermost = True
    for number in range(at - 1, max(-1, at - _TRACEBACK), -1):
        line = log.line(number)
        if line.rank != end.rank:
            continue
        if line.text and not line.text.startswith((" ", "|", "\t")):
            break
        if not (found := _FRAME.match(line.text)):
            continue
        if not is_foreign(found[1]) and not found[1].endswith(".pyx"):
            return f"{PurePath(found[1]).name}:{found[2]}", is_innermost
        is_innermost = False
    return "", False
