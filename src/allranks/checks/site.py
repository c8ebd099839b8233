"""The checks that a site adds by a directory of executables, which are run on each node.

They exit as plugins of Nagios do: with 0 if all is well, 1 for a warning, 2 for a failure, and 3 if nothing is known.
The first line of their output says what was found, the others what to do about it.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.checks.model import Check, Finding, Node, Seen, failed, passed, skipped, warned
from allranks.checks.registry import chosen, node_check
from allranks.errors import JobError

if TYPE_CHECKING:
    from allranks.launch.submit import Launch

#: How the names of their facts start; the executable's follows.
_FACT = "site/"
#: What --only and --skip can name.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
#: More is not sent to each node.
_LARGEST = 1 << 20


def chosen_for(launch: Launch, only: Collection[str], skip: Iterable[str], *, is_full: bool) -> tuple[Check, ...]:
    """Return the checks that a command and its job ask for (see :func:`chosen`): ``only`` beats what the job skips."""
    own = []
    for file in _files(launch):
        text = f"this site checks it: {file}"
        if why := _why_not(file):
            own.append(Check(file.name, text, lambda seen, why=why: [skipped(why)]))  # type: ignore[misc]
        else:
            own.append(node_check(file.name, why=text, fact=_FACT + file.name, find=_finding))
    left_out = [name for name in launch.job.checks.skip if name not in only]
    return chosen(only, (*left_out, *skip), is_full=is_full, own=own)


def programs(launch: Launch, facts: Iterable[str]) -> dict[str, str]:
    """Return the executables that some facts need, by name, in base64."""
    names = {fact.removeprefix(_FACT) for fact in facts if fact.startswith(_FACT)}
    files = [file for file in _files(launch) if file.name in names] if names else []
    return {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}


def _files(launch: Launch) -> list[Path]:
    """Return the files in the job's directory of checks, sorted, without hidden ones.

    Raises:
        JobError: there is no such directory, or it cannot be read.
    """
    if launch.job.checks.folder is None:
        return []
    folder = launch.folder / launch.job.checks.folder
    try:
        return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        why = f"{(error.strerror or str(error)).lower()}: {folder}"
        raise JobError("the directory of checks cannot be read", why=why, fix="correct checks.folder") from error


def _why_not(file: Path) -> str:
    """Return why a file is no check; empty if it is one."""
    if not os.access(file, os.X_OK | os.R_OK):
        return f"it is not executable: chmod +x {shlex.quote(str(file))}"
    if not _NAME.fullmatch(file.name):
        return "letters, digits and '.', '_', '+', '-' make the name of a check"
    is_large = file.stat().st_size > _LARGEST
    return "it is larger than 1 MB: let it start what is installed on the nodes" if is_large else ""


def _finding(fact: Any, node: Node, seen: Seen) -> Finding:
    code, text = fact["code"], fact["out"].strip() or fact["err"].strip()
    first, *others = [line.strip() for line in text.splitlines()] or [""]
    # Behind the bar are numbers for the graphs of Nagios.
    what, fix = first.partition("|")[0].strip(), "; ".join(filter(None, others))
    if code == 0:
        return passed(what or "good")
    if code == 3:
        return skipped(what or "it ended with 3, and says nothing")
    fix = fix or "see what it looks at"
    if code == 2 and seen.is_prepared:  # Else environment.node_setup, which is not run yet, may put it right.
        return failed(what or "it ended with 2, and says nothing", fix=fix)
    if code in (1, 2):
        return warned(what or f"it ended with {code}, and says nothing", fix=fix)
    ended = "it took too long, and was ended" if code is None else f"it ended with {code}, and not with 0, 1, 2 or 3"
    return warned(f"{ended}{': ' if what else ''}{what}", fix="correct it, or --skip it")
