"""Which checks there are: those of this package, those that other packages add by entry point, and those of a site.

A check is a small function with a decorator over it::

    @on_each_node("shm", why="...", fact="shm")
    def shm(fact: Any, node: Node, seen: Seen) -> Finding: ...

    @on_the_whole("versions", why="...", facts=("torch",))
    def versions(seen: Seen) -> Iterable[Finding]: ...

A site adds a directory of executables, which are run on each node. They exit as plugins of Nagios do: with 0 if all is
well, 1 for a warning, 2 for a failure, and 3 if nothing is known. The first line of their output says what was found,
the others what to do about it.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.checks.model import Check, Finding, Node, Seen, failed, passed, skipped, warned
from allranks.errors import JobError, UsageError
from allranks.job.problems import did_you_mean
from allranks.system import plugins

if TYPE_CHECKING:
    from allranks.launch.submit import Launch

#: Other packages name a module here whose checks are added.
_GROUP = "allranks.checks"

#: How the names of the facts of a site's checks start; the executable's follows.
_FACT = "site/"
#: What --only and --skip can name.
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)
#: More is not sent to each node.
_LARGEST = 1 << 20

_checks: dict[str, Check] = {}

NodeCheck = Callable[[Any, Node, Seen], Finding]
WholeCheck = Callable[[Seen], Iterable[Finding]]


def on_each_node(name: str, *, why: str, fact: str, also: tuple[str, ...] = ()) -> Callable[[NodeCheck], NodeCheck]:
    """Register a check of one fact of each node, which is skipped where the fact is missing.

    ``fact`` is one of :data:`allranks.checks.collect.gather.FACTS`; ``also`` are further facts that the check may look
    up in those of the node. :class:`Check` describes the others.
    """

    def register(function: NodeCheck) -> NodeCheck:
        _add(node_check(name, why=why, fact=fact, find=function, also=also))
        return function

    return register


def node_check(name: str, *, why: str, fact: str, find: NodeCheck, also: tuple[str, ...] = ()) -> Check:
    """Make a check of one fact of each node; see :func:`on_each_node`."""

    def find_all(seen: Seen) -> Iterator[Finding]:
        if not seen.nodes:
            yield skipped(seen.why_no_nodes)
        for node in seen.nodes:
            if fact in node.facts:
                yield find(node.facts[fact], node, seen).on(node.host)
            elif node.failure is None:
                yield skipped(node.errors.get(fact, "it was not requested"), host=node.host)

    return Check(name, why, find_all, (fact, *also))


def on_the_whole(
    name: str, *, why: str, facts: tuple[str, ...] = (), is_full: bool = False, needs_trial: bool = False
) -> Callable[[WholeCheck], WholeCheck]:
    """Register a check of the job, or one that compares nodes; see :class:`Check`."""

    def register(function: WholeCheck) -> WholeCheck:
        _add(Check(name, why, function, facts, is_full, needs_trial))
        return function

    return register


def _add(check: Check) -> None:
    if check.name in _checks:
        raise ValueError(f"there are two checks with the name {check.name}")
    _checks[check.name] = check


def all_checks() -> tuple[Check, ...]:
    """Return all checks, in the order in which their findings are shown.

    Raises:
        AllranksError: a package's checks cannot be loaded.
    """
    import_module("allranks.checks.topics")
    for point in plugins.points(_GROUP):
        plugins.load(point, "checks")
    return tuple(_checks.values())


def chosen(only: Iterable[str], skip: Iterable[str], *, is_full: bool, own: Sequence[Check] = ()) -> tuple[Check, ...]:
    """Return the checks that were requested: those named in ``only``, else all but those of ``--full``.

    ``own`` are further checks, those of a job's directory.

    Raises:
        UsageError: there is no check of such a name, or two have one.
        AllranksError: a package's checks cannot be loaded.
    """
    checks, only, skip = (*all_checks(), *own), set(only), set(skip)
    known = [check.name for check in checks]
    if twice := next((check for check in own if known.count(check.name) > 1), None):
        raise UsageError(f"there are two checks with the name {twice.name!r}", why=twice.why, fix="rename that file")
    for name in (*only, *skip):
        if name not in known:
            fix = did_you_mean(name, known) or "leave it out"
            raise UsageError(f"there is no check {name!r}", why=f"the checks are: {', '.join(known)}", fix=fix)
    wanted = [check for check in checks if (check.name in only if only else is_full or not check.is_full)]
    return tuple(check for check in wanted if check.name not in skip)


# --- the checks of a site ---


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


def site_programs(launch: Launch, facts: Iterable[str]) -> dict[str, str]:
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
    """Return why a file is not a check; empty if it is one."""
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
        return skipped(what or "it exited with code 3 and printed nothing")
    fix = fix or "see what it looks at"
    if code == 2 and seen.is_prepared:  # Else environment.node_setup, which is not run yet, may put it right.
        return failed(what or "it exited with code 2 and printed nothing", fix=fix)
    if code in (1, 2):
        return warned(what or f"it exited with code {code} and printed nothing", fix=fix)
    ended = "it took too long and was stopped" if code is None else f"it exited with code {code}, not with 0, 1, 2 or 3"
    return warned(f"{ended}{': ' if what else ''}{what}", fix="correct it, or --skip it")
