"""When a verdict is certain: only where the logs leave no other cause.

A text of one meaning is not enough, as a program may have survived what it tells of. It must be the last word of what
wrote it, and nothing else may have failed, but what only follows. A message that leaves open why it came about needs
the place in the user's code as well. An exception of the script is certain only if Python raised it of the code itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from allranks.diagnosis.model import Level, Match, Rule
from allranks.diagnosis.text import Log

#: Lines of one report.
_REPORT = 30
#: So many other lines may follow the last word of a program: a hint, an address.
_FEW = 3
#: Lines at the end of a log that are looked at.
_END = 2000
#: An exception's own line, which Python writes as it ends a process.
EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b")
#: What Python raises of the names and numbers in the script's own lines. Any other exception may come from elsewhere: a
#: key, an attribute, an argument or a value from a setting, a file or another version of a package; and what a check in
#: the script raises may tell of anything.
_OF_THE_CODE = re.compile(r"(?:Name|UnboundLocal|ZeroDivision|Recursion)Error\b")
#: Rules for exceptions that were raised in the script.
OF_THE_SCRIPT = ("script-exception", "dataloader-worker-error")
#: What a shell, or a command in its script, says of what it did not find: the script goes on.
_OF_THE_SHELL = ("command-not-found", "permission-denied", "module-missing", "conda-missing", "venv-missing")
_SHELL = re.compile(r"\S+: line \d+: (?!\s*\d+ )|(?:/\S+/|-)?(?:ba|z|k)?sh: ")
#: The last line of a traceback's frames; rich draws a box around them.
_OF_A_TRACEBACK = re.compile(r"\s+\S|[│╰|]")
#: What may stand below any failure: frames, the reports of launchers, hints, what libraries write as a process ends.
_BELOW = re.compile(
    r"\s|\W*$|Traceback |During handling of|The above exception|frame #|\[\d+\]:|Failures:|\w+ FAILED$|Last error:|\*+ "
    r"|Exception (?:ignored|raised) |CUDA kernel errors might|For debugging consider|Compile with .TORCH_USE"
    r"|Set the environment variable HYDRA|wandb: |\[?[WIE]\d+ |srun: |slurmstepd: "
    r"|.*(?:Warning: |resource_tracker|\bAborted\b)"
)
#: What a training writes that goes on.
_STEP = re.compile(r"\d+%\||\b\d+(?:\.\d+)?(?:it/s|s/it)|\b(?:[Ss]tep|[Ee]poch|[Ii]ter\w*|[Ll]oss)\b\W{0,4}\d")


def is_certain(cause: Match, found: Sequence[Match], first: int | None) -> bool:
    """Return whether the logs leave no other cause than this one of all that was found in them.

    Of the rank that failed first, if that is known, the words must be there: they might tell of another cause.
    """
    if not cause.rule.certain or cause.is_note or not cause.is_last:
        return False
    heard = {match.line.rank for match in found if match.rule.level is not Level.LAUNCHER}
    if cause.rule.level is not Level.OUTSIDE and first is not None and not heard & {None, first}:
        return False
    if cause.line.text == "AssertionError":
        return False  # The condition that failed may stand for something else.
    if cause.rule.id in OF_THE_SCRIPT and not _OF_THE_CODE.match(cause.line.text):
        return False
    if cause.rule.id == "shape-mismatch" and not cause.place:
        return False  # The shapes may be those of a checkpoint or of another rank's data.
    if cause.line.text.lstrip().startswith("raise "):
        return False  # The log was cut before the message.
    if cause.rule.level is Level.GENERAL and EXCEPTION.match(cause.line.text):
        where = cause.is_own if cause.rule.id == "script-exception" else cause.place
        if not where:
            return False
    return not any(_could_be(match, cause) for match in found)


def is_of_one_report(match: Match, cause: Match) -> bool:
    """Return whether two matches are of one report of one rank: another rank's words are not this one's."""
    is_same_log = (match.line.file, match.line.rank) == (cause.line.file, cause.line.rank)
    return is_same_log and abs(match.order - cause.order) <= _REPORT


def is_of_the_shell(match: Match) -> bool:
    """Return whether a match tells of a command in a script that goes on after it."""
    if _SHELL.match(match.line.text):
        return True
    return match.rule.id in _OF_THE_SHELL and (match.rule.id == "conda-missing" or not EXCEPTION.match(match.line.text))


def with_ends(log: Log, found: Sequence[Match]) -> list[Match]:
    """Mark the matches that are no last words: other lines follow, or steps of the training."""
    if all(match.rule.level > Level.GENERAL for match in found):
        return [*found]
    known = {match.order: match.rule for match in found}
    lines = [(at, log.line(at).text) for at in range(max(0, len(log.texts) - _END, min(known)), len(log.texts))]
    steps = [at for at, text in lines if _STEP.search(text)]
    others = {at: known.get(at) for at, text in lines if at in known or not _BELOW.match(text)}
    return [replace(match, is_last=_is_last(log, match, others, steps)) for match in found]


def _is_last(log: Log, match: Match, others: Mapping[int, Rule | None], steps: Sequence[int]) -> bool:
    """Return whether what follows a match is little, or tells of the same and of its consequences."""
    steps_after = sum(at > match.order for at in steps)
    if steps_after > (0 if is_of_the_shell(match) else _FEW):
        return False
    if match.rule.level is Level.OUTSIDE or _ends_a_traceback(log, match):
        return True
    later = (rule for at, rule in others.items() if at > match.order and rule is not match.rule)
    return sum(rule is None or rule.level < Level.FOLLOWS for rule in later) <= _FEW


def _ends_a_traceback(log: Log, match: Match) -> bool:
    """Return whether an exception's line stands below frames: one without them may have been caught and printed."""
    is_exception = match.order and EXCEPTION.match(match.line.text)
    return bool(is_exception and _OF_A_TRACEBACK.match(log.line(match.order - 1).text))


def _is_final(match: Match) -> bool:
    """Return whether a line is written of a process that has ended: Python's of an exception, a scheduler's."""
    return match.rule.level is Level.OUTSIDE or bool(EXCEPTION.match(match.line.text))


def _could_be(match: Match, cause: Match) -> bool:
    """Return whether a match could be the cause as well: it says that something else failed."""
    if match.is_note or _says_the_same(match, cause):
        return False
    if match.rule.level > Level.GENERAL:  # It only follows, unless it was there before.
        return not _is_final(cause) and match.line.file == cause.line.file and match.order < cause.order
    if not is_of_one_report(match, cause) or match.rule.level <= Level.CAUSE:
        return True
    if match.order < cause.order:  # The first exception of a rank raises others.
        return all(EXCEPTION.match(each.line.text) for each in (match, cause))
    return match.rule.id == "script-exception"


def _says_the_same(match: Match, cause: Match) -> bool:
    if (match.line.file, match.order) == (cause.line.file, cause.order):  # An exception that a worker has handed on.
        return True
    return match.rule is cause.rule and match.captured.get("error") == cause.captured.get("error")
