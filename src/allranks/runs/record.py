"""A run on disk: its directory and its record."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from allranks import contract
from allranks.errors import RunFolderError, RunNotFoundError
from allranks.job.problems import closest, listed
from allranks.record.files import read_failure, unwritable, write_json
from allranks.runs.status import Handle, State, Status

#: Limits of the search for runs near a directory without any: levels above, entries below, and directories to name.
_LEVELS_ABOVE, _MOST_LOOKED_AT, _MOST_NAMED = 2, 1000, 4


class Record(NamedTuple):
    """The content of ``record.json``; the defaults are those of a run that is about to start."""

    id: str
    name: str
    cluster: str
    kind: str
    world_size: int
    nnodes: int
    created: float  # In seconds since 1970.
    host: str
    stop_timeout: float
    file_mode: int
    handle: Handle = Handle()
    status: Status = Status(State.PENDING, "starting")

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON."""
        return {**self._asdict(), "handle": self.handle._asdict(), "status": self.status.to_json()}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Record:
        """Read what :meth:`to_json` returned."""
        known = {name: raw[name] for name in cls._fields}
        return cls(**{**known, "handle": Handle(**raw["handle"]), "status": Status.from_json(raw["status"])})


class Run(NamedTuple):
    """A run: its directory and its record."""

    folder: Path
    record: Record

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, from disk: a scheduler may start further ones."""
        return newest_attempt(self.folder)

    @property
    def attempt_folder(self) -> Path:
        """Directory of the newest attempt."""
        return self.folder / contract.attempt_dir(self.attempt)

    @property
    def command(self) -> str:
        """The command of each rank with its arguments, from an agent's configuration; empty if there is none."""
        for path in sorted(self.folder.glob("node*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                config = json.loads(path.read_text(encoding="utf-8"))
                flag = ["-m"] if config["kind"] == "module" else []
                return shlex.join([*flag, Path(config["target"]).name, *config["args"]])
        return ""

    @property
    def world_size(self) -> int:
        """Number of ranks: as planned or, if only the nodes know their GPUs, as many as have logs."""
        logs = self.attempt_folder.glob(f"node-*/{contract.rank_log('*', 'out')}")
        return max(self.record.world_size, len({log.name for log in logs}))

    @property
    def started(self) -> float:
        """When its newest attempt started, or else when it was created, in seconds since 1970."""
        return self.record.status.started or self.record.created

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end, or so far; None if it has ended at an unknown time."""
        status = self.record.status
        return None if status.state.is_final and not status.ended else (status.ended or time.time()) - self.started

    @property
    def job_id(self) -> str | None:
        """Job id of the newest attempt under a scheduler; each attempt may be a separate job."""
        with contextlib.suppress(OSError):
            return (self.attempt_folder / contract.JOB).read_text().strip() or self.record.handle.job_id
        return self.record.handle.job_id

    @property
    def tasks(self) -> list[Path]:
        """The newest attempt of each task of a job array, in order; empty if it is not an array."""
        found = self.folder.glob(f"{contract.TASK}*")
        tasks = sorted(found, key=lambda task: int(task.name.removeprefix(contract.TASK)))
        return [task / contract.attempt_dir(newest_attempt(task)) for task in tasks]

    def node_folder(self, node: int) -> Path:
        """Directory of a node in the newest attempt."""
        return self.folder / contract.node_dir(self.attempt, node)

    def with_status(self, status: Status) -> Run:
        """Record a new status, and return the run with it."""
        return self.with_handle(self.record.handle, status)

    def with_handle(self, handle: Handle, status: Status) -> Run:
        """Record how to find the started run, and return the run with it."""
        record = self.record._replace(handle=handle, status=status)
        write_json(self.folder / contract.RECORD_FILE, record.to_json(), record.file_mode)
        return self._replace(record=record)


def newest_attempt(folder: Path) -> int:
    """Return the number of the newest attempt of the run in ``folder``, 0 where none has started."""
    try:
        names = os.listdir(folder / contract.ATTEMPTS_DIR)  # noqa: PTH208 - names are all that is needed
    except OSError:
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def new_run_id(folder: Path, name: str) -> str:
    """Return an unused run id for ``folder``: name, date and time, and a number if needed."""
    stem = f"{name}-{time.strftime('%m%d-%H%M')}"
    number = 1
    while (folder / (run_id := stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return run_id


def reserve(folder: Path, name: str, *, group_readable: bool) -> Path:
    """Create the directory of a new run and return it; concurrent commands get different ones.

    Raises:
        RunFolderError: it cannot be created.
    """
    mode = 0o750 if group_readable else 0o700
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            run_folder = folder / new_run_id(folder, name)
            try:
                run_folder.mkdir(mode=0o700)
            except FileExistsError:
                continue  # Another command was faster: try the next id.
            run_folder.chmod(mode)
            return run_folder
    except OSError as error:
        raise unwritable(folder, error) from error


def point_latest(run_folder: Path) -> None:
    """Point ``latest`` beside the run's directory to it; a user's own file of that name stays.

    Raises:
        RunFolderError: it cannot be written, or is not ours.
    """
    latest, temporary = run_folder.parent / contract.LATEST, run_folder.parent / f".latest-{run_folder.name}"
    try:
        if os.path.lexists(latest) and not (latest.is_symlink() and os.sep not in os.fspath(latest.readlink())):
            raise RunFolderError(f"{latest} is left as it is", why="it is not a link that allranks made")
        temporary.symlink_to(run_folder.name)
        temporary.replace(latest)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(latest, error) from error


def load(run_folder: Path) -> Run:
    """Load the run in ``run_folder``.

    Raises:
        RunFolderError: its record cannot be read, or is invalid.
    """
    path = run_folder / contract.RECORD_FILE
    try:
        return Run(run_folder, Record.from_json(json.loads(path.read_text(encoding="utf-8"))))
    except PermissionError as error:
        try:
            owner = run_folder.owner()
        except (OSError, KeyError):  # The user id has no name here.
            owner = "another user"
        fix = f"it is a run of {owner}, who can share the next one: --group-readable"
        raise RunFolderError(f"cannot read {path}", why=error.strerror, fix=fix) from error
    except OSError as error:
        raise read_failure(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        why, fix = "the file is incomplete, or another program wrote it", f"remove the run: rm -r {run_folder}"
        raise RunFolderError(f"{path} is not a record of a run", why=why, fix=fix) from error


def find(folder: Path, name: str | None) -> Run:
    """Find a run by its id, a unique prefix of the id, or its directory; the newest one if None.

    Raises:
        RunNotFoundError: no run, or more than one, matches.
    """
    if name is None:
        return _newest(folder)
    if os.sep in name or name in (".", ".."):
        path = Path(name)
        if not _is_run(path, unreadable=True):
            around = next((each for each in path.absolute().parents if _is_run(each, unreadable=False)), None)
            fix = f"did you mean {os.path.relpath(around)}?" if around else "allranks ps lists runs"
            what, why = f"{path} is not the directory of a run", f"it holds no {contract.RECORD_FILE}"
            raise RunNotFoundError(what, why=why, fix=fix)
        return load(path.resolve())
    if _is_run(folder / name, unreadable=True):
        return load((folder / name).resolve())
    ids = run_ids(folder)
    fitting = [run_id for run_id in ids if run_id.startswith(name)]
    if len(fitting) == 1:
        return load(folder / fitting[0])
    if fitting:
        newest = fitting[-5:]
        why = ("the newest are " if len(fitting) > len(newest) else "") + ", ".join(newest)
        raise RunNotFoundError(f"{name} fits {len(fitting)} runs", why=why, fix="give the full id")
    what = f"there is no run {name} in {folder}"
    if not ids:
        raise RunNotFoundError(what, why=f"there is no run in {folder}", fix=where_runs_are(folder))
    near = closest(name, ids) or next((each for each in reversed(ids) if each.startswith(f"{Path(name).stem}-")), None)
    fix = f"did you mean {near}?" if near else "allranks ps lists them"
    if name.isdigit():
        fix = f"allranks logs --rank {name} shows that rank of the newest run; allranks ps lists all runs"
    raise RunNotFoundError(what, why=f"the newest runs are {', '.join(ids[-3:])}", fix=fix)


def where_runs_are(folder: Path) -> str:
    """Return what to do if ``folder`` has no run: change to a directory near it that has runs, or start one."""
    above = folder.parent
    if _is_run(above, unreadable=False):
        return f"this directory is a run: cd {os.path.relpath(above.parent.parent, above)}, or name the run as ."
    if _has_runs(above):
        return "this is the directory of the runs: cd .., or --runs-folder ."
    near = [os.path.relpath(place) for place in _near(above) if _has_runs(place / folder.name)]
    if near:
        others = f" (also in {listed(near[1:_MOST_NAMED], 'and')})" if near[1:] else ""
        there, runs = shlex.quote(near[0]), shlex.quote(os.path.join(near[0], folder.name))  # noqa: PTH118 - text
        return f"cd {there}, where runs are{others}, or --runs-folder {runs}"
    return "start one: allranks run train.py"


def _near(folder: Path) -> Iterator[Path]:
    """Yield directories near ``folder`` that may have runs: above it, then below."""
    yield from folder.parents[:_LEVELS_ABOVE]
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        below = sorted(entry.name for entry in itertools.islice(entries, _MOST_LOOKED_AT) if entry.is_dir())
        yield from (folder / name for name in below)


def _has_runs(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(_is_run(folder / name, unreadable=False) for name in os.listdir(folder))  # noqa: PTH208
    return False


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the readable runs in ``folder``, oldest first."""
    return [run.name for run in sorted(_entries(folder), key=_created) if _is_run(run, unreadable=False)]


def unreadable(folder: Path) -> list[str]:
    """Return the names of the unreadable directories in ``folder``: runs of other users."""
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir() and not os.access(entry, os.X_OK))


def _entries(folder: Path) -> list[Path]:
    try:  # Names with a dot are no runs: `latest` while it is replaced, or the directory of a check.
        return [folder / name for name in os.listdir(folder) if name != contract.LATEST and name[0] != "."]  # noqa: PTH208
    except FileNotFoundError:
        return []
    except OSError as error:
        raise read_failure(folder, error) from error


def _is_run(folder: Path, *, unreadable: bool) -> bool:
    """Return whether ``folder`` holds a record; ``unreadable`` is the result for another user's directory."""
    try:
        return (folder / contract.RECORD_FILE).is_file()
    except PermissionError:
        return unreadable


def _created(run: Path) -> tuple[float, str]:
    """Return the sort key: the time of the plan, which is written once and orders the runs of one minute."""
    try:
        return ((run / contract.PLAN_FILE).stat().st_mtime, run.name)
    except OSError:
        return (0.0, run.name)


def _newest(folder: Path) -> Run:
    """Return the newest run of this user, else of all users; ``latest`` in a shared directory may be another user's."""
    latest = folder / contract.LATEST
    if _is_run(latest, unreadable=False) and is_mine(latest):
        return load(latest.resolve())
    if ids := _own_ids(folder):
        return load(folder / ids[-1])
    raise RunNotFoundError(f"there is no run in {folder}", fix=where_runs_are(folder))


def newest_first(folder: Path) -> Iterator[Run]:
    """Yield the readable runs of this user, else of all users, starting with the one that :func:`find` returns.

    Raises:
        RunNotFoundError: there is none.
    """
    newest = _newest(folder)
    yield newest
    for run_id in reversed(_own_ids(folder)):
        if folder / run_id != newest.folder:
            with contextlib.suppress(RunFolderError):  # `allranks ps` reports it.
                yield load(folder / run_id)


def _own_ids(folder: Path) -> list[str]:
    ids = run_ids(folder)
    return [run_id for run_id in ids if is_mine(folder / run_id)] or ids


def is_mine(path: Path) -> bool:
    """Return whether this user owns a run's directory."""
    return path.stat().st_uid == os.geteuid()
