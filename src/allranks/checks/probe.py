"""Probes the nodes of a plan: sends each a copy of ``checks.collect`` with a request, and reads its report.

Nodes that a scheduler has yet to give are probed by a short job that asks for the same. Each rank of that job, one on
each node, runs the probe and never fails: where one does, the scheduler would end the others before they have reported.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.checks.collect.gather import ProbeRequest, read_reports
from allranks.checks.model import Finding, Node, failed, skipped, warned
from allranks.checks.registry import site_programs
from allranks.checks.topics.job import named_files, named_folders
from allranks.checks.waiting import Waiting, end_if_requested, noted
from allranks.clusters.base import Probe, ProbeResult
from allranks.errors import LaunchError, StartCancelledError
from allranks.job.spec import Environment, Job, Launch, Notify, Retry
from allranks.launch import submit as launching
from allranks.plan import environment
from allranks.plan.environment import environment_of, python_of
from allranks.plan.script import name_failures, set_up
from allranks.record.files import copy_node_code, unwritable, write_atomically
from allranks.runs.excerpts import failure_in
from allranks.runs.status import State, Status
from allranks.system.commands import Answer

if TYPE_CHECKING:
    from allranks.clusters.base import ClusterKind, Started
    from allranks.plan.plan import Plan
    from allranks.runs.record import Run

#: Time limits in seconds: of a node, and of one that also connects to all others and waits for them.
_NODE_SECONDS, _MESH_SECONDS = 60.0, 90.0
#: A file that all nodes must see; and how the name of its directory starts where there is no run yet.
_SHARED, _PREFIX = "look.word", ".look-"
#: The exit code where the interpreter is too old for the program; of those no shell uses.
TOO_OLD = 74
#: What shells, and the programs that enter containers, exit with where a command is not there or cannot be run.
_CANNOT_RUN = (126, 127)
#: Time limit of the job in seconds, unless the user's own job has a shorter one.
_JOB_SECONDS = 300
#: Seconds between polls for signals and news, and those that the job gets beyond the time limit of the probe.
_POLL_SECONDS, _GRACE_SECONDS = 0.2, 15.0
#: In the directory of a probe: what sets a node up, what it then reads, and what runs both.
_SETUP, _PROGRAM, _NODE = "look.sh", "look.json", "node.sh"
#: What each rank writes first and last: its node and the node's name; and the exit code of the probe.
_STARTED, _EXITED = "allranks-look", "allranks-look-ended"
#: Puts the copy that comes by stdin on Python's path, in a file without a name. It must be readable by any Python 3,
#: and by Python 2. No module of it may come from the working directory, where a job may have a random.py of its own.
_BOOTSTRAP = f"""\
import sys
if sys.version_info < (3, 10):
    sys.stderr.write("Python %d.%d\\n" % sys.version_info[:2])
    sys.exit({TOO_OLD})
if sys.path[:1] == [""]:
    del sys.path[0]
import base64, json, os, zlib
request, code = sys.stdin.read().split("\\n")
if hasattr(os, "memfd_create"):
    copy = os.fdopen(os.memfd_create("allranks"), "wb")
else:
    import tempfile
    copy = tempfile.TemporaryFile()
