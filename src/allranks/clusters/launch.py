"""From a job to a run on disk that has been started."""

from __future__ import annotations

import contextlib
import py_compile
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import users_key
from allranks.clusters.base import ClusterKind, Request, Started
from allranks.clusters.cancel import Cancelled
from allranks.clusters.settle import settled
from allranks.errors import AllranksError, JobError, RunFolderError, StartCancelledError
from allranks.plan.entry import name_of
from allranks.plan.plan import Plan
from allranks.runs import key, record
from allranks.runs.files import unwritable, write_json, write_whole
from allranks.runs.record import Run
from allranks.runs.status import State, Status

if TYPE_CHECKING:
    from zipfile import ZipFile

    from allranks.job.spec import Job


#: In place of a source's time and size: the archive has no such time, and none of its sources changes (PEP 552).
_UNCHECKED = b"\1\0\0\0" + bytes(8)


@dataclass(frozen=True)
class Launch:
    """What is launched: the job, its text for the record (without secrets), and where its paths start.

    Attributes:
        job: the job.
        job_text: the job as YAML, without secrets.
        folder: folder that relative paths of the job are relative to.
        runs_folder: folder that holds a folder for each run.
        environ: the calling environment.
        node_rank: which node of the job this machine is, where somebody starts each node by hand.
    """

    job: Job
    job_text: str
    folder: Path
    runs_folder: Path
    environ: Mapping[str, str]
    node_rank: int | None = None

    def request(self, run_dir: Path, *, standalone: bool = False) -> Request:
        """Return what a plan is made from."""
        return Request(self.job, self.folder, run_dir, self.environ, standalone, self.node_rank)

    def environ_for(self, plan: Plan) -> dict[str, str]:
        """Return the calling environment with the secrets that the plan names and does not hold."""
        variables = self.job.environment.variables
        return {**self.environ, **{name: variables[name] for name in plan.secrets}}


def dry_run(launch: Launch, kind: ClusterKind, *, standalone: bool = False) -> Plan:
    """Plan without creating anything; the run's id is the one that would be free now.

    Args:
        launch: what would be launched.
        kind: the kind of cluster.
        standalone: whether the script must work by itself, without the run's folder.
    """
    run_id = record.new_run_id(launch.runs_folder, name_of(launch.job))
    plan = kind.plan(launch.request(launch.runs_folder / run_id, standalone=standalone))
    if launch.job.launch.stdin is not None and plan.stdin is None:
        raise JobError(
            "launch.stdin: this run cannot read the stdin of the command",
            why="only runs on this machine alone do, with allranks' agent",
            fix="--on local without --no-agent, or leave --stdin out",
        )
    return plan


def prepare(launch: Launch, kind: ClusterKind, on_record: Callable[[Run], None] = lambda run: None) -> tuple[Run, Plan]:
    """Create the run's folder with everything in it that the plan needs.

    Args:
        launch: what is launched.
        kind: the kind of cluster.
        on_record: called as soon as other commands can find the run, and cancel it.

    Raises:
        AllranksError: the plan cannot be made or the folder cannot be written; nothing is left behind.
    """
    plan = dry_run(launch, kind)  # What cannot work is refused before anything is created.
    run_dir = record.reserve(launch.runs_folder, name_of(launch.job), group_readable=plan.group_readable)
    with _removed_on_failure(run_dir):
        if plan.run_dir != str(run_dir):  # Another command took that id in between.
            plan = kind.plan(launch.request(run_dir))
        run = _record(run_dir, plan)
        on_record(run)
        _write(run_dir, plan, launch.job_text)
        write_whole(run_dir / contract.KEY_FILE, key.written(_key(launch, plan)))
        return run, plan


def _key(launch: Launch, plan: Plan) -> bytes:
    if launch.node_rank is None or plan.nnodes == 1:
        return key.new()
    return users_key.derived(f"{plan.name} at {plan.master_addr}, port {plan.master_port}", launch.environ)


