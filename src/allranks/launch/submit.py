"""From a job, or a run that has ended, to an attempt on disk that has been started."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from allranks import contract
from allranks.clusters.base import ClusterKind, Request, Started
from allranks.errors import AllranksError, JobError, LaunchError, RunFolderError, StartCancelledError
from allranks.job.files import users_folder
from allranks.job.units import format_size
from allranks.launch.cancel import cancelled
from allranks.launch.refresh import settled
from allranks.plan.entry import name_of
from allranks.plan.environment import secret_values
from allranks.plan.plan import Plan, Reason
from allranks.record.files import (
    KEY_BYTES,
    copy_node_code,
    read_failure,
    read_key,
    unwritable,
    write_atomically,
    write_json,
    write_key,
)
from allranks.record.spec import BatchSpec
from allranks.runs import estimate, record
from allranks.runs.record import Run
from allranks.runs.status import NOT_STARTED, Handle, State, Status
from allranks.system import schedulers

if TYPE_CHECKING:
    from allranks.job.spec import Job


#: Names the file that holds the user's own key, where it is not the usual one.
_USERS_KEY = "ALLRANKS_KEY_FILE"


class Launch(NamedTuple):
    """What is launched."""

    job: Job
    job_text: str  # The job as YAML, without secrets.
    folder: Path  # That relative paths of the job are relative to.
    runs_folder: Path  # It holds a directory for each run.
    environ: Mapping[str, str]  # The calling environment.
    node_rank: int | None = None  # Which node of the job this machine is, where the user starts each by hand.

    @property
    def is_set_up_by_user(self) -> bool:
        """Whether commands of the user's run on nodes before its ranks do."""
        return bool(self.job.environment.setup or self.job.environment.node_setup)

    def request(self, run_dir: Path, *, standalone: bool = False) -> Request:
        """Return what a plan is made from."""
        return Request(self.job, self.folder, run_dir, self.environ, standalone, self.node_rank)

    def command(self) -> list[str]:
        """Return what tells the job from others of its runs directory: where it runs, its program and its arguments."""
        job = self.job
        return [str(self.folder), job.workdir or "", job.script or job.module or job.binary or "", *job.args]

    def environ_for(self, plan: Plan) -> dict[str, str]:
        """Return the calling environment with the secrets that the plan names and does not hold."""
        values = secret_values(self.job)
        return {**self.environ, **{name: values[name] for name in plan.secrets}}


def dry_run(launch: Launch, kind: ClusterKind, *, standalone: bool = False) -> Plan:
    """Plan without creating anything; the run's id is the one that would be free now.

    ``standalone`` is whether the script must work by itself, without the run's directory.
    """
    run_id = record.new_run_id(launch.runs_folder, name_of(launch.job))
    plan = _plan(launch, kind, launch.runs_folder / run_id, standalone=standalone)
    if launch.job.launch.stdin is not None and plan.stdin is None:
        raise JobError(
            "launch.stdin: this run cannot read the stdin of the command",
            why="only runs on this machine alone do, with allranks' agent",
            fix="--on local without --no-agent, or leave --stdin out",
        )
    return plan


def _plan(launch: Launch, kind: ClusterKind, run_dir: Path, *, standalone: bool = False) -> Plan:
    """Return the plan, with the estimate of its memory where ``allranks estimate`` has made one."""
    plan = kind.plan(launch.request(run_dir, standalone=standalone))
    found = estimate.kept(launch.runs_folder, launch.command(), plan.world_size)
    if found is None:
        return plan
    one, made = found
    why, script = "allranks estimate", plan.script
    if script and script.is_file() and script.stat().st_mtime > made:
        why += f", before {script.name} was changed"
    if one.sends:
        why += f": {one.strategy}, which sends {format_size(one.sends)} in a step"
    return replace(plan, reasons=(*plan.reasons, Reason(estimate.SUBJECT, format_size(one.memory), why)))


def prepare(launch: Launch, kind: ClusterKind, on_record: Callable[[Run], None] = lambda run: None) -> tuple[Run, Plan]:
    """Create the run's directory with everything in it that the plan needs.

    ``on_record`` is called as soon as other commands can find the run, and cancel it.

    Raises:
        AllranksError: the plan cannot be made or the directory cannot be written; nothing is left behind.
    """
    plan = dry_run(launch, kind)  # What cannot work is refused before anything is created.
    earlier = Path(os.path.realpath(launch.runs_folder / contract.LATEST))
    run_dir = record.reserve(launch.runs_folder, name_of(launch.job), group_readable=plan.group_readable)
    try:
        if plan.run_dir != str(run_dir):  # Another command took that id in between.
            plan = _plan(launch, kind, run_dir)
        run = _record(run_dir, plan)
        on_record(run)
        _write(run_dir, plan, launch.job_text, earlier)
        if launch.node_rank is None or plan.nnodes == 1:
            own = secrets.token_bytes(KEY_BYTES)
        else:
            own = key_from_users(f"{plan.name} at {plan.master_addr}, port {plan.master_port}", launch.environ)
        write_key(run_dir / contract.KEY_FILE, own)
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        latest = run_dir.parent / contract.LATEST
        with contextlib.suppress(OSError):
            if latest.readlink() == Path(run_dir.name):
                latest.unlink()
        raise
    return run, plan


