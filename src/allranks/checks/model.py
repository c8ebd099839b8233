"""What a check is given, and what it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.record.selftest import SelfTestReport
    from allranks.runs.record import Run

Value = TypeVar("Value")
T = TypeVar("T", bound="SelfTestReport")


class Grade(str, Enum):
    """Result of a check, from the best to the worst; SKIP is none."""

    SKIP = "SKIP"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """A result of a check, for a node or the job as a whole."""

    grade: Grade
    what: str  # The measured value, in words.
    fix: str = ""  # What to do about it.
    host: str = ""  # The node; empty: it is about the job, or all nodes.
    why: str = ""  # Why it matters, where there is more to say than the check itself says.
    exclude: str = ""  # The node without which the job can run; empty: that does not help.

    def on(self, host: str) -> Finding:
        """Return the same finding for a node."""
        return replace(self, host=host)


def passed(what: str, *, host: str = "") -> Finding:
    """Make a finding that a check passed."""
    return Finding(Grade.PASS, what, host=host)


def warned(what: str, *, fix: str, host: str = "", why: str = "", exclude: str = "") -> Finding:
    """Make a finding of what can work, and may go wrong or be slow."""
    return Finding(Grade.WARN, what, fix, host, why, exclude)


def failed(what: str, *, fix: str, host: str = "", why: str = "", exclude: str = "") -> Finding:
    """Make a finding of what cannot work."""
    return Finding(Grade.FAIL, what, fix, host, why, exclude)


def skipped(what: str, *, host: str = "") -> Finding:
    """Make a finding that nothing was checked, and why."""
    return Finding(Grade.SKIP, what, host=host)


@dataclass(frozen=True)
class Node:
    """A node's facts by name (``checks.collect.gather``), the errors of those that failed, or why there are none."""

    number: int
    host: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    failure: Finding | None = None


@dataclass(frozen=True)
class Trial:
    """A self-test whose run has ended."""

    run: Run
    world_size: int  # Ranks that were requested; 0: as many as the nodes have GPUs, or as there are nodes.
    reports: tuple[SelfTestReport, ...]  # All reports of the ranks, rank after rank.

    @property
    def has_succeeded(self) -> bool:
        """Whether all ranks exited without an error, whatever they have computed."""
        return self.run.record.status.state is State.SUCCEEDED

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank that has reported, by rank."""
        from allranks.record.selftest import RankInfo  # Not before each run, which has no self-test.

        return {who.rank: who.host for who in self.of(RankInfo)}

    def of(self, kind: type[T]) -> list[T]:
        """Return the reports of a kind, rank after rank."""
        return [one for one in self.reports if isinstance(one, kind)]

    def name(self, rank: int) -> str:
        """Write a rank with its host."""
        return f"rank {rank} on {self.hosts[rank]}" if rank in self.hosts else f"rank {rank}"


@dataclass(frozen=True)
class Seen:
    """All that checks are given."""

    job: Job
    plan: Plan
    environ: Mapping[str, str]  # The calling environment.
    nodes: tuple[Node, ...] = ()
    why_no_nodes: str = ""  # Why no node was probed, where none was.
    is_prepared: bool = True  # Whether nodes were set up as for the job, environment.node_setup included.
    has_target: bool = True  # Whether the job says what to run.
    word: str = ""  # The content of the file that all nodes must see.
    is_submitted: bool = False  # Whether the job is submitted next.
    trial: Trial | None = None  # The self-test on the nodes, where there was one.
    why_no_trial: str = ""
    without: str = ""  # How the job runs without a node, with {} for its name; empty: it cannot.
    #: Searches the nodes for the one, or the link, at fault, given how many bytes a second may be expected between two
    #: at least; None where there was no self-test.
    search: Callable[[float], Sequence[Finding]] | None = None


@dataclass(frozen=True)
class Check:
    """A check, by its name for ``--only`` and ``--skip``."""

    name: str
    why: str  # Why it matters, in one sentence.
    find: Callable[[Seen], Iterable[Finding]]  # Judges what is known.
    facts: tuple[str, ...] = ()  # Names of the facts that it needs of each node.
    is_full: bool = False  # Whether it is part of --full alone.
    needs_trial: bool = False  # Whether it judges the self-test, which is run after all other checks.


@dataclass(frozen=True)
class Result:
    """A check with one of its findings."""

    check: Check
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        """Return both as plain JSON; ``host`` is empty for what is about the job."""
        found = {**asdict(self.finding), "grade": self.finding.grade.value}
        return {"check": self.check.name, **found, "why": self.finding.why or self.check.why}


def odd_ones(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]]:
    """Return the most frequent value (of equals the first), and the hosts that have another one, with theirs."""
    (common, _), *_ = Counter(values.values()).most_common(1)
    return common, {host: value for host, value in values.items() if value != common}
