"""Has nodes looked at that a scheduler has yet to give: by a short job that asks it for the same.

Each rank of that job, one on each node, runs the look and never fails: where one does, the scheduler would end the
others before they have told what they see.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.clusters import launch as launching
from allranks.clusters.base import Looked
from allranks.clusters.commands import Answer
from allranks.errors import LaunchError, StartCancelledError
from allranks.hostlist import expand
from allranks.job.spec import Environment, Launch, Retry
from allranks.preflight.waiting import end_if_asked, noted
from allranks.runs.files import write_whole
from allranks.runs.status import State

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Look, Started
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.preflight.waiting import Waiting
    from allranks.runs.record import Run
    from allranks.runs.status import Status

#: The job may last so long, where the user's own job may not last less.
_SECONDS = 300
#: How often signals are looked for while the job waits or runs, and what it gets beyond the time for the look.
_LOOK_SECONDS, _GRACE_SECONDS = 0.2, 15.0
#: In the folder of a look: what sets a node up, what it then reads, and what runs both.
_LOOK, _PROGRAM, _NODE = "look.sh", "look.json", "node.sh"
#: What each rank says first and last: its node, the node's name, all nodes; and how the look ended.
_BEGUN, _ENDED = "allranks-look", "allranks-look-ended"


def look_by_job(kind: ClusterKind, launch: launching.Launch, asked: Look, waiting: Waiting) -> Sequence[Looked] | str:
    """Look at all nodes that a job gets; or return why there are none.

    Args:
        kind: the kind of cluster that the job is for.
        launch: what would be launched.
        asked: the look; its folder also takes the record of the job that looks, so that it is no run of the user's.
        waiting: how long to wait until there are nodes.

    Raises:
        StartCancelledError: a signal came before the job was submitted.
        KeyboardInterrupt: Ctrl-C; the job is cancelled.
        SystemExit: another signal; likewise.
    """
    _leave(asked)
    mine = replace(launch, job=job_of(launch.job, asked.folder), runs_folder=asked.folder)
    try:
        return _carried_out(kind, mine, asked, waiting)
    except StartCancelledError:
        raise
    except LaunchError as error:
        return error.in_a_line


def job_of(job: Job, folder: Path) -> Job:
    """Return the job that looks: it asks for the same nodes, and runs what :func:`look_by_job` leaves in a folder.

    What sets nodes up is left to that, which tells how it failed. ``true`` is its Python: what is started besides the
    ranks of a job, and asked for their settings, is not needed.
    """
    script = shlex.quote(str(folder / _NODE))
    words = ("-c", f'[ ! -r {script} ] || . {script} "$GROUP_RANK" || true')
    own = () if not job.launch.agent else job.launch.launcher_args
    defaults = {"name": "check", "module": None, "script": None, "binary": "bash", "args": words, "workdir": "/"}
    time_limit = min(_SECONDS, job.resources.time or _SECONDS)
    gone = {"array": None, "mail": None, "output": None, "error": None}
    return job.model_copy(
        update={
            **defaults,
            "debug": False,
            "resources": job.resources.model_copy(update={"time": time_limit, "spares": 0}),
            "launch": Launch(launcher="direct", nproc_per_node=1, launcher_args=own),
            "environment": Environment(variables=job.environment.variables, python=("true",)),
            "scheduler": job.scheduler.model_copy(update=gone),
            "retry": Retry(requeue=False, warn_before=0),
        }
    )


def _leave(asked: Look) -> None:
    """Leave the files that each node reads."""
    given = shlex.quote(str(asked.folder / _PROGRAM))
    look = shlex.quote(str(asked.folder / _LOOK))
    nodes = '${SLURM_JOB_NODELIST:-$([ ! -r "$PBS_NODEFILE" ] || awk \'!seen[$0]++\' "$PBS_NODEFILE" | paste -sd,)}'
    lines = [
        "# as in the script of a job: PBS sets this for one rank that has all CPUs of its node",
        '[ "$OMP_NUM_THREADS" != "${NCPUS:-$PBS_NUM_PPN}" ] || unset OMP_NUM_THREADS',
        f'echo "{_BEGUN} $1 ${{SLURMD_NODENAME:-$HOSTNAME}} {nodes}"',
        f'bash {look} "$1" <{given} && code=0 || code=$?',
        f'echo "{_ENDED} $code"',
    ]
    write_whole(asked.folder / _LOOK, asked.script)
    write_whole(asked.folder / _PROGRAM, asked.program)
    write_whole(asked.folder / _NODE, "\n".join(lines) + "\n")


def _carried_out(kind: ClusterKind, mine: launching.Launch, asked: Look, waiting: Waiting) -> Sequence[Looked] | str:
    run, plan = launching.prepare(mine, kind)
    outlook = kind.outlook(plan, mine.environ)  # It may hang: a signal ends it, since there is nothing to cancel yet.
    if outlook and outlook.is_hopeless:
        return "the scheduler gives no such nodes"
    environ = mine.environ_for(plan)
    with noted() as signals:
        # Detached: a signal that comes to this process is for us to pass on.
        run, started = launching.start(
            run, plan, kind, environ, detach=True, watched=False, interrupted=lambda: next(iter(signals), 0)
        )
        try:
            status = _waited(kind, run, started, asked, waiting, signals)
        except BaseException:
            kind.cancel(run)
            raise
        return _result(kind, run, plan, status, asked, waiting)


def _waited(kind: ClusterKind, run: Run, started: Started, asked: Look, waiting: Waiting, signals: list[int]) -> Status:
    """Wait until the look has ended, or its time has; return what had become of it until then."""
    until, is_running = time.monotonic() + waiting.seconds, False
    while not started.wait(_LOOK_SECONDS):
        for line in started.news():
            waiting.tell(line)
        end_if_asked(signals, waiting.tell, "the job that looks")
        status = kind.status(run)
        if not is_running and status.state is State.RUNNING:
            is_running, until = True, time.monotonic() + asked.seconds + _GRACE_SECONDS
        if time.monotonic() > until:
            kind.cancel(run)
            return status
    return kind.status(run)


def _result(
    kind: ClusterKind, run: Run, plan: Plan, status: Status, asked: Look, waiting: Waiting
) -> Sequence[Looked] | str:
    found = read(run.attempt_folder)
    if found:
        return _all_of(found, plan.nnodes, kind, run, asked)
    if status.state is State.PENDING:
        return waiting.in_vain(plan.cluster, status)
    said = kind.said(run)
    words = status.reason or next(reversed(said.causes), "") or status.native
    what = "ended" if status.state.is_final else "has not ended in time"
    answer = Answer(1, "", f"the job that looks at the nodes {what}: {words}")
    return [Looked(plan.cluster, answer, f"can a job of yours write into {asked.folder.parent}?")]


@dataclass(frozen=True)
class Told:
    """What the rank of a node has left: the node's name, those of all nodes where known, and how the look ended."""

    host: str
    hosts: tuple[str, ...]
    answer: Answer


