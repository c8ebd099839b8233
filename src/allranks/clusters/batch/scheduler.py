"""What a scheduler is: data, and a few pure functions. This package does the rest, the same for each of them.

A scheduler's commands have a time limit, and what goes wrong is explained in the scheduler's words.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allranks import contract
from allranks.errors import LaunchError, StartCancelledError
from allranks.runs.status import TIMED_OUT, State
from allranks.system import schedulers
from allranks.system.commands import Answer, run_one

if TYPE_CHECKING:
    from allranks.clusters.base import Feasibility
    from allranks.clusters.batch.plan import Draft
    from allranks.job.spec import Job
    from allranks.plan.directives import Directive
    from allranks.plan.plan import Plan
    from allranks.runs.attempt import Failure
    from allranks.system.schedulers import SchedulerEnvironment

#: Slurm's commands themselves try for a minute to find a controller; a server under load may take as long.
_SECONDS = 90.0
#: How long a command that submits a job may run on after it has printed the id: a site's own may have more to do.
_AFTER_ID_SECONDS = contract.scaled_wait(10.0)
#: How long it may run on after a signal. Most exit within this time and print the id, so that the job can be cancelled.
_AFTER_SIGNAL_SECONDS = 1.0


@dataclass(frozen=True)
class JobReason:
    """Why a job waits or has ended, and what the user can do; ``hopeless`` if it waits for what can never come.

    ``{job}`` in the fix stands for the job's id.
    """

    text: str
    fix: str = ""
    hopeless: bool = False

    def __str__(self) -> str:
        text = f"{self.text}, and so it will never start" if self.hopeless else self.text
        return f"{text}: {self.fix}" if self.fix else text


OUT_OF_TIME = JobReason(*TIMED_OUT)
OUT_OF_MEMORY = JobReason("it used more memory than it requested", "raise resources.memory")


@dataclass(frozen=True)
class JobInfo:
    """What a scheduler reports of a job. Times are in seconds since 1970, memory in bytes."""

    job_id: str  # Each task of an array has one of its own.
    state: State
    native: str  # The scheduler's word for the state.
    word: str = ""  # The scheduler's word, or comment, on why it is so.
    exit_code: int | None = None  # Of the batch script, if it exited by itself.
    signal: int | None = None  # That ended it, if one did.
    started: float | None = None  # When it got its nodes; None while it waits.
    ended: float | None = None
    nodes: str = ""  # As the scheduler writes them: node[01-04].
    peak_memory: int | None = None  # The most that it, or a task of it, used, if the scheduler reports that.
    why: JobReason | None = field(default=None, compare=False)  # Why it waits or ended, if the state does not say.

    @property
    def reason(self) -> str | None:
        """:attr:`why` in a sentence."""
        return str(self.why).replace("{job}", self.job_id) if self.why else None


def overall(tasks: Iterable[JobInfo]) -> JobInfo | None:
    """Return the task that decides on the state of an array: one that runs, else one that waits, else a failed one."""
    ranks = {State.RUNNING: 0, State.UNKNOWN: 1, State.PENDING: 2, State.SUCCEEDED: 4}
    return min(tasks, key=lambda task: ranks.get(task.state, 3), default=None)


@dataclass(frozen=True)
class UsableGpus:
    """GPUs of each node that ranks can use."""

    count: int
    why: str  # Where that is from.
    must_be_requested: bool = False  # Whether a task gets them only if the command that starts it asks for them.
    note: str = ""  # What is not as one may think.


@dataclass(frozen=True)
class Additions:
    """What a scheduler adds to a plan: nothing of it is the same for another one."""

    directives: Sequence[Directive] = ()
    options: Sequence[str] = ()  # That the script is submitted with.
    log: str = ""  # A word of shell for the log of what the script says, if the scheduler itself would write it late.
    node: Sequence[str] = ()  # Lines of node.sh that set what only the node knows.
    start: Sequence[str] = ()  # Options of the command that starts a task on each node, before the user's own.
    notes: Iterable[str] = ()  # What the job asks for and does not get, and what is not as one may think.


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """A scheduler. Its functions are pure, but for those that run its own commands."""

    name: str  # Of the kind.
    title: str  # What people call it.
    module: str  # The node-side module, which knows the variables of its jobs.
    host: str = "$HOSTNAME"  # A word of shell for a node's name.

    # What it does and does not.
    # Whether a script gets the environment of the command that submits it; else secrets come in a file, or with -v.
    passes_environment: bool = False
    warns_itself: bool = False  # Whether it warns ranks before the time limit; else the supervisor does.
    is_exact: bool = True  # Whether a job always gets the most nodes that it asks for, and must use all of them.
    own_keys: Sequence[str] = ()  # Those of the keys which only some schedulers have that this one has too.
    without: str = ""  # How a job continues without a node, with {} for the node's name; empty if it cannot.
    patience: str  # How long ranks have to exit when their job is cancelled.
    independent: tuple[str, ...] = ()  # Options of what starts tasks, with which one that fails ends no other.

    # The plan.
    script: str  # The name of the script that is submitted, and how each directive in it starts.
    prefix: str
    allocate: str  # The command that gives a shell in an allocation of {} nodes.
    # Reads how many nodes, and GPUs of each, the user's own directives ask for; None if they do not say.
    own: Callable[[Job], tuple[int | None, int | None]]
    nodes_there: Callable[[Mapping[str, str]], int]  # Counts the nodes of the allocation that this is inside of.
    # Finds the GPUs of each node of that allocation; None: they are counted on this one, the first.
    gpus_there: Callable[[Mapping[str, str]], UsableGpus] | None = None
    additions: Callable[[Draft], Additions]
    # Builds the command of ClusterKind.shell_command: job, ranks on a node, words, environment, whether a person types.
    shell: Callable[[Job, int, Sequence[str], Mapping[str, str], bool], tuple[str, ...]]

    # Its commands, and what they print.
    place: str  # Where they are found.
    submit: str  # Submits a script.
    submitted: re.Pattern[str]  # A line with the id of a submitted job, in its groups.
    list_jobs: str  # Lists a person's jobs.
    retry: str  # What to do if a command does not answer.
    cancel: Callable[[str], tuple[str, ...]]  # Builds the command that cancels a job.
    gone: str  # What they print of a job that has ended, or is not known any more.
    show: Callable[[str], tuple[str, ...]]  # Builds the command by which a person sees all about a job.
    query_job: Callable[[str], JobInfo | None]  # Queries the state of a job; None if there is no record of it.
    feasibility: Callable[[Plan, Mapping[str, str]], Feasibility]  # Queries whether a plan could ever start.
    noise: Sequence[tuple[str, str]] = ()  # Patterns that say nothing in what they print, and what is left of each.
    unreachable: Sequence[tuple[str, str]] = ()  # What they print if it cannot be reached, and what to do.
    # What submit prints if it refuses a job, and what to do; the first that is found counts.
    refused: Sequence[tuple[str, str]] = ()

    # Its logs. Returns patterns for the paths of a job's logs, the best first: from the run's directory, as a pattern,
    # the job's id, and what the job asks for, by what that is about.
    logs: Callable[[str, str, Mapping[str, str]], Sequence[str]] = lambda _folder, _job_id, _requested: ()
    log_noise: re.Pattern[str] = re.compile(r"(?!)")  # How lines of a log start that say nothing of a cause.
    # Finds the first rank that failed in the lines of a job's log, if they name it.
    failure: Callable[[Sequence[str]], Failure | None] = lambda _lines: None

    @property
    def environment(self) -> SchedulerEnvironment:
        """The variables of its jobs."""
        return schedulers.load(self.module)

    def job_id(self, printed: str) -> str:
        """Return the id of a submitted job in what ``submit`` printed; raise a LaunchError if there is none."""
        found = [*self.submitted.finditer(printed)]
        if not found:
            why, fix = f"it said {printed.strip()!r}", f"{self.list_jobs} lists the jobs that you have"
            raise LaunchError(f"{self.submit} did not print the id of the job", why=why, fix=fix)
        return ";".join(filter(None, found[-1].groups()))  # A site's own messages come before.

    def is_away(self, answer: Answer) -> bool:
        """Return whether a command failed because the scheduler cannot be reached."""
        return answer.code != 0 and first_fix(self.unreachable, answer.out + answer.err) is not None

    def refusal(self, command: Sequence[str], code: int, printed: str) -> LaunchError:
        """Explain a command that failed, from its exit code and what it printed."""
        for pattern, left in ((rf"^{re.escape(command[0])}: ", ""), *self.noise):
            printed = re.sub(pattern, left, printed, flags=re.MULTILINE)
        lines = dict.fromkeys(line.strip() for line in printed.splitlines() if line.strip())
        why = "; ".join(lines) or f"{command[0]} ended with {code} and said nothing"
        if fix := first_fix(self.unreachable, printed):
            return LaunchError(f"{self.title} cannot be reached", why=why, fix=fix)
        if command[0] != self.submit:
            return LaunchError(f"{command[0]} failed", why=why, fix=f"type it to see more: {shlex.join(command)}")
        return LaunchError(f"{self.title} refuses the job", why=why, fix=first_fix(self.refused, printed))

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: str | None = None,
        sent: str = "",
        seconds: float = _SECONDS,
        is_over: Callable[[], bool] = lambda: False,
        hear: Callable[[str], None] = lambda _: None,
    ) -> Answer:
        """Run a command, whatever its exit code, as :func:`run_one` does; raise a LaunchError if it gives no answer."""
        try:
            answer = run_one(command, environ, cwd=cwd, sent=sent, seconds=seconds, is_over=is_over, hear=hear)
        except LaunchError as error:
            what = f"there is no {self.title} here: {command[0]} cannot be started"
            fix = f"run this where {command[0]} is in PATH, such as {self.place}"
            raise LaunchError(what, why=error.why, fix=fix) from error
        if answer.is_late:
            what = f"{self.title} cannot be reached: {command[0]} gave no answer for {seconds:g} s"
            raise LaunchError(what, fix=self.retry)
        return answer

    def run_patiently(self, command: Sequence[str], environ: Mapping[str, str]) -> Answer:
        """Run a command, and try again if the scheduler could not be reached just then."""
        for pause in (0.2, 0.5):
            done = self.run(command, environ)
            if not self.is_away(done):
                return done
            time.sleep(pause)
        return self.run(command, environ)

    def output(
        self, command: Sequence[str], environ: Mapping[str, str], seconds: float = _SECONDS, gone: str = ""
    ) -> str:
        """Run a command and return what it printed; raise a LaunchError if it fails, unless with words of ``gone``."""
        answer = self.run(command, environ, seconds=seconds)
        if answer.code and not (gone and re.search(gone, answer.err)):
            raise self.refusal(command, answer.code, answer.out + answer.err)
        return answer.out

    def submit_plan(self, plan: Plan, environ: Mapping[str, str], interrupted: Callable[[], int]) -> str:
        """Submit a plan's script, and return the job's id.

        A command that has printed the id and does not exit is killed: the job is submitted. After a signal, whose
        number ``interrupted`` returns, it gets a second.

        Raises:
            LaunchError: the command is not there, the scheduler cannot be reached, or it refuses.
            StartCancelledError: a signal came, and the command has printed no id.
        """
        command, job_id, until = plan.commands[0].command, "", math.inf

        def hear(text: str) -> None:
            nonlocal job_id
            with suppress(LaunchError):
                job_id = self.job_id(text[: text.rfind("\n") + 1])  # Half an id is that of another job.

        def is_over() -> bool:
            nonlocal until
            now, is_interrupted = time.monotonic(), bool(interrupted())
            if job_id or is_interrupted:
                until = min(until, now + (_AFTER_SIGNAL_SECONDS if is_interrupted else _AFTER_ID_SECONDS))
            return now >= until or bool(job_id and is_interrupted)

        try:
            done = self.run(command, environ, cwd=plan.workdir, is_over=is_over, hear=hear)
        except LaunchError as error:
            if job_id:
                return job_id
            if number := interrupted():
                name, lists = self.submit, self.list_jobs
                raise StartCancelledError(
                    f"cancelled while {name} was submitting the job",
                    number,
                    why=f"{name} did not end within a second, and was killed: the job may be submitted all the same",
                    fix=f"{lists} lists your jobs, and {self.cancel('')[0]} cancels one",
                ) from None
            raise plan.with_values(error) from error
        if done.code:
            refusal = plan.with_values(self.refusal(command, done.code, done.out + done.err))
            refusal.fix = refusal.fix or "allranks plan -v shows the script that it refuses"
            raise refusal
        return self.job_id(done.out)


def first_fix(known: Sequence[tuple[str, str]], printed: str) -> str | None:
    """Return what to do about the first of the known patterns that is found, in any case, in what a command printed."""
    return next((fix for pattern, fix in known if re.search(f"(?i){pattern}", printed)), None)


def explained(known: Iterable[Sequence[str]], text: str) -> JobReason | None:
    """Return what the first of the known patterns that is found in a text, in any case, means, and what to do.

    Both may have groups of the pattern in them, as ``\\1``.
    """
    for pattern, means, *fix in known:
        if found := re.search(pattern, text, re.IGNORECASE):
            return JobReason(found.expand(means), "".join(map(found.expand, fix)))
    return None
