"""What a kind of cluster gives. The core does the rest: polling, following, recording, printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from allranks.clusters.commands import Answer
    from allranks.clusters.outlook import Outlook
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Handle, Status


@dataclass(frozen=True)
class Request:
    """What a plan is made from.

    Attributes:
        job: the job.
        folder: absolute folder that relative paths of the job are relative to.
        run_dir: absolute folder of the run.
        environ: the calling environment.
        standalone: whether the script is all there will be: nothing makes the run's folder before it starts.
        node_rank: which node of the job this machine is, where somebody starts each node by hand.
    """

    job: Job
    folder: Path
    run_dir: Path
    environ: Mapping[str, str]
    standalone: bool = False
    node_rank: int | None = None


@dataclass(frozen=True)
class Said:
    """What a cluster's own log says of how a run ended: none of its ranks is to blame.

    Attributes:
        log: the log, if there is one.
        causes: lines of it that may tell why, oldest first.
        fix: what to do about it, where there is more to say than that; ``{run}`` is what to call the run in a command.
    """

    log: Path | None = None
    causes: Sequence[str] = ()
    fix: str = ""


class Started(Protocol):
    """A run that was just started, held by the process that started it."""

    handle: Handle
    #: Whether it goes on without that process: a terminal that is closed does not end it.
    outlives: bool

    def wait(self, seconds: float) -> bool:
        """Wait until its end, at most so long; tell whether it has ended."""

    def signal(self, number: int) -> None:
        """Pass a signal on to it."""

    def news(self) -> Sequence[str]:
        """Tell what has happened since the last call that a person who waits wants to know, a line each."""

    @property
    def awaited(self) -> str:
        """What is waited for, as of the last news: nodes, ranks that start, a queue; empty while ranks run."""


@dataclass(frozen=True)
class Look:
    """A program that looks at each node of a job before there are agents.

    Attributes:
        script: lines of bash that set the node up and become the program, which reads ``program`` from its stdin. The
            first argument is the node's number.
        program: what the program is.
        folder: a folder here where both may be left for nodes that see it.
        seconds: after which a node counts as one that does not answer.
    """

    script: str
    program: str
    folder: Path
    seconds: float


@dataclass(frozen=True)
class Looked:
    """What became of a look at one node: the answer, and where it was not reached what its user can do."""

    host: str
    answer: Answer
    fix: str = ""


class ClusterKind(Protocol):
    """A kind of cluster. ``plan``, ``shell_command`` and ``again`` only decide."""

    name: str
    #: How a job goes on without a node, in words of a fix, with ``{}`` for the node's name; empty: it cannot.
    without: str

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed."""

    def shell_command(
        self, job: Job, words: Sequence[str], environ: Mapping[str, str], *, terminal: bool
    ) -> tuple[str, ...]:
        """Build the command that waits for what the job asks for and gives a shell there, or runs ``words`` there."""

    def again(self, plan: Plan, attempt: int) -> Plan:
        """Return the plan for another attempt of the run, from the plan of its first."""

    def look(self, plan: Plan, look: Look, environ: Mapping[str, str]) -> Sequence[Looked] | None:
        """Look at each node of a plan, all at the same time; None where somebody has to be asked for nodes first."""

    def outlook(self, plan: Plan, environ: Mapping[str, str]) -> Outlook | None:
        """Ask the scheduler what it would do with a plan, and submit nothing; None where none is asked."""

    def start(self, plan: Plan, environ: Mapping[str, str], *, detach: bool, interrupted: Callable[[], int]) -> Started:
        """Execute the plan. Unless ``detach``, the run ends with the process that called this.

        ``interrupted`` returns the number of the signal that has asked for the run's end, 0 if none has: a start that
        may take long ends all that it has begun then, and raises :class:`~allranks.errors.StartCancelledError`.
        """

    def status(self, run: Run) -> Status:
        """Find out what has become of a run."""

    def bring(self, run: Run) -> None:
        """Bring what a run has written to its folder here, where its nodes do not see that folder."""

    def cancel(self, run: Run) -> None:
        """End a run and wait until nothing of it is left."""

    def said(self, run: Run) -> Said:
        """Find what this kind's own log, of an agent or of a scheduler, says of the newest attempt's end."""