copy.write(zlib.decompress(base64.b64decode(code)))
copy.flush()
sys.path.insert(0, "/proc/self/fd/%d" % copy.fileno())
from allranks.checks.collect.gather import main
main(json.loads(request), int(sys.argv[1]))
"""


def probe(
    kind: ClusterKind,
    launch: launching.Launch,
    plan: Plan,
    facts: Collection[str],
    folder: Path,
    *,
    word: str,
    is_prepared: bool,
    waiting: Waiting | None = None,
) -> tuple[tuple[Node, ...], str]:
    """Collect facts on all nodes of a plan; or return why there are none. See :func:`preflight` for the arguments.

    ``word`` is a secret: it stands in the file that all nodes must see.
    """
    request = request_for(launch, plan, facts, folder, word)
    write_atomically(folder / _SHARED, word)
    seconds = _MESH_SECONDS if "mesh" in facts else _NODE_SECONDS
    look = Probe(_script(launch, plan, is_prepared), program(request, _sent_along(facts)), folder, seconds)
    try:
        probed: Sequence[ProbeResult] | str | None = kind.probe(plan, look, launch.environ)
        if probed is None:
            why = f"there are no nodes before {plan.cluster} gives some"
            probed = probe_by_job(kind, launch, look, waiting) if waiting else why
    finally:
        (folder / _SHARED).unlink(missing_ok=True)
    if isinstance(probed, str):
        return (), probed
    own = launch.job.environment
    slow_part = to_come = ""
    if own.node_setup and is_prepared:
        slow_part = "node_setup"
    elif own.node_setup:
        to_come = "node_setup"
    if own.container:
        slow_part = "container"
    if own.setup:
        to_come = "setup"
    nodes = []
    for number, each in enumerate(probed):
        report = read_reports(each.answer.out).get(number)
        if report:
            nodes.append(Node(number, each.host, report["facts"], report["errors"]))
        else:
            nodes.append(Node(number, each.host, failure=why_no_report(each, slow_part, to_come).on(each.host)))
    return tuple(nodes), ""


def request_for(launch: launching.Launch, plan: Plan, facts: Collection[str], folder: Path, word: str) -> ProbeRequest:
    """Return what the nodes of a plan are asked to collect."""
    entry = next(reason for reason in plan.reasons if reason.subject in ("script", "module", "binary"))
    is_copied = bool(plan.copied_to)  # What the job needs is copied when the run starts: nothing of it is there.
    args, workdir = launch.job.args, Path(plan.workdir)
    # A scheduler's plan has one command for all nodes; of those that are started by hand only this one is probed.
    nnodes = len(plan.commands) if plan.kind == "local" else max(len(plan.commands), plan.nnodes)
    folders = {"runs": str(Path(plan.run_dir).parent), **named_folders(args, workdir)}
    return ProbeRequest(
        tuple(facts),
        nnodes=nnodes,
        nproc_per_node=plan.nproc_per_node,
        kind="" if is_copied else entry.subject,
        target=entry.value,
        folders={} if is_copied else folders,
        variables=launch.job.checks.variables,
        executables=site_programs(launch, facts),
        files=() if is_copied else tuple(str(path) for _, path in named_files(args, workdir)),
        shared="" if is_copied or nnodes == 1 else str(folder / _SHARED),
        word=word,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
    )


def _sent_along(facts: Collection[str]) -> list[Path]:
    """Return the module that queries GPUs, nvidia-ml-py, if it is installed here: nodes need not have it."""
    spec = importlib.util.find_spec("pynvml") if "gpus" in facts else None
    return [Path(spec.origin)] if spec and spec.origin and spec.origin.endswith("pynvml.py") else []


def program(request: ProbeRequest, extra: Sequence[Path] = ()) -> str:
    """Return what the bootstrap reads: the request, and a zip archive of the code with ``extra`` modules."""
    archive = BytesIO()
    copy_node_code(archive, extra, contract.PROBE_CODE)
    return f"{json.dumps(request._asdict())}\n{base64.b64encode(zlib.compress(archive.getvalue(), 1)).decode()}"


def _script(launch: launching.Launch, plan: Plan, is_prepared: bool) -> str:
    """Write the lines of shell that set a node up as for a job, and become the program."""
    job = launch.job
    chosen = environment_of(job, launch.folder)
    chosen = chosen.model_copy(update={"setup": ()} if is_prepared else {"setup": (), "node_setup": ()})
    workdir = "." if plan.copied_to else plan.workdir
    python, _ = python_of(job, launch.environ, elsewhere=bool(plan.copied_to))
    keep = "exec 3<&0 </dev/null  # the program comes by stdin: no line of a set-up may read it"
    set_up_lines = set_up(workdir, chosen, environment.settings(job, None, {}))
    become = f'exec {shlex.join((*chosen.container, *python, "-c", _BOOTSTRAP))} "$1" <&3 3<&-'
    return "\n".join([keep, "set -e", *name_failures(None), "", *set_up_lines, "", become, ""])


@contextmanager
def folder_in(runs_folder: Path) -> Iterator[Path]:
    """Make a directory in that of the runs, where there is no run; it is removed at the end.

    Raises:
        RunFolderError: the directory of runs cannot be written.
    """
    new = next((path for path in (*reversed(runs_folder.parents), runs_folder) if not path.exists()), None)
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=runs_folder))
    except OSError as error:
        raise unwritable(runs_folder, error) from error
    try:
        yield made
    finally:
        shutil.rmtree(new or made, ignore_errors=True)


def why_no_report(probed: ProbeResult, slow_part: str, to_come: str = "") -> Finding:
    """Return why a node has not reported.

    ``slow_part`` is what of environment may outlast the time limit, ``to_come`` what of it has not run here, and may
    bring what is missing.
    """
    host, answer = probed.host, probed.answer
    if answer.is_late:
        what = f"it does not answer: {answer.last_words}"
        if slow_part:
            return warned(what, fix=f"does environment.{slow_part} take longer? If not: ssh {host} uptime")
        return failed(what, fix=f"is {host} hanging? ssh {host} uptime", exclude=host)
    if answer.unreached:
        fix = probed.fix or f"see what {host} says of it"
        return failed(f"it cannot be reached: {answer.last_words}", fix=fix, exclude=host)
    if answer.code == TOO_OLD:
        return skipped(f"{answer.last_words} of the job's environment is too old for the checks: 3.10 is needed")
    if slow_part == "container":
        if answer.code in _CANNOT_RUN:
            fix = "environment.container is the command that enters it, such as [apptainer, exec, image.sif]"
            return failed(f"the container cannot be entered: {answer.last_words}", fix=fix)
        what = f"the container could not be inspected: {answer.last_words}"  # It may pass no stdin on.
        return warned(what, fix="see environment.container")
    if to_come:
        what = f"nothing is known of the node before environment.{to_come} has run: {answer.last_words}"
        return warned(what, fix=f"if environment.{to_come} does not bring what is missing, the job fails there")
    if (failure := failure_in(answer.last_words, Path())) and failure.fix:
        return failed(failure.what, fix=failure.fix)
    fix = probed.fix or "correct environment in the job file, or install there what it names"
    return failed(answer.last_words, fix=fix)


# --- by a job ---


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
    from allranks.clusters.batch.cluster import BatchCluster  # Not for a run that starts at once.

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
            return _results(kind, run, plan, status, look, waiting)
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
    time_limit = min(_JOB_SECONDS, job.resources.time or _JOB_SECONDS)
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


def _results(
    kind: ClusterKind, run: Run, plan: Plan, status: Status, look: Probe, waiting: Waiting
) -> Sequence[ProbeResult] | str:
    """Return the result of each node, those without a report included."""
    found, hosts = read_logs(run.attempt_folder), hosts_of(run.attempt_folder)
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


def read_logs(attempt: Path) -> dict[int, ProbeResult]:
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
    with suppress(OSError):
        return (attempt / contract.HOSTS).read_text().split()
    return []