def prepare_resume(run: Run, kind: ClusterKind) -> tuple[Run, Plan]:
    """Prepare another attempt of a run: the same script, arguments and code, in the same directory.

    ``run`` has its status as it is now.

    Raises:
        LaunchError: the run has not ended, has succeeded, or is a job array.
        RunFolderError: its directory cannot be read or written.
    """
    state, run_id = run.record.status.state, run.record.id
    if not state.is_final:
        raise LaunchError(
            f"{run_id} has not ended",
            why=f"it is {state.value}",
            fix=f"allranks logs -f {run_id} follows it, allranks cancel {run_id} ends it",
        )
    if state is State.SUCCEEDED:
        raise LaunchError(
            f"{run_id} has succeeded: there is nothing to resume",
            fix="to train longer, start another run with the same checkpoint directory",
        )
    attempt, path = run.attempt + 1, run.folder / contract.PLAN_FILE
    try:
        plan = Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise read_failure(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        what, fix = f"{path} is not a plan of this version", "start the job again with allranks run"
        raise RunFolderError(what, why=str(error), fix=fix) from error
    if any(reason.why == "scheduler.array" for reason in plan.reasons):
        raise LaunchError(
            f"{plan.run_id} is a job array: its tasks cannot be resumed together",
            why="those that have succeeded would run again",
            fix="allranks run, with scheduler.array (--array) for the tasks that failed",
        )
    if plan.script and plan.kind == "local" and not plan.script.exists():
        raise LaunchError(
            f"there is no script {plan.script}",
            why=f"{run_id} runs it: it was moved or removed since",
            fix="put it back, or start another run: allranks run",
        )
    plan = kind.again(plan, attempt)
    try:
        for node in plan.commands:
            _make_folder(run.folder / contract.node_dir(attempt, node.node), run.folder)
        (run.folder / contract.attempt_dir(attempt) / contract.RESUMED).touch(run.record.file_mode)
    except OSError as error:
        raise unwritable(run.folder, error) from error
    for file in plan.files:
        write_atomically(run.folder / file.path, file.text, file.mode)
    return run.with_handle(Handle(), Status(State.PENDING, "starting")), plan


def _make_folder(folder: Path, like: Path) -> None:
    """Create a directory, and those above it, with the permissions of another one."""
    if not folder.parent.is_dir():
        _make_folder(folder.parent, like)
    folder.mkdir(exist_ok=True)
    folder.chmod(like.stat().st_mode & 0o777)


def key_from_users(meeting: str, environ: Mapping[str, str]) -> bytes:
    """Derive the key of a run whose nodes are started one by one from the user's key, all that they have in common.

    ``meeting`` is a text that is the same on all nodes.

    Raises:
        LaunchError: there is no directory for the user's key, or its file holds none.
        RunFolderError: it cannot be written.
    """
    if given := environ.get(_USERS_KEY):
        fix = f"openssl rand -hex {KEY_BYTES} makes a key, which all nodes need"
        return hmac.digest(read_key(Path(given), fix), meeting.encode(), "sha256")
    folder = users_folder(environ)
    if folder is None:
        raise LaunchError(
            "there is no directory for the key that authenticates the nodes of this job",
            why="HOME is not set",
            fix=f"set HOME, or {_USERS_KEY} to a file that is the same on all nodes",
        )
    if not (folder / "key").exists():
        _create_key(folder / "key")
    return hmac.digest(read_key(folder / "key"), meeting.encode(), "sha256")


def _create_key(path: Path) -> None:
    """Write a new key; nodes that share the directory may do so at the same time, and the first one's counts."""
    new = path.with_name(f"key-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_key(new, secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(new)
        new.unlink()
    except OSError as error:
        fix = f"{_USERS_KEY}, with a file that is the same on all nodes: {2 * KEY_BYTES} hexadecimal digits"
        raise RunFolderError(f"cannot write {path}", why=error.strerror, fix=fix) from error


def _inherited(environ: Mapping[str, str], *, watched: bool) -> dict[str, str]:
    own = {name: value for name, value in environ.items() if name not in contract.OF_A_RUN}
    return {**own, contract.TERMINAL: "1"} if watched else own


def warm_up(launch: Launch, plan: Plan, kind: ClusterKind, *, watched: bool) -> None:
    """Start what takes long while a run is checked that ends with this process; ``start`` follows.

    Nothing is started where the user's own commands would run: they may be what the checks refuse.
    """
    if launch.is_set_up_by_user:
        return
    with contextlib.suppress(LaunchError):  # The check, or the start, reports it.
        kind.warm_up(plan, _inherited(launch.environ_for(plan), watched=watched))


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
    """Execute the plan that :func:`prepare` returned; return the run with its handle, and what to wait for it with.

    Args:
        environ: the calling environment, and the job's secrets.
        detach: whether the run continues without this process.
        watched: whether the output goes to a terminal, so that progress bars make sense.
        interrupted: returns the number of the signal that has asked for the run's end; 0 if none has.
    """
    is_cancelled = cancelled(run)

    def is_over() -> int:
        return interrupted() or (signal.SIGTERM if is_cancelled() else 0)

    try:
        if is_cancelled():
            raise StartCancelledError(f"{run.record.id} was cancelled before it had started", signal.SIGTERM)
        started = kind.start(plan, _inherited(environ, watched=watched), detach=detach, interrupted=is_over)
    except AllranksError as error:
        if is_cancelled() and not isinstance(error, StartCancelledError):  # What failed is what `cancel` has ended.
            error = StartCancelledError(f"{run.record.id} was cancelled before it had started", signal.SIGTERM)
        kind.withdraw()
        note_refusal(run, error)
        raise error
    try:
        run = run.with_handle(started.handle, Status(State.PENDING, "starting"))
    except RunFolderError:  # No command could find it again.
        started.signal(signal.SIGTERM)
        started.wait(plan.stop_timeout)
        raise
    if is_cancelled():
        kind.cancel(run)
        run = settled(run, kind)
    return run, started


def note_refusal(run: Run, error: AllranksError) -> None:
    """Record that a run was not started, and why."""
    from allranks.launch.verdict import keep_refusal  # A run starts sooner without all rules.

    reason = error.in_a_line
    state = State.CANCELLED if isinstance(error, StartCancelledError) else State.FAILED
    status = Status(state, NOT_STARTED, reason=reason, exit_code=error.exit_code, ended=time.time())
    with contextlib.suppress(RunFolderError):  # The error itself is what counts.
        keep_refusal(run.with_status(status), error)


def _record(run_dir: Path, plan: Plan) -> Run:
    try:
        for node in plan.commands:
            (run_dir / contract.node_dir(0, node.node)).mkdir(parents=True)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    first = record.Record(
        id=run_dir.name,
        name=plan.name,
        cluster=plan.cluster,
        kind=plan.kind,
        world_size=plan.world_size,
        nnodes=plan.nnodes,
        created=time.time(),
        host=socket.gethostname(),
        stop_timeout=plan.stop_timeout,
        file_mode=plan.file_mode,
    )
    write_json(run_dir / contract.RECORD_FILE, first.to_json(), plan.file_mode)
    return Run(run_dir, first)


def _has_access(file: Path, run_dir: Path, mode: int) -> bool:
    """Return whether the same users may read and write a file as one of this mode in a run's directory."""
    try:
        found, wanted = file.stat(), run_dir.stat()
    except OSError:
        return False
    return (found.st_uid, found.st_gid, found.st_mode & 0o777) == (wanted.st_uid, wanted.st_gid, mode)


def _write(run_dir: Path, plan: Plan, job_text: str, earlier: Path) -> None:
    """Write what the nodes of a run read; ``earlier`` is the directory of the run before, if there is one."""
    mode = plan.file_mode
    try:
        text = next((file.text for file in plan.files if file.path == contract.BATCH_SPEC), None)
        batch = BatchSpec.from_json(text) if text else None
        other = schedulers.file_to_copy(batch.module) if batch else None
        notifies = any(file.path == contract.NOTIFY_FILE for file in plan.files)
        needs_verdict = notifies or (batch is not None and contract.HARDWARE in batch.retry_on)
        parts = (*contract.NODE_CODE, *(contract.DIAGNOSIS_CODE if needs_verdict else ()))
        code = earlier / contract.CODE
        shared = code if _has_access(code, run_dir, mode) else None
        copy_node_code(run_dir / contract.CODE, [other] if other else [], parts, shared)
        # Whatever the umask and the sources have.
        for path in (run_dir, *run_dir.rglob("*")):
            path.chmod(mode | 0o100 | (mode & 0o040) >> 2 if path.is_dir() else mode)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    write_atomically(run_dir / contract.JOB_FILE, job_text, mode)
    write_json(run_dir / contract.PLAN_FILE, plan.to_json(), mode)
    for file in plan.files:
        write_atomically(run_dir / file.path, file.text, file.mode)
