"""The words of preflight: what a check is given, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.preflight.trials import Trial


class Grade(str, Enum):
    """What a check says: from the best to the worst, but for SKIP, which says nothing."""

    SKIP = "SKIP"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """What a check has found, on a node or of the job as a whole.

    Attributes:
        grade: how good that is.
        what: the measured value, in words.
        fix: what to do about it.
        host: the node; empty: it is about the job, or all nodes.
        why: why it matters, where there is more to say than the check itself says.
        exclude: the node without which the job can go on; empty: that is no way out.
    """

    grade: Grade
    what: str
    fix: str = ""
    host: str = ""
    why: str = ""
    exclude: str = ""

    def on(self, host: str) -> Finding:
        """Return it as found on a node."""
        return replace(self, host=host)


def passed(what: str, *, host: str = "") -> Finding:
    """Make a finding that all is well."""
    return Finding(Grade.PASS, what, host=host)


def warned(what: str, *, fix: str, host: str = "", why: str = "", exclude: str = "") -> Finding:
    """Make a finding of what can work, and may not work well."""
    return Finding(Grade.WARN, what, fix, host, why, exclude)


def failed(what: str, *, fix: str, host: str = "", why: str = "", exclude: str = "") -> Finding:
    """Make a finding of what cannot work."""
    return Finding(Grade.FAIL, what, fix, host, why, exclude)


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the first of the findings with the worst grade."""
    return max(findings, key=lambda finding: [*Grade].index(finding.grade))


def skipped(what: str, *, host: str = "") -> Finding:
    """Make a finding that nothing was looked at, and why."""
    return Finding(Grade.SKIP, what, host=host)


@dataclass(frozen=True)
class Node:
    """What is known of a node.

    Attributes:
        number: which node of the job it is.
        host: what the job calls it.
        facts: what was found on it, by the names of :data:`allranks.probe.gather.FACTS`.
        errors: why a fact is not there, by its name.
        failure: why there are no facts at all; None where there are.
    """

    number: int
    host: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    failure: Finding | None = None


@dataclass(frozen=True)
class Seen:
    """All that checks are given.

    Attributes:
        job: the job.
        plan: its plan on the cluster.
        environ: the calling environment.
        nodes: what is known of each node.
        why_no_nodes: why no node was looked at, where none was.
        is_prepared: whether the nodes were set up as for the job, ``environment.node_setup`` included.
        has_target: whether the job says what to run.
        word: what stands in the file that all nodes must see.
        is_submitted: whether the job is submitted next.
        trial: what became of a short training on them, where there was one.
        why_no_trial: why there was none.
        without: how the job goes on without a node, with ``{}`` for its name; empty: it cannot.
        search: has the nodes searched for the one, or the link, at fault, given how many bytes a second may be expected
            between two at least; None where there was no trial.
    """

    job: Job
    plan: Plan
    environ: Mapping[str, str]
    nodes: tuple[Node, ...] = ()
    why_no_nodes: str = ""
    is_prepared: bool = True
    has_target: bool = True
    word: str = ""
    is_submitted: bool = False
    trial: Trial | None = None
    why_no_trial: str = ""
    without: str = ""
    search: Callable[[float], Sequence[Finding]] | None = None


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: what ``--only`` and ``--skip`` call it.
        why: why it matters, in one sentence.
        find: looks at what is known.
        facts: names of the facts that it needs of each node.
        is_full: whether it is part of ``--full`` alone.
        needs_trial: whether it looks at a short training, which is made when all other checks are done.
    """

    name: str
    why: str
    find: Callable[[Seen], Iterable[Finding]]
    facts: tuple[str, ...] = ()
    is_full: bool = False
    needs_trial: bool = False
