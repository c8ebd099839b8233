"""Copies of a job on machines that share no directory with this one: rsync brings it there, and what they write back.

One directory of the machine holds ``project``, a copy of the working directory, and ``runs/ID``.

Logs and events only grow, and are appended to; other files are fetched complete, and less often; checkpoints in the
background, when there is a new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import socket
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.ssh.transport import folder_on_nodes, run_all, ssh_options
from allranks.errors import JobError
from allranks.job.hosts import Host, parse_hosts
from allranks.job.units import format_count, format_memory, format_size
from allranks.record.checkpoints import LATEST, entries
from allranks.record.events import read_saves
from allranks.runs.record import newest_attempt
from allranks.system.commands import Answer, run_one

if TYPE_CHECKING:
    from allranks.job.spec import Environment, Job, Sync
    from allranks.plan.entry import Program
    from allranks.runs.status import Handle

_PROJECT = "project"
#: The copy of the working directory, seen from that of the run's directory.
WORKDIR = f"../../{_PROJECT}"
#: Contents, links, permissions and times; -s: names are not read by a shell.
_THERE = ("rsync", "-rlpts")
_BACK = ("rsync", "-rptl", "-s", "--timeout=20")
#: What no job needs: history, caches, environments, which hold paths of their machine, and checkpoints.
_STEP = f"step-{'[0-9]' * 9}*/"
_NEVER = (".git/", ".hg/", ".svn/", "__pycache__/", ".venv/", "venv/", ".*_cache/", _STEP, f".{_STEP}")
#: Of a run's directory, what machines write or only its launcher needs.
_NOT_OF_THE_RUN = (f"/{contract.ATTEMPTS_DIR}/", "/*.jsonl", f"/{contract.RECORD_FILE}")
#: A file in rsync's list: its length and name. Directories end with a slash, and remarks have no length.
_LISTED = re.compile(r"^(\d+) (.*[^/\n])$", re.MULTILINE)
#: What only grows: of a node, and of the training.
_GROWING = ("*.out", "*.err", "*.jsonl", "*.log", contract.LOG_INDEX)
_OF_THE_TRAINING = (contract.METRICS_FILE, contract.CHECKPOINTS_FILE)
_GROWING_SECONDS, _COMPLETE_SECONDS = 0.5, 5.0
#: After how long a silent machine is left alone, and for how long.
_PATIENCE, _SILENT_SECONDS = 20.0, 15.0
_LOCK = "fetching"
#: The exit code of rsync for a file that was removed while it came.
_VANISHED = 24


class Copy:
    """The copy of a job's working directory, and of its run's directory, on each machine.

    Attributes:
        folder: what holds both on the machine; relative to the home there, or absolute.
    """

    def __init__(self, sync: Sync, workdir: Path, run_dir: Path) -> None:
        number = zlib.crc32(f"{socket.gethostname()}:{workdir}".encode())
        folder = (sync.folder or "").removeprefix("~/").rstrip("/")
        self.folder = folder or f"allranks/{workdir.name or 'job'}-{number:08x}"
        self._workdir, self._run_dir, runs = workdir, run_dir, run_dir.parent
        own_runs = [f"/{runs.relative_to(workdir)}/"] if workdir in runs.parents else []
        excluded = [f"--exclude={pattern}" for pattern in (*sync.exclude, *own_runs, *_NEVER)]
        self._filters = (*excluded, "--filter=:- .gitignore")

    @property
    def run(self) -> str:
        """The run's directory on a machine."""
        return folder_on_nodes(self.folder, self._run_dir)

    @property
    def shown(self) -> str:
        """The directory that holds both, as people write it."""
        return self.folder if self.folder.startswith("/") else f"~/{self.folder}"

    def commands(self, host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the commands that bring the working directory and the run's directory to a machine, in this order."""

        def command(filters: Sequence[str], source: Path, target: str) -> tuple[str, ...]:
            made = f"mkdir -p {shlex.quote(target)} && rsync"
            return (*_THERE, *filters, *_through_ssh(host), "--rsync-path", made, f"{source}/", _at(host, target))

        left_out = [f"--exclude={pattern}" for pattern in _NOT_OF_THE_RUN]
        project = f"{self.folder}/{_PROJECT}"
        return command(self._filters, self._workdir, project), command(left_out, self._run_dir, self.run)

    def measure(self, sync: Sync) -> str:
        """Return how much would be copied: ``3 files, 510 B``.

        Raises:
            LaunchError: there is no rsync.
            JobError: the directory cannot be read, or is larger than the job allows: it was hardly meant.
        """
        command = [*_THERE, "--dry-run", "--out-format=%l %n", *self._filters, f"{self._workdir}/", "/nowhere"]
        answer = run_one(command, os.environ)
        if answer.code:
            fix = "leave out what cannot be read: sync.exclude in the job file"
            raise JobError("the working directory cannot be read", why=error_of_rsync(answer), fix=fix)
        found = _LISTED.findall(answer.out)
        sizes: Counter[str] = Counter()
        for length, name in found:
            top, inside, _ = name.partition("/")
            sizes[top + inside] += int(length)
        size = f"{format_count(len(found), 'file')}, {format_size(sizes.total())}"
        if sizes.total() > sync.max_size:
            largest = sizes.most_common(3)
            named = ", ".join(f"{name} {format_size(amount)}" for name, amount in largest)
            raise JobError(
                f"the working directory is too large to be copied to each machine: {size}",
                why=f"sync.max_size is {format_memory(sync.max_size)}; the largest in it: {named}",
                fix=f"sync: {{method: rsync, exclude: [/{largest[0][0]}]}}, or a larger sync.max_size",
            )
        return size

    def entry(self, entry: Program, job: Job) -> Program:
        """Return what the ranks run, as seen from the copied directory; raise a JobError if it lies elsewhere."""
        if entry.kind == "module" or not Path(entry.target).is_absolute():
            return entry
        if job.binary and os.sep not in job.binary:
            return entry._replace(target=job.binary)
        try:
            return entry._replace(target=str(Path(entry.target).relative_to(self._workdir)))
        except ValueError as error:
            raise JobError(
                f"{entry.target} is outside of the working directory, and only that is copied to the machines",
                why=f"the working directory is {self._workdir}",
                fix="--workdir with a directory that holds all that the job needs",
            ) from error

    def environment(self, environment: Environment) -> Environment:
        """Return the environment with a path of a virtual environment that is right on the machines."""
        venv = Path(environment.venv) if environment.venv else None
        if not venv or self._workdir not in venv.parents:
            return environment
        return environment.model_copy(update={"venv": str(venv.relative_to(self._workdir))})


def error_of_rsync(answer: Answer) -> str:
    """Return what ssh or a shell printed, else rsync's first line: its others follow from that."""
    lines = [line.strip() for line in answer.err.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("rsync")] or lines
    return lines[0] if lines else f"rsync exited with code {answer.code}"


def place_here(path: str, folder: str, workdir: Path, run_dir: Path) -> Path:
    """Return where a directory that ranks have written to on a machine belongs here.

    What is in the copies below ``folder`` goes to their originals; what is elsewhere goes to the run.
    """
    is_absolute = folder.startswith("/")
    before, found, inside = path.partition(f"{folder}/" if is_absolute else f"/{folder}/")
    if found and not (is_absolute and before):
        for copy, original in ((_PROJECT, workdir), (f"runs/{run_dir.name}", run_dir)):
            if inside == copy or inside.startswith(f"{copy}/"):
                return original / inside[len(copy) + 1 :]
    return run_dir / Path(path).name


def _at(host: Host, folder: str) -> str:
    """Return a directory of a host as rsync takes it; the user is in :func:`_through_ssh`."""
    return f"[{host.name}]:{folder}/" if ":" in host.name else f"{host.name}:{folder}/"


def _through_ssh(host: Host) -> tuple[str, ...]:
    """Return the arguments of rsync that make it use ssh as all else does."""
    return ("-e", shlex.join(["ssh", *ssh_options(host)]))


class Fetcher:
    """Fetches now and then what the machines of a run write; does nothing for a run whose machines share its directory.

    ``folder`` is the run's directory here.
    """

    def __init__(self, folder: Path, handle: Handle) -> None:
        self._folder, self._copied_to = folder, handle.extra.get("copied_to", "")
        self._workdir = Path(handle.extra.get("workdir", ""))
        nodes = handle.extra["nodes"] if self._copied_to else ()
        self._nodes = [(int(node["node"]), parse_hosts([node["host"]])[0]) for node in nodes]
        self._next = self._next_complete = 0.0
        self._newest: str | None = None
        self._coming: subprocess.Popen[bytes] | None = None
        self._silent: dict[int, tuple[float, str]] = {}
        self._missing: dict[str, str] | None = None

    def fetch(self) -> None:
        """Fetch what is new, unless that was just done or another command does so."""
        if not self._copied_to or time.monotonic() < self._next:
            return
        with self._alone(wait=False) as is_alone:
            if is_alone:
                self._fetch_files()
                if self._next:  # A command that fetches once does not start what takes long.
                    self._fetch_checkpoints()
        self._next = time.monotonic() + _GROWING_SECONDS

    def finish(self) -> dict[str, str]:
        """Fetch all that there is, once; return the hosts from which it cannot be had, and what rsync or ssh says."""
        if self._missing is not None:
            return self._missing
        self._missing = {}
        if not self._copied_to:
            return {}
        with self._alone(wait=True) as is_alone:
            if is_alone:
                self._next_complete = 0.0
                self._missing = self._fetch_files()
                if self._coming:
                    self._coming.wait()
                self._newest = None  # What came may be older than its name: that is reported first.
                self._fetch_checkpoints()
                if self._coming and (code := self._coming.wait()) not in (0, _VANISHED):
                    what = f"rsync of the checkpoints exited with code {code}"
                    self._missing.setdefault(str(self._nodes[0][1]), what)
        return self._missing

    @contextlib.contextmanager
    def _alone(self, *, wait: bool) -> Iterator[bool]:
        """Keep other commands from fetching; yield whether none does. A user who may only read here fetches nothing."""
        with contextlib.ExitStack() as opened:
            is_alone = False
            with contextlib.suppress(OSError):
                stream = opened.enter_context((self._folder / _LOCK).open("a"))
                fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            yield is_alone

    def _fetch_files(self) -> dict[str, str]:
        """Append what is new of logs and events, and now and then fetch the other files complete.

        A machine that could not be reached is left alone for a while.

        Returns:
            What failed, by host.
        """
        is_time = time.monotonic() >= self._next_complete
        failed: dict[int, str] = {}
        for is_complete in (False, True) if is_time else (False,):
            now = time.monotonic()
            silent = {node: said for node, (until, said) in self._silent.items() if now < until}
            queried = [(node, host) for node, host in self._nodes if node not in silent]
            commands = [self._command(node, host, is_complete=is_complete) for node, host in queried]
            answers = run_all(commands, os.environ, seconds=_PATIENCE)
            failed |= silent
            for (node, _), answer in zip(queried, answers, strict=True):
                if answer.code not in (0, _VANISHED):
                    failed[node] = error_of_rsync(answer)
                if answer.unreached:
                    self._silent[node] = (time.monotonic() + _SILENT_SECONDS, failed[node])
        if is_time:
            self._next_complete = time.monotonic() + _COMPLETE_SECONDS
        return {str(host): failed[node] for node, host in self._nodes if failed.get(node)}

    def _command(self, node: int, host: Host, *, is_complete: bool) -> tuple[str, ...]:
        """Build the command for a node's files in the newest attempt, and on node 0 for what rank 0 reports."""
        folder = Path("/", contract.node_dir(newest_attempt(self._folder), node))
        shown = [f"{each}/" for each in (*list(folder.parents)[-2::-1], folder)]
        how = ["--append"]
        if is_complete:
            how = [f"--exclude={pattern}" for pattern in _GROWING]
            shown.append(f"{folder}/**")
        else:
            shown += [f"{folder}/{pattern}" for pattern in _GROWING]
            shown += [f"/{name}" for name in _OF_THE_TRAINING if node == 0]
        source = _at(host, folder_on_nodes(self._copied_to, self._folder))
        filters = (*how, *(f"--include={path}" for path in shown), "--exclude=*")
        return (*_BACK, *filters, *_through_ssh(host), source, f"{self._folder}/")

    def _fetch_checkpoints(self) -> None:
        """Start to fetch rank 0's checkpoints if there is a new one, unless that is under way.

        The run's checkpoints here become those that are there; others here stay.
        """
        # Oldest first, as node 0 names them.
        paths = [save.path for save in read_saves(self._folder) if save.path]
        if not paths or paths[-1] == self._newest or (self._coming and self._coming.poll() is None):
            return
        self._newest = paths[-1]
        source = Path(paths[-1]).parent
        target = place_here(str(source), self._copied_to, self._workdir, self._folder)
        target.mkdir(parents=True, exist_ok=True)
        ours = {Path(path).name for path in paths}
        kept = (f"--filter=P /{entry.path.name}/" for entry in entries(target) if entry.path.name not in ours)
        shown = (f"--include=/{name}" for name in ("step-*/", "step-*/**", LATEST))
        _, host = self._nodes[0]
        filters = ("--delay-updates", "--delete", *kept, *shown, "--exclude=*")
        self._coming = subprocess.Popen(
            (*_BACK, *filters, *_through_ssh(host), _at(host, str(source)), f"{target}/"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is not for it.
        )
