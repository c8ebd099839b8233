"""Where checks are found: those of this package, and those that other packages add by entry point.

A check is a small function with a decorator over it::

    @on_each_node("shm", why="...", fact="shm")
    def shm(fact: Any, node: Node, seen: Seen) -> Finding: ...

    @on_the_whole("versions", why="...", facts=("torch",))
    def versions(seen: Seen) -> Iterable[Finding]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from allranks.errors import UsageError
from allranks.job.problems import did_you_mean
from allranks.preflight.model import Check, Finding, Node, Seen, skipped

#: Modules whose checks are ours, in the order in which their findings are shown.
_MODULES = ("nodes", "machine")
#: Other packages name a module here whose checks are added.
_GROUP = "allranks.checks"

_checks: dict[str, Check] = {}

NodeCheck = Callable[[Any, Node, Seen], Finding]
WholeCheck = Callable[[Seen], Iterable[Finding]]


def on_each_node(name: str, *, why: str, fact: str, is_full: bool = False) -> Callable[[NodeCheck], NodeCheck]:
    """Register a check that looks at one fact of each node. Where the fact is not there it is skipped.

    Args:
        name: what ``--only`` and ``--skip`` call it.
        why: why it matters, in one sentence.
        fact: the fact, of :data:`allranks.probe.gather.FACTS`.
        is_full: whether it is part of ``--full`` alone.
    """

    def register(function: NodeCheck) -> NodeCheck:
        def find(seen: Seen) -> Iterator[Finding]:
            if not seen.nodes:
                yield skipped(seen.why_no_nodes)
            for node in seen.nodes:
                if fact in node.facts:
                    yield function(node.facts[fact], node, seen).on(node.host)
                elif node.failure is None:
                    yield skipped(node.errors.get(fact, "it was not asked for"), host=node.host)

        _add(Check(name, why, find, (fact,), is_full))
        return function

    return register


def on_the_whole(
    name: str, *, why: str, facts: tuple[str, ...] = (), is_full: bool = False
) -> Callable[[WholeCheck], WholeCheck]:
    """Register a check that looks at the job, or compares nodes.

    Args:
        name: what ``--only`` and ``--skip`` call it.
        why: why it matters, in one sentence.
        facts: the facts that it needs of each node.
        is_full: whether it is part of ``--full`` alone.
    """

    def register(function: WholeCheck) -> WholeCheck:
        _add(Check(name, why, function, facts, is_full))
        return function

    return register


def _add(check: Check) -> None:
    if check.name in _checks:
        raise ValueError(f"there are two checks with the name {check.name}")
    _checks[check.name] = check


def all_checks() -> tuple[Check, ...]:
    """Return all checks that there are, in the order in which their findings are shown."""
    from importlib.metadata import entry_points

    for module in _MODULES:
        import_module(f"allranks.preflight.checks.{module}")
    for point in entry_points(group=_GROUP):
        point.load()
    return tuple(_checks.values())


def chosen(only: Iterable[str], skip: Iterable[str], *, is_full: bool) -> tuple[Check, ...]:
    """Return the checks that were asked for.

    Args:
        only: names; none: all.
        skip: names of checks that are left out.
        is_full: whether to take those that take longer too; one that is named in ``only`` is taken anyway.

    Raises:
        UsageError: there is no check of such a name.
    """
    checks, only, skip = all_checks(), set(only), set(skip)
    known = [check.name for check in checks]
    for name in (*only, *skip):
        if name not in known:
            raise UsageError(
                f"there is no check {name!r}", why=f"the checks are: {', '.join(known)}", fix=did_you_mean(name, known)
            )
    wanted = [check for check in checks if (check.name in only if only else is_full or not check.is_full)]
    return tuple(check for check in wanted if check.name not in skip)
