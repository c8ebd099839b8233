"""Where checks are found: those of this package, and those that other packages add by entry point.

A check is a small function with a decorator over it::

    @on_each_node("shm", why="...", fact="shm")
    def shm(fact: Any, node: Node, seen: Seen) -> Finding: ...

    @on_the_whole("versions", why="...", facts=("torch",))
    def versions(seen: Seen) -> Iterable[Finding]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from allranks.checks.model import Check, Finding, Node, Seen, skipped
from allranks.errors import UsageError
from allranks.job.problems import did_you_mean
from allranks.system import plugins

#: Other packages name a module here whose checks are added.
_GROUP = "allranks.checks"

_checks: dict[str, Check] = {}

NodeCheck = Callable[[Any, Node, Seen], Finding]
WholeCheck = Callable[[Seen], Iterable[Finding]]


def on_each_node(
    name: str, *, why: str, fact: str, also: tuple[str, ...] = (), is_full: bool = False
) -> Callable[[NodeCheck], NodeCheck]:
    """Register a check of one fact of each node, which is skipped where the fact is missing.

    ``fact`` is one of :data:`allranks.checks.collect.gather.FACTS`; ``also`` are further facts that the check may look
    up in those of the node. :class:`Check` describes the others.
    """

    def register(function: NodeCheck) -> NodeCheck:
        _add(node_check(name, why=why, fact=fact, find=function, also=also, is_full=is_full))
        return function

    return register


def node_check(
    name: str, *, why: str, fact: str, find: NodeCheck, also: tuple[str, ...] = (), is_full: bool = False
) -> Check:
    """Make a check of one fact of each node; see :func:`on_each_node`."""

    def find_all(seen: Seen) -> Iterator[Finding]:
        if not seen.nodes:
            yield skipped(seen.why_no_nodes)
        for node in seen.nodes:
            if fact in node.facts:
                yield find(node.facts[fact], node, seen).on(node.host)
            elif node.failure is None:
                yield skipped(node.errors.get(fact, "it was not asked for"), host=node.host)

    return Check(name, why, find_all, (fact, *also), is_full)


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
    """Return the checks that were asked for: those named in ``only``, else all but those of ``--full``.

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
            raise UsageError(
                f"there is no check {name!r}", why=f"the checks are: {', '.join(known)}", fix=did_you_mean(name, known)
            )
    wanted = [check for check in checks if (check.name in only if only else is_full or not check.is_full)]
    return tuple(check for check in wanted if check.name not in skip)
