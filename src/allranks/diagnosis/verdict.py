"""The verdict: of all that logs tell, what failed first and why, and what only followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from allranks.diagnosis.certainty import EXCEPTION, is_certain, is_of_one_report, is_of_the_shell, with_ends
from allranks.diagnosis.collectives import mismatch
from allranks.diagnosis.matching import matches
from allranks.diagnosis.model import Diagnosis, Level, Match
from allranks.diagnosis.rules import RULES
from allranks.diagnosis.text import Log

#: Lines between a line that tells of a failure and the last one: more, and the script went on after it.
_FAR = 400
_EVIDENCE = 3
#: By how much a warning is less than an error: below all that ends a process, above what only follows.
_NOTE = 1.5
#: What a launcher's report is, beside a cause.
_LAUNCHER = "the launcher reported that a rank failed"
#: Where torchrun's report names the rank that failed first.
_FIRST = "Root Cause (first observed failure)"
_OTHERS = re.compile(r"(?:^|\s)Failures:\s*$")
#: The lines that its report may take, in which seven tell of each rank.
_SUMMARY = 1000
#: What srun says of a task that was killed, and what it says before it kills the others itself.
_KILLED_TASK = re.compile(r"srun: error: \S+: tasks? [\d,\-]+: Killed")
_ENDS_STEP = re.compile(
    r"srun: Job step aborted|srun: (?:launch/slurm: _step_signal: )?Terminating|\*\*\* STEP \S+ ON \S+ CANCELLED"
)
_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)")
_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"{(\w+)}")


def judge(logs: Iterable[Log], first: int | None = None) -> Diagnosis | None:
    """Return the verdict on some logs of one run; None if nothing in them tells of a failure.

    Args:
        logs: of all ranks, or one of all of them together.
        first: the rank that failed first, if that is known from elsewhere.
    """
    found: list[Match] = []
    for log in logs:  # One after the other: together they may be larger than the memory.
        found += _last(with_ends(log, [match for match in matches(log) if not _is_later(log, match)]))
        first = _reported(log) if first is None else first
    explained = {name for match in found for name in match.rule.explains}
    found = [match for match in found if match.rule.id not in explained]
    if not found:
        return None
    cause = min(found, key=lambda match: _order(match, first))
    return _of_watchdogs(cause, found) or _diagnosis(cause, found, first)


def _of_watchdogs(cause: Match, found: Sequence[Match]) -> Diagnosis | None:
    """Return the verdict where nothing but timeouts was found, of collectives that differ."""
    if cause.rule.id != "nccl-timeout" or not (differ := mismatch(found)):
        return None
    told, one, other = differ
    rule = next(rule for rule in RULES if rule.id == "collective-mismatch")
    evidence = (one.line, other.line)
    return Diagnosis(
        id=rule.id,
        cause=sentence(rule.cause, {"told": told}),
        sure="likely",
        evidence=evidence,
        followed=cause.rule.cause,
        fix=rule.fix,
        retry=rule.retry,
    )


def _is_later(log: Log, match: Match) -> bool:
    """Return whether a launcher's report says of a signal that its rank got it after another one had failed."""
    if match.rule.level is not Level.UNCLEAR:
        return False
    if _KILLED_TASK.match(match.line.text):
        return any(_ENDS_STEP.search(text) for text in log.texts[max(0, match.order - _SUMMARY) : match.order])
    for text in reversed(log.texts[max(0, match.order - _SUMMARY) : match.order]):
        if _FIRST in text:
            return False
        if _OTHERS.search(text):
            return any(_FIRST in text for text in log.texts[match.order : match.order + _SUMMARY])
    return False


def _last(found: list[Match]) -> list[Match]:
    """Leave out what a script has survived: it told of more failures long after that, or Python ran as well."""
    if not found:
        return []
    has_run = any(_is_of_python(match) for match in found)
    of_the_script = [
        match
        for match in found
        if not (is_of_the_shell(match) and (has_run or not match.is_last)) or _is_of_the_environment(match, found)
    ]
    found = of_the_script or found
    ends = [match.order for match in found if match.rule.level < Level.FOLLOWS and not match.is_note]
    end = ends[-1] if ends else found[-1].order
    return [match for match in found if end - match.order <= _FAR or match.rule.level is Level.OUTSIDE]


def _is_of_the_environment(match: Match, found: Sequence[Match]) -> bool:
    """Return whether a match tells that the environment was not set up, and Python found no torch after that."""
    return "import-missing" in match.rule.explains and any(
        each.rule.id == "import-missing" and each.captured.get("module") == "torch" and each.order > match.order
        for each in found
    )


def _is_of_python(match: Match) -> bool:
    """Return whether the script ran: it raised an exception, or had met other ranks."""
    return not match.is_note and (match.rule.level is Level.FOLLOWS or bool(EXCEPTION.match(match.line.text)))


def _order(match: Match, first: int | None) -> tuple[float, bool, bool, int]:
    """Order matches, that of the cause first: by level, what says more, the rank that failed first, and place."""
    level: float = match.rule.level
    if match.is_note and level <= Level.GENERAL:
        level = max(level, Level.CAUSE) + _NOTE
    is_vague = bool(match.rule.vague and re.search(match.rule.vague, match.line.text))
    return level, is_vague, first is not None and match.line.rank not in (None, first), match.order


def _reported(log: Log) -> int | None:
    """Return the rank that torchrun's report names as the first to fail."""
    starts = [at for at in log.telling if _FIRST in log.texts[at]]
    for text in log.texts[starts[-1] : starts[-1] + 6] if starts else ():
        if named := _RANK.search(text):
            return int(named[1])
    return None


def _diagnosis(cause: Match, found: Sequence[Match], first: int | None) -> Diagnosis:
    rule = cause.rule
    followed = [each.rule for each in found if each.rule.level >= Level.FOLLOWS and each.rule is not rule]
    follows = dict.fromkeys(_LAUNCHER if each.level is Level.LAUNCHER else each.cause for each in followed)
    if rule.level >= (Level.UNCLEAR if cause.is_note else Level.FOLLOWS):
        sure = "unknown"
    else:
        sure = "certain" if is_certain(cause, found, first) else "likely"
    same = [match for match in found if match.rule is rule and match is not cause]
    near = [match for match in same if is_of_one_report(match, cause)]
    named = {name: value for match in (*near[::-1], cause) for name, value in match.captured.items()}
    return Diagnosis(
        id=rule.id,
        cause=sentence(rule.cause, named),
        sure=sure,
        rank=first if cause.line.rank is None else cause.line.rank,
        evidence=(cause.line, *(match.line for match in same[: _EVIDENCE - 1])),
        place=cause.place,
        followed="; ".join(follows),
        fix=rule.fix,
        retry="" if sure == "unknown" else rule.retry,
    )


def sentence(template: str, captured: dict[str, str]) -> str:
    """Fill a rule's sentence; what is in brackets is left out where nothing was captured for it."""

    def optional(part: re.Match[str]) -> str:
        return part[1] if all(name in captured for name in _NAME.findall(part[1])) else ""

    return _NAME.sub(lambda name: captured.get(name[1], "…"), _OPTIONAL.sub(optional, template))
