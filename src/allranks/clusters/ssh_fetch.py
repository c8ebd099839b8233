"""Brings what machines write of a run to its folder here, where they do not see that folder.

Logs and events only grow, and are added to; what is written anew each time comes whole, and less often. Checkpoints
come when there is a new one: whoever follows a run does not wait for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks import contract
from allranks.clusters.ssh_copy import at, place_here, place_of, said_by, through_ssh
from allranks.clusters.ssh_shell import run_all
from allranks.job.hosts import Host, parse_hosts
from allranks.runs.checkpoints import LATEST, entries
from allranks.runs.record import newest_attempt
from allranks.runs.saves import read_saves

_RSYNC = ("rsync", "-rptl", "-s", "--timeout=20")
_GROWING = ("*.out", "*.err", "*.jsonl", "*.log", contract.LOG_INDEX)
_OF_THE_TRAINING = (contract.METRICS_FILE, contract.CHECKPOINTS_FILE)
_GROWING_SECONDS, _WHOLE_SECONDS = 0.5, 5.0
#: After how long a machine that answers nothing is left alone, and for how long.
_PATIENCE, _SILENT_SECONDS = 20.0, 15.0
_LOCK = "fetching"
#: The exit code of rsync for a file that was removed while it came.
_VANISHED = 24


class Fetched:
    """What the machines of one run write, brought here now and then.

    Args:
        folder: of the run here.
        nodes: number and host of each node, from the run's handle.
        copied_to: where the copies are on each machine.
        workdir: absolute working directory of the job here.
    """

    def __init__(self, folder: Path, nodes: Sequence[Mapping[str, Any]], copied_to: str, workdir: Path) -> None:
        self._folder, self._copied_to, self._workdir = folder, copied_to, workdir
        self._nodes = [(int(node["node"]), parse_hosts([node["host"]])[0]) for node in nodes]
        self._next = self._next_whole = 0.0
        self._newest: str | None = None
        self._coming: subprocess.Popen[bytes] | None = None
        self._looks = 0
        self._silent: dict[int, tuple[float, str]] = {}
        self._missing: dict[str, str] | None = None

    def look(self) -> None:
        """Bring what is new, unless that was just done or another command is at it."""
        if time.monotonic() < self._next:
            return
        with self._alone(wait=False) as is_alone:
            if is_alone:
                self._bring()
                self._looks += 1
                if self._looks > 1:  # A command that looks once does not begin what takes long.
                    self._bring_checkpoints()
        self._next = time.monotonic() + _GROWING_SECONDS

    def finish(self) -> dict[str, str]:
        """Bring all that there is, once; return the hosts from which it cannot be had, and what rsync or ssh says."""
        if self._missing is None:
            with self._alone(wait=True) as is_alone:
                self._missing = self._bring_all() if is_alone else {}
        return self._missing

    def _bring_all(self) -> dict[str, str]:
        self._next_whole = 0.0
        missing = self._bring()
        self._wait_for_checkpoints()
        self._newest = None  # What came may be older than what it is called: a name is told first.
        self._bring_checkpoints()
        if (code := self._wait_for_checkpoints()) not in (0, _VANISHED):
            missing.setdefault(str(self._nodes[0][1]), f"rsync of the checkpoints ended with exit code {code}")
        return missing

    def _wait_for_checkpoints(self) -> int:
        return self._coming.wait() if self._coming else 0

    @contextlib.contextmanager
    def _alone(self, *, wait: bool) -> Iterator[bool]:
        """Keep other commands from doing the same; give whether none does. Who may only read here brings nothing."""
        try:
            stream = (self._folder / _LOCK).open("a")
        except OSError:
            yield False
            return
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _bring(self) -> dict[str, str]:
        failed = self._all(self._growing)
        if time.monotonic() >= self._next_whole:
            failed |= self._all(self._whole)
            self._next_whole = time.monotonic() + _WHOLE_SECONDS
        return failed

    def _all(self, command: Callable[[int, Host], tuple[str, ...]]) -> dict[str, str]:
        """Run a command for each node; one that could not be reached is left alone for a while."""
        now = time.monotonic()
        silent = {node: said for node, (until, said) in self._silent.items() if now < until}
        asked = [(node, host) for node, host in self._nodes if node not in silent]
        answers = run_all([command(node, host) for node, host in asked], os.environ, seconds=_PATIENCE)
        pairs = [(node, answer) for (node, _), answer in zip(asked, answers, strict=True)]
        failed = {node: said_by(answer) for node, answer in pairs if answer.code not in (0, _VANISHED)}
        until = time.monotonic() + _SILENT_SECONDS
        self._silent |= {node: (until, failed[node]) for node, answer in pairs if answer.unreached}
        return {str(host): said for node, host in self._nodes if (said := {**silent, **failed}.get(node))}

    def _growing(self, node: int, host: Host) -> tuple[str, ...]:
        """Build the command that adds to logs and events what has come; of node 0 also what rank 0 tells."""
        folder, above = self._folders(node)
        shown = [f"{folder}/{pattern}" for pattern in _GROWING]
        shown += [f"/{name}" for name in _OF_THE_TRAINING if node == 0]
        return self._command(host, "--append", *(f"--include={path}" for path in (*above, *shown)), "--exclude=*")

    def _whole(self, node: int, host: Host) -> tuple[str, ...]:
        folder, above = self._folders(node)
        left_out = (f"--exclude={pattern}" for pattern in _GROWING)
        shown = (f"--include={path}" for path in (*above, f"{folder}/**"))
        return self._command(host, *left_out, *shown, "--exclude=*")

    def _folders(self, node: int) -> tuple[str, tuple[str, ...]]:
        """Return a node's folder in the newest attempt, and the patterns of rsync for it and what is above it."""
        folder = Path("/", contract.node_dir(newest_attempt(self._folder), node))
        return str(folder), tuple(f"{each}/" for each in (*list(folder.parents)[-2::-1], folder))

    def _command(self, host: Host, *arguments: str) -> tuple[str, ...]:
        source = f"{at(host)}:{place_of(self._copied_to, self._folder)}/"
        return (*_RSYNC, *arguments, *through_ssh(host), source, f"{self._folder}/")

    # --- checkpoints ---

    def _bring_checkpoints(self) -> None:
        """Begin to bring rank 0's checkpoints where there is a new one, unless that is under way."""
        paths = self._checkpoints()
        if not paths or paths[-1] == self._newest or (self._coming and self._coming.poll() is None):
            return
        self._newest = paths[-1]
        self._coming = subprocess.Popen(
            self._mirror(paths),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is not for it.
        )

    def _checkpoints(self) -> list[str]:
        """Return the checkpoints that the run has written, oldest first, as node 0 names them."""
        return [save.path for save in read_saves(self._folder) if save.path]

    def _mirror(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Build the command after which those of the run are here that are there; others here stay."""
        source = Path(paths[-1]).parent
        target = place_here(str(source), self._copied_to, self._workdir, self._folder)
        target.mkdir(parents=True, exist_ok=True)
        ours = {Path(path).name for path in paths}
        others = [entry.path.name for entry in entries(target) if entry.path.name not in ours]
        kept = (f"--filter=P /{name}/" for name in others)
        shown = (f"--include=/{name}" for name in ("step-*/", "step-*/**", LATEST))
        _, host = self._nodes[0]
        return (
            *(*_RSYNC, "--delay-updates", "--delete", *kept, *shown, "--exclude=*", *through_ssh(host)),
            *(f"{at(host)}:{source}/", f"{target}/"),
        )