def start(
    run: Run,
    plan: Plan,
    kind: ClusterKind,
    environ: Mapping[str, str],
    *,
    detach: bool,
    watched: bool,
    interrupted: Callable[[], int] = lambda: 0,
) -> tuple[Run, Started]:
    """Execute the plan; return the run with its handle, and what it can be waited for with.

    Args:
        run: what :func:`prepare` returned.
        plan: likewise.
        kind: the kind of cluster that made the plan.
        environ: the calling environment, and the job's secrets.
        detach: whether the run goes on without this process.
        watched: whether somebody watches on a terminal, so that progress bars make sense.
        interrupted: returns the number of the signal that has asked for the run's end meanwhile; 0 if none has.
    """
    inherited = {name: value for name, value in environ.items() if name not in contract.OF_A_RUN}
    if watched:
        inherited[contract.TERMINAL] = "1"
    cancelled = Cancelled(run)

    def is_over() -> int:
        return interrupted() or (signal.SIGTERM if cancelled() else 0)

    try:
        if cancelled():
            raise StartCancelledError(f"{run.record.id} was cancelled before it had begun", signal.SIGTERM)
        started = kind.start(plan, inherited, detach=detach, interrupted=is_over)
    except AllranksError as error:
        note_refusal(run, error)
        raise
    try:
        run = run.with_handle(started.handle, Status(State.PENDING, "starting"))
    except RunFolderError:
        # Nobody could find it again.
        started.signal(signal.SIGTERM)
        started.wait(plan.stop_timeout)
        raise
    if cancelled():
        kind.cancel(run)
        run = settled(run, kind)
    return run, started


def note_refusal(run: Run, error: AllranksError) -> None:
    """Note in the record of a run that it was not started, and why."""
    reason = error.in_a_line
    state = State.CANCELLED if isinstance(error, StartCancelledError) else State.FAILED
    status = Status(state, "not started", reason=reason, exit_code=error.exit_code, ended=time.time())
    with contextlib.suppress(RunFolderError):  # The error itself is what counts.
        run.with_status(status)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        latest = folder.parent / contract.LATEST
        with contextlib.suppress(OSError):
            if latest.readlink() == Path(folder.name):
                latest.unlink()
        raise


def _record(run_dir: Path, plan: Plan) -> Run:
    mode = _mode(plan)
    try:
        for node in plan.commands:
            (run_dir / contract.node_dir(0, node.node)).mkdir(parents=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    first = record.first_record(
        run_dir.name,
        name=plan.name,
        cluster=plan.cluster,
        kind=plan.kind,
        world_size=plan.world_size,
        nnodes=plan.nnodes,
        host=socket.gethostname(),
        stop_timeout=plan.stop_timeout,
        file_mode=mode,
    )
    write_json(run_dir / contract.RECORD_FILE, first.to_json(), mode)
    return Run(run_dir, first)


def _write(run_dir: Path, plan: Plan, job_text: str) -> None:
    mode = _mode(plan)
    try:
        copy_node_code(run_dir / contract.CODE)
        _set_modes(run_dir, mode)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    write_whole(run_dir / contract.JOB_FILE, job_text, mode)
    write_json(run_dir / contract.PLAN_FILE, plan.to_json(), mode)
    for file in plan.files:
        write_whole(run_dir / file.path, file.text, file.mode)


def _mode(plan: Plan) -> int:
    return 0o640 if plan.group_readable else 0o600


def _set_modes(run_dir: Path, mode: int) -> None:
    """Give all that is in a run's folder the permissions of the run, whatever the umask and the sources have."""
    for path in (run_dir, *run_dir.rglob("*")):
        path.chmod(mode | (mode & 0o444) >> 2 if path.is_dir() else mode)


def copy_node_code(target: Path) -> None:
    """Write the part of this package that nodes need into one zip archive, which Python runs and imports from.

    It is compiled where this interpreter can compile it; another version of Python takes the sources that are in it.
    It is not compressed: to unpack modules would take nodes longer than to read them.
    """
    from zipfile import ZipFile  # Not for those who start nothing.

    package = contract.installation()
    with ZipFile(target, "w") as archive:
        for name in contract.NODE_CODE:
            source = package / name
            for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
                _add(archive, file, f"allranks/{file.relative_to(package).as_posix()}")
        _add(archive, package / "agent" / "__main__.py", "__main__.py")


def _add(archive: ZipFile, source: Path, name: str) -> None:
    """Add a source and its compiled form."""
    from zipfile import ZipInfo

    archive.writestr(ZipInfo(name), source.read_bytes())
    compiled = Path(cache_from_source(str(source)))
    if not _is_of(compiled, source):
        with contextlib.suppress(OSError):  # An installation that we may not write to: it works without, slower.
            py_compile.compile(str(source))
    if _is_of(compiled, source):
        data = compiled.read_bytes()
        archive.writestr(ZipInfo(f"{name}c"), data[:4] + _UNCHECKED + data[16:])


def _is_of(compiled: Path, source: Path) -> bool:
    """Tell whether a compiled file was made from the source as it is now (PEP 552: flags, time, size)."""
    try:
        with compiled.open("rb") as stream:
            header = stream.read(16)
    except OSError:
        return False
    found = source.stat()
    wanted = (int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
    return struct.unpack("<2I", header[8:16].ljust(8, b"\0")) == wanted and header[4:8] == bytes(4)
