"""Copies of a job for machines that share no folder with this one: where they lie, and what rsync is told.

Beside each other, in one folder of the machine: ``project``, a copy of the working directory, and ``runs/ID``.
"""

from __future__ import annotations

import os
import shlex
import socket
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.commands import Answer, run_one
from allranks.clusters.ssh_shell import ssh_options
from allranks.errors import JobError, LaunchError
from allranks.job.units import format_count, format_memory, format_size

if TYPE_CHECKING:
    from allranks.job.hosts import Host
    from allranks.job.spec import Environment, Job, Sync
    from allranks.plan.entry import Entry

_PROJECT, _RUNS = "project", "runs"
#: The copy of the working directory, seen from that of the run's folder.
WORKDIR = f"../../{_PROJECT}"
#: Contents, links, permissions and times of folders; names go as they are, whatever a shell would read in them.
_RSYNC = ("rsync", "-rlpts")
#: What no job needs of its folder: history, caches, environments, which hold paths of their machine, and checkpoints,
#: which stay where they were written.
_STEP = f"step-{'[0-9]' * 9}*/"
_NEVER = (".git/", ".hg/", ".svn/", "__pycache__/", ".venv/", "venv/", ".*_cache/", _STEP, f".{_STEP}")
#: Of a run's folder, what machines write or only its launcher needs.
_NOT_OF_THE_RUN = (f"/{contract.ATTEMPTS_DIR}/", "/*.jsonl", f"/{contract.RECORD_FILE}")
#: The exit code of rsync where the other machine has none.
_NOT_FOUND = 127
#: As many of what is large are named.
_NAMED = 3


@dataclass(frozen=True)
class Size:
    """How much would be copied: files, bytes, and the largest entries of the folder with their bytes."""

    files: int
    bytes: int
    largest: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{format_count(self.files, 'file')}, {format_size(self.bytes)}"


