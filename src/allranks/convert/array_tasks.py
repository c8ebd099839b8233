"""Values that a script computes for each task of a job array: the lines that do so go with the training's command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from allranks.convert.draft import Draft
from allranks.lint.model import Word

_TASK = re.compile(r"\b(SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX|PBS_ARRAYID|SGE_TASK_ID)\b")
#: Commands that give each rank the same answer.
_READING = ": [ awk basename bc cat cut dirname echo expr grep head printf sed seq tail test tr wc export"
_READS = frozenset(_READING.split())


def lines_of_task(draft: Draft, words: Sequence[Word], own: frozenset[str]) -> list[str] | None:
    """Return the statements from which words of the training get their values, which depend on the task of the array.

    Args:
        own: variables that say who a rank is: nothing of them is computed here.

    Returns:
        None if the values do not depend on the task, or if ranks that compute them may get others than the script.
    """
    script, start = draft.view.script, words[0].at
    names = {use.name for use in script.uses for word in words if word.at <= use.at < word.end}
    found = [draft.source(word.at, word.end) for word in words]
    lines: list[str] = []
    for first, end in reversed([span for span in script.statements if span[1] <= start]):
        if not any(each.name in names for each in script.assignments if first <= each.at < end and not each.is_prefix):
            continue
        if not {each.name for each in script.commands if first <= each.at < end} <= _READS:
            return None
        names |= {use.name for use in script.uses if first <= use.at < end}
        lines.insert(0, draft.source(first, end))
    is_of_task = any(_TASK.search(each) for each in (*found, *lines))
    is_of_script = any(name.isdecimal() or name in ("@", "*", "RANDOM", *own) for name in names)
    return lines if is_of_task and not is_of_script else None
