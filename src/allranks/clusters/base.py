"""What a kind of cluster gives. The core does the rest: polling, following, recording, printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from allranks.errors import JobError

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.logs.cause import LogExcerpt
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Handle, Status
    from allranks.system.commands import Answer


class Request(NamedTuple):
    """What a plan is made from."""

    job: Job
    folder: Path  # Absolute, that relative paths of the job are relative to.
    run_dir: Path  # Absolute.
    environ: Mapping[str, str]  # The calling environment.
    standalone: bool = False  # Whether the script is all there will be: nothing makes the run's directory before.
    node_rank: int | None = None  # Which node of the job this machine is, where the user starts each by hand.


class Started(Protocol):
    """A run that was just started, held by the process that started it."""

    handle: Handle
    #: Whether it continues without that process: closing the terminal does not end it.
    outlives: bool

    def wait(self, seconds: float) -> bool:
        """Wait until its end, at most so long; return whether it has ended."""

    def signal(self, number: int) -> None:
        """Pass a signal on to it."""

    def news(self) -> Sequence[str]:
        """Return what has happened since the last call, a line for each event that a waiting user wants to know."""

    @property
    def awaited(self) -> str:
        """What is waited for, as of the last news: nodes, ranks that start, a queue; empty while ranks run."""


class Probe(NamedTuple):
    """A program that probes each node of a job before there are agents."""

    script: str  # Bash that sets the node up and becomes the program; its first argument is the node's number.
    program: str  # What the program is, which it reads from its stdin.
    folder: Path  # A directory here where both may be left for nodes that see it.
    seconds: float  # After which a node counts as one that does not answer.


class ProbeResult(NamedTuple):
    """Result of probing one node; ``fix`` is set if it was unreachable."""

    host: str
    answer: Answer
    fix: str = ""


class Issue(NamedTuple):
    """What stands against a job."""

    what: str  # What it asks for, and what there is.
    fix: str  # What the user can do.
    is_final: bool = True  # Whether it could never start; otherwise it would wait until something changes.
    is_refusal: bool = False  # Whether these are the scheduler's own words, with which it refuses a submitted job.


class Feasibility(NamedTuple):
    """Whether and when a job would start that is submitted now, as far as its scheduler says."""

    where: str  # What would take it: a partition, a queue.
    objections: Sequence[Issue] = ()
    start: float | None = None  # When it is expected to start, in seconds since 1970.

    @property
    def is_hopeless(self) -> bool:
        """Whether it would never start."""
        return any(objection.is_final for objection in self.objections)


class ClusterKind(Protocol):
    """A kind of cluster. ``plan``, ``shell_command`` and ``again`` only decide.

    Each kind takes the defaults that fit it.
    """

    name: str
    #: How a job continues without a node, in words of a fix, with ``{}`` for the node's name; empty: it cannot.
    without: str

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed.

        Raises:
            JobError: the job asks for what cannot be had there, its script is not there, or its hosts cannot be read.
            PreflightError: ranks, GPUs and backend do not fit each other or the machine.
        """

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command that waits for what the job asks for and gives a shell there, or runs ``words`` there.

        Raises:
            JobError: the cluster has no scheduler, so that there is nothing to wait for.
        """
        raise JobError(
            f"cluster {job.cluster} has no queue that could give a shell",
            why="it has no scheduler: allranks run starts jobs there at once",
            fix="--on a cluster with a scheduler, or ssh HOST for a shell on another machine",
        )

    def reach(self, environ: Mapping[str, str]) -> None:
        """Raise a LaunchError if the scheduler, where there is one, is not here or does not answer."""

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of the run, from the plan of its first."""

    def probe(self, plan: Plan, probe: Probe, environ: Mapping[str, str]) -> Sequence[ProbeResult] | None:
        """Probe each node of a plan, all at the same time; None where a scheduler has to give nodes first."""
        return None

    def feasibility(self, plan: Plan, environ: Mapping[str, str]) -> Feasibility | None:
        """Query what the scheduler would do with a plan, and submit nothing; None if there is none to query."""
        return None

    def warm_up(self, plan: Plan, environ: Mapping[str, str]) -> None:
        """Start what takes long and executes nothing of the user's, while the job is checked; :meth:`start` follows."""
        return

    def withdraw(self) -> None:
        """End what :meth:`warm_up` has started: the run was refused."""
        return

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Execute the plan. Unless ``detach``, the run ends with the process that called this.

        ``interrupted`` returns the number of the signal that has asked for the run's end, 0 if none has: a start that
        may take long ends all that it has started then.

        Raises:
            LaunchError: the job cannot be started; nothing of it is left.
            StartCancelledError: ``interrupted`` returned a signal before all of it was started.
        """

    def status(self, run: Run) -> Status:
        """Return the status of a run as it is now."""

    def fetch(self, run: Run) -> None:
        """Bring what a run has written to its directory here, where its nodes do not see that directory."""
        return

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left; raise a LaunchError if that cannot be done."""

    def log_excerpt(self, run: Run) -> LogExcerpt:
        """Find what this kind's own log, of an agent or of a scheduler, reports of the newest attempt's end."""