def read(attempt: Path) -> dict[int, Told]:
    """Read what the ranks of an attempt have left, by node."""
    found: dict[int, Told] = {}
    for log in sorted(attempt.glob("node-*/rank-*.out")):
        out = log.read_text(errors="replace")
        err = log.with_suffix(".err")
        begun = re.search(rf"^{_BEGUN} (\d+) (\S+) ?(\S*)$", out, re.MULTILINE)
        ended = re.search(rf"^{_ENDED} (\d+)$", out, re.MULTILINE)
        if begun:
            said = err.read_text(errors="replace") if err.exists() else ""
            late = Answer(1, out, "its look has not ended in time", unreached=True, is_late=True)
            answer = Answer(int(ended[1]), out, said) if ended else late
            found[int(begun[1])] = Told(begun[2], _expanded(begun[3]), answer)
    return found


def _expanded(text: str) -> tuple[str, ...]:
    with contextlib.suppress(ValueError):
        return tuple(expand(text)) if text else ()
    return ()


def _all_of(found: dict[int, Told], asked_for: int, kind: ClusterKind, run: Run, asked: Look) -> list[Looked]:
    """Return what became of the look at each node, those that have told nothing included."""
    hosts = max((told.hosts for told in found.values()), key=len)
    count = len(hosts) or max(asked_for, *(number + 1 for number in found))
    looked = []
    for number in range(count):
        if number in found:
            looked.append(Looked(found[number].host, found[number].answer))
            continue
        host = hosts[number] if hosts else f"node {number}"
        words = next((line for line in reversed(kind.said(run).causes) if host in line), "it has told nothing")
        fix = f"it must see {asked.folder.parent}: is that on a file system that all nodes share?"
        looked.append(Looked(host, Answer(1, "", words, unreached=True), fix))
    return looked
