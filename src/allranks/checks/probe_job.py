"""Probes nodes that a scheduler has yet to give, by a short job that asks for the same.

Each rank of that job, one on each node, runs the probe and never fails: where one does, the scheduler would end the
others before they have reported.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.checks.waiting import end_if_requested, noted
from allranks.clusters.base import ProbeResult
from allranks.clusters.batch.cluster import BatchCluster
from allranks.errors import LaunchError, StartCancelledError
from allranks.job.spec import Environment, Launch, Notify, Retry
from allranks.launch import submit as launching
from allranks.record.files import write_atomically
from allranks.runs.status import State
from allranks.system.commands import Answer

if TYPE_CHECKING:
    from allranks.checks.waiting import Waiting
    from allranks.clusters.base import ClusterKind, Probe, Started
    from allranks.job.spec import Job
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run
    from allranks.runs.status import Status

#: Time limit of the job in seconds, unless the user's own job has a shorter one.
_SECONDS = 300
#: Seconds between polls for signals and news, and those that the job gets beyond the time limit of the probe.
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 15.0
#: In the directory of a probe: what sets a node up, what it then reads, and what runs both.
_SETUP, _PROGRAM, _NODE = "look.sh", "look.json", "node.sh"
#: What each rank writes first and last: its node and the node's name; and the exit code of the probe.
_STARTED, _EXITED = "allranks-look", "allranks-look-ended"


def probe_by_job(
    kind: ClusterKind, launch: launching.Launch, look: Probe, waiting: Waiting
) -> Sequence[ProbeResult] | str:
    """Probe all nodes that a job gets; or return why there are none.

    The directory of the probe also takes the record of the job, so that it is not listed among the user's runs.

    Raises:
        StartCancelledError: a signal came before the job was submitted.
        KeyboardInterrupt: Ctrl-C; the job is cancelled.
        SystemExit: another signal; likewise.
    """
    _write_files(look)
    # A node that does not see the directory has nothing to run there, and fails: the others are to report anyway.
    independent = kind.scheduler.independent if isinstance(kind, BatchCluster) else ()
    mine = launch._replace(job=job_of(launch.job, look.folder, independent), runs_folder=look.folder)
    try:
        run, plan = launching.prepare(mine, kind)
        # It may hang: a signal ends it, and there is nothing to cancel yet.
        feasibility = kind.feasibility(plan, mine.environ)
        if feasibility and feasibility.is_hopeless:
            return "the scheduler gives no such nodes"
        environ = mine.environ_for(plan)
        with noted() as signals:
            # Detached: a signal that comes to this process is for us to pass on.
            run, started = launching.start(
                run, plan, kind, environ, detach=True, watched=False, interrupted=lambda: next(iter(signals), 0)
            )
            try:
                status = _wait(kind, run, started, look, waiting, signals)
            except BaseException:
                kind.cancel(run)
                raise
            return _result(kind, run, plan, status, look, waiting)
    except StartCancelledError:
        raise
    except LaunchError as error:
        return error.in_a_line


def _wait(kind: ClusterKind, run: Run, started: Started, look: Probe, waiting: Waiting, signals: list[int]) -> Status:
    """Wait until the job has ended or runs out of time; return its status at that moment."""
    until, is_running = time.monotonic() + waiting.seconds, False
    while not started.wait(_POLL_SECONDS):
        for line in started.news():
            waiting.notify(line)
        end_if_requested(signals, waiting.notify, "the job that looks")
        status = kind.status(run)
        if not is_running and status.state is State.RUNNING:
            is_running, until = True, time.monotonic() + look.seconds + _GRACE_SECONDS
        if time.monotonic() > until:
            kind.cancel(run)
            return status
    return kind.status(run)


def job_of(job: Job, folder: Path, independent: Sequence[str] = ()) -> Job:
    """Return the job that probes: it asks for the same nodes, and runs what :func:`probe_by_job` wrote to a directory.

    ``independent`` are options with which a rank that fails ends no other.

    What sets nodes up is left to that, which reports how it failed. So its Python is that of a supervisor: the one that
    plans, or else any on the node.
    """
    python = (*contract.PYTHON_ON_NODE, sys.executable)
    script = shlex.quote(str(folder / _NODE))
    words = ("-c", f'[ ! -r {script} ] || . {script} "$GROUP_RANK" || true')
    own = (*(job.launch.launcher_args if job.launch.agent else ()), *independent)
    time_limit = min(_SECONDS, job.resources.time or _SECONDS)
    left_out = {"array": None, "output": None, "error": None}
    return job.model_copy(
        update={
            **{"name": "check", "module": None, "script": None, "binary": "bash", "args": words, "workdir": "/"},
            "debug": False,
            "resources": job.resources.model_copy(update={"time": time_limit, "spares": 0}),
            "launch": Launch(launcher="direct", nproc_per_node=1, launcher_args=own),
            "environment": Environment(variables=job.environment.variables, python=python),
            "scheduler": job.scheduler.model_copy(update=left_out),
            "retry": Retry(requeue=False, warn_before=0),
            "notify": Notify(),
        }
    )


def _write_files(look: Probe) -> None:
    """Write the files that each node reads."""
    program, setup = (shlex.quote(str(look.folder / name)) for name in (_PROGRAM, _SETUP))
    lines = [
        f"unset ${contract.DECIDED}  # The ranks of the job have other numbers of threads.",
        f'echo "{_STARTED} $1 $HOSTNAME"',
        f'bash {setup} "$1" <{program} && code=0 || code=$?',
        f'echo "{_EXITED} $code"',
    ]
    write_atomically(look.folder / _SETUP, look.script)
    write_atomically(look.folder / _PROGRAM, look.program)
    write_atomically(look.folder / _NODE, "\n".join(lines) + "\n")


def _result(
    kind: ClusterKind, run: Run, plan: Plan, status: Status, look: Probe, waiting: Waiting
) -> Sequence[ProbeResult] | str:
    """Return the result of each node, those without a report included."""
    found, hosts = read(run.attempt_folder), hosts_of(run.attempt_folder)
    if not found and status.state is State.PENDING:
        return waiting.in_vain(plan.cluster, status)
    count = max([len(hosts) or plan.nnodes, *(number + 1 for number in found)])
    missing = [number for number in range(count) if number not in found]
    causes = kind.log_excerpt(run).causes if missing else ()
    if not found:
        words = status.reason or next(reversed(causes), "") or status.native
        what = "ended" if status.state.is_final else "did not finish in time"
        answer = Answer(1, "", f"the job that probes the nodes {what}: {words}")
        return [ProbeResult(plan.cluster, answer, f"can a job of yours write into {look.folder.parent}?")]
    fix = f"it must see {look.folder.parent}: is that on a file system that all nodes share?"
    for number in missing:
        host = hosts[number] if number < len(hosts) else f"node {number}"
        words = next((line for line in reversed(causes) if host in line), "it reported nothing")
        found[number] = ProbeResult(host, Answer(1, "", words, unreached=True), fix)
    return [found[number] for number in range(count)]


def read(attempt: Path) -> dict[int, ProbeResult]:
    """Read what the ranks of an attempt have written, by node."""
    found: dict[int, ProbeResult] = {}
    hosts = hosts_of(attempt)
    for log in sorted(attempt.glob("node-*/rank-*.out")):
        out = log.read_text(errors="replace")
        err = log.with_suffix(".err")
        started = re.search(rf"^{_STARTED} (\d+) (\S+)$", out, re.MULTILINE)
        exited = re.search(rf"^{_EXITED} (\d+)$", out, re.MULTILINE)
        if started:
            answer = Answer(1, out, "its probe did not finish in time", unreached=True, is_late=True)
            if exited:
                answer = Answer(int(exited[1]), out, err.read_text(errors="replace") if err.exists() else "")
            number = int(started[1])
            found[number] = ProbeResult(hosts[number] if number < len(hosts) else started[2], answer)
    return found


def hosts_of(attempt: Path) -> list[str]:
    """Return the hosts of an attempt as its scheduler calls them; none if its supervisor has not recorded them."""
    with contextlib.suppress(OSError):
        return (attempt / contract.HOSTS).read_text().split()
    return []
