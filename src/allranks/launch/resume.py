"""Resume a run that has ended: another attempt of it."""

from __future__ import annotations

import json
from pathlib import Path

from allranks import contract
from allranks.clusters.base import ClusterKind
from allranks.errors import LaunchError, RunFolderError
from allranks.plan.plan import Plan
from allranks.record.files import unwritable, write_atomically
from allranks.runs.record import Run
from allranks.runs.status import Handle, State, Status


def prepare(run: Run, kind: ClusterKind) -> tuple[Run, Plan]:
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
        raise RunFolderError(f"cannot read {path}", why=error.strerror) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a plan of this version", why=str(error)) from error
    if any(reason.subject == "--array" for reason in plan.reasons):
        raise LaunchError(
            f"{plan.run_id} is a job array: its tasks cannot be resumed together",
            why="those that have succeeded would run again",
            fix="allranks run, with scheduler.array (--array) for the tasks that failed",
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