@dataclass(frozen=True)
class Copy:
    """The copy of a job's working directory, and of its run's folder, on each machine.

    Attributes:
        workdir: absolute working directory here.
        run_dir: absolute folder of the run here.
        folder: what holds both on the machine; relative to the home there, or absolute.
        filters: arguments of rsync that say what of the working directory is left out.
    """

    workdir: Path
    run_dir: Path
    folder: str
    filters: tuple[str, ...]

    @property
    def run(self) -> str:
        """The run's folder on a machine."""
        return place_of(self.folder, self.run_dir)

    def commands(self, host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the commands that bring the working directory and the run's folder to a machine, in this order."""
        left_out = tuple(f"--exclude={pattern}" for pattern in _NOT_OF_THE_RUN)
        return (
            self._command(host, self.filters, self.workdir, f"{self.folder}/{_PROJECT}"),
            self._command(host, left_out, self.run_dir, self.run),
        )

    def _command(self, host: Host, filters: tuple[str, ...], source: Path, target: str) -> tuple[str, ...]:
        made = f"mkdir -p {shlex.quote(target)} && rsync"
        return (*_RSYNC, *filters, *through_ssh(host), "--rsync-path", made, f"{source}/", f"{at(host)}:{target}/")

    @property
    def shown(self) -> str:
        """The folder that holds both, as people write it."""
        return self.folder if self.folder.startswith("/") else f"~/{self.folder}"

    @cached_property
    def size(self) -> Size:
        """How much would be copied, measured.

        Raises:
            LaunchError: there is no rsync.
            JobError: the folder cannot be read.
        """
        command = [*_RSYNC, "--dry-run", "--out-format=%l %n", *self.filters, f"{self.workdir}/", "/nowhere"]
        answer = run_one(command, os.environ)
        if answer.code:
            raise JobError("the working directory cannot be read", why=said_by(answer))
        sizes: Counter[str] = Counter()
        files = 0
        for line in answer.out.splitlines():
            length, _, name = line.partition(" ")
            if not name.endswith("/"):
                top, inside, _ = name.partition("/")
                sizes[top + inside] += int(length)
                files += 1
        return Size(files, sizes.total(), tuple(sizes.most_common(_NAMED)))


def copy_for(sync: Sync, workdir: Path, run_dir: Path) -> Copy:
    """Decide about the copies of a job."""
    chosen = (sync.folder or "").removeprefix("~/").rstrip("/")
    filters = tuple(f"--exclude={pattern}" for pattern in (*sync.exclude, *_own_runs(workdir, run_dir), *_NEVER))
    return Copy(workdir, run_dir, chosen or _named_after(workdir), (*filters, "--filter=:- .gitignore"))


def entry_in(copy: Copy, entry: Entry, job: Job) -> Entry:
    """Return what the ranks run, as it is found from the copy of the working directory.

    Raises:
        JobError: it lies elsewhere.
    """
    if entry.kind == "module" or not Path(entry.target).is_absolute():
        return entry
    if job.binary and os.sep not in job.binary:
        return replace(entry, target=job.binary)
    return replace(entry, target=_inside(copy, entry.target))


def environment_in(copy: Copy, environment: Environment) -> Environment:
    """Return the environment with a path of a virtual environment that is right on the machines."""
    venv = Path(environment.venv) if environment.venv else None
    if not venv or copy.workdir not in venv.parents:
        return environment
    return environment.model_copy(update={"venv": str(venv.relative_to(copy.workdir))})


def _inside(copy: Copy, path: str) -> str:
    try:
        return str(Path(path).relative_to(copy.workdir))
    except ValueError as error:
        raise JobError(
            f"{path} is outside of the working directory, and only that is copied to the machines",
            why=f"the working directory is {copy.workdir}",
            fix="--workdir with a folder that holds all that the job needs",
        ) from error


def refuse_if_large(size: Size, sync: Sync) -> None:
    """Refuse a folder that nobody can have meant.

    Raises:
        JobError: it is larger than the job allows.
    """
    if size.bytes <= sync.max_size:
        return
    named = ", ".join(f"{name} {format_size(amount)}" for name, amount in size.largest)
    raise JobError(
        f"the working directory is too large to be copied to each machine: {size}",
        why=f"sync.max_size is {format_memory(sync.max_size)}; the largest in it: {named}",
        fix=f"sync: {{method: rsync, exclude: [/{size.largest[0][0]}]}}, or a larger sync.max_size",
    )


def place_of(folder: str, run_dir: Path) -> str:
    """Return where a run's folder is on each machine, below the folder of its copies."""
    return f"{folder}/{_RUNS}/{run_dir.name}"


def place_here(path: str, folder: str, workdir: Path, run_dir: Path) -> Path:
    """Return where a folder that ranks have written to on a machine belongs here.

    What is in the copies goes where they are copies of; what is elsewhere has no place here, and goes to the run.

    Args:
        path: absolute folder on the machine.
        folder: what holds the copies there, relative to the home, or absolute.
        workdir: absolute working directory here.
        run_dir: absolute folder of the run here.
    """
    is_absolute = folder.startswith("/")
    before, found, inside = path.partition(f"{folder}/" if is_absolute else f"/{folder}/")
    for copy, original in ((_PROJECT, workdir), (f"{_RUNS}/{run_dir.name}", run_dir)):
        if found and not (is_absolute and before) and (inside == copy or inside.startswith(f"{copy}/")):
            return original / inside[len(copy) + 1 :]
    return run_dir / Path(path).name


def at(host: Host) -> str:
    """Return a host as rsync takes it before a colon; who one is there says :func:`through_ssh`."""
    return f"[{host.name}]" if ":" in host.name else host.name


def through_ssh(host: Host) -> tuple[str, ...]:
    """Return the arguments of rsync that make it use ssh as all else does."""
    return ("-e", shlex.join(["ssh", *ssh_options(host)]))


def said_by(answer: Answer) -> str:
    """Return what ssh or a shell said, else what rsync said first: what follows is what came of it."""
    lines = [line.strip() for line in answer.err.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("rsync")] or lines
    return lines[0] if lines else f"rsync ended with exit code {answer.code}"


def not_copied(names: str, answer: Answer) -> LaunchError:
    """Return the error of machines that can be reached, and to which a job cannot be copied."""
    said = said_by(answer)
    if answer.code == _NOT_FOUND:
        return LaunchError(f"{names}: there is no rsync", why=said, fix="install rsync on all machines")
    return LaunchError(f"the job cannot be copied to {names}", why=said)


def _named_after(workdir: Path) -> str:
    number = zlib.crc32(f"{socket.gethostname()}:{workdir}".encode())
    return f"allranks/{workdir.name or 'job'}-{number:08x}"


def _own_runs(workdir: Path, run_dir: Path) -> Iterator[str]:
    """Yield the pattern of the folder of runs, where it lies in what is copied."""
    runs = run_dir.parent
    if workdir in runs.parents:
        yield f"/{runs.relative_to(workdir)}/"
