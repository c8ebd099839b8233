"""The directory of checkpoints: writes and commits a save there, and removes old ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from allranks import contract
from allranks.errors import AllranksError, RankError
from allranks.record.checkpoints import (
    LATEST,
    MANIFEST,
    CheckpointEntry,
    CorruptError,
    Manifest,
    entries,
    name_of,
    read_manifest,
    unfinished,
)
from allranks.runtime import log
from allranks.runtime.checkpoint.saving import sync_directory, write_durably, write_rank
from allranks.system import schedulers

if TYPE_CHECKING:
    from allranks.runtime.checkpoint.saving import Written
    from allranks.runtime.checkpoint.snapshot import Snapshot
    from allranks.runtime.checkpoint.state import StatePart
    from allranks.runtime.context import Context


class CheckpointDirectory:
    """Writes the files of this rank; rank 0 also commits checkpoints and removes old ones.

    ``best`` is the name of a metric, and whether its ``min`` or ``max`` is best.
    """

    def __init__(self, ctx: Context, path: Path, *, keep: int, best: tuple[str, str] | None) -> None:
        self._ctx = ctx
        self.path = path
        self._keep = keep
        self._best = best
        self._job = ctx.control.broadcast(job_id())
        #: Corrupt checkpoints, which do not count for ``keep``.
        self.corrupt: set[Path] = set()
        self._started = time.time()
        self._saves = 0
        self._sequence = 0
        #: Checkpoints with a sequence number up to this are never removed and do not count.
        self._floor = -1
        self._warned = False

    def prepare(self) -> bool:
        """Make the directory on rank 0 and try to write to it; return True if all ranks see and can write it.

        Raises:
            RankError: it cannot be made, read or written; on all ranks.
        """
        # Named like an unfinished save, so that the next process removes it if this one is killed.
        probe = self.path / self._ctx.control.broadcast(temporary_name(0, owner(self._job, 0)))
        failure = None
        if self._ctx.is_main:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                # First, because the rest of a killed save may fill the disk.
                self._clear_unfinished()
                self._sequence = max((entry.sequence for entry in entries(self.path)), default=0)
                probe.mkdir()
                (probe / "probe").write_bytes(b"1")
            except (AllranksError, OSError) as error:
                shutil.rmtree(probe, ignore_errors=True)
                failure = error.in_a_line if isinstance(error, AllranksError) else error.strerror or str(error)
        if failure := self._ctx.control.broadcast(failure):
            raise RankError(
                f"checkpoints cannot be written to {self.path}",
                why=failure,
                fix="free some space there, or give ctx.checkpoints() a directory that rank 0 can write",
            )
        shared = all(self._ctx.control.gather(probe.exists() and os.access(self.path, os.W_OK)))
        if self._ctx.is_main:
            shutil.rmtree(probe, ignore_errors=True)
        return shared

    def leave_alone(self) -> None:
        """Do not remove, replace or count the checkpoints that exist now."""
        self._floor = self._sequence

    def temporary(self, step: int, *, several: bool) -> Path:
        """Return the directory in which a save is written; the same on all ranks if several write."""
        self._saves += 1
        name = temporary_name(step, owner(self._job, self._saves))
        return self.path / (self._ctx.control.broadcast(name) if several else name)

    def manifest(self, step: int, metric: float | None, parts: Sequence[StatePart]) -> Manifest:
        """Return the manifest of the next save, without its files."""
        self._sequence += 1
        # From the state: after the last batch of an epoch, that is the next epoch.
        epochs = [part.held.state_dict().get("epoch") for part in parts if hasattr(part.held, "epoch")]
        return Manifest(
            step=step,
            sequence=self._sequence,
            time=time.time(),
            world_size=self._ctx.world_size,
            job=self._job,
            epoch=next((epoch for epoch in epochs if isinstance(epoch, int)), None),
            metric=metric,
            metric_name=self._best[0] if self._best else None,
            parts={part.name: part.kind for part in parts},
            files={},
            torch=torch.__version__,
        )

    def write(self, temporary: Path, snapshot: Snapshot) -> Written:
        """Write this rank's files."""
        small = {}
        if self._ctx.is_main:
            self._clear_unfinished(temporary)
            small = snapshot.small_files()
        layout, rank = snapshot.layout, self._ctx.rank
        index = {"data": f"rank-{rank}.data", "tensors": layout.index(), "aliases": layout.aliases}
        return write_rank(temporary, rank, snapshot.buffer, layout.size, index, small)

    def commit(self, temporary: Path, manifest: Manifest, written: Written) -> Written:
        """Write the manifest, give the checkpoint its name, point ``latest`` to it, and remove old checkpoints.

        An older checkpoint of the same step that must not be removed is renamed.
        """
        target = self.path / name_of(manifest.step)
        write_durably(temporary / MANIFEST, replace(manifest, files=written).to_text().encode())
        sync_directory(temporary)
        aside = None
        if target.exists():
            aside = self._aside(target, temporary)
            target.rename(aside)
        temporary.rename(target)
        sync_directory(self.path)
        point_latest(target)
        if aside is not None and aside.name.startswith("."):
            shutil.rmtree(aside, ignore_errors=True)
        elif aside is not None:
            log(f"{target} was there before this training started: it is now {aside.name}")
        self.corrupt.discard(target)
        note_save(target, manifest.step)
        try:
            self.prune()
        except Exception as error:  # noqa: BLE001 - the checkpoint is durable, whatever happens to older ones
            log(f"warning: old checkpoints in {self.path} could not be removed: {type(error).__name__}: {error}")
        return written

    def prune(self) -> None:
        """Remove all checkpoints but the newest and the best; warn if another job writes here too."""
        own, foreign = [], []
        for entry in entries(self.path):
            if entry.sequence <= self._floor:
                continue
            if entry.path in self.corrupt and not entry.problem:
                entry = replace(entry, problem="corrupt")
            if entry.manifest and entry.manifest.job != self._job and entry.manifest.time > self._started:
                foreign.append(entry.path.name)
            else:
                own.append(entry)
        for entry in self._superfluous(own):
            aside = self.path / f".{entry.path.name}.gone-{owner(self._job, 0)}"
            with suppress(OSError):  # The next save tries again.
                entry.path.rename(aside)
                shutil.rmtree(aside)
        if foreign and not self._warned:
            self._warned = True
            log(f"another job saves to {self.path} too ({foreign[0]}): give each job a directory of its own")

    def _superfluous(self, found: list[CheckpointEntry]) -> list[CheckpointEntry]:
        """Return the checkpoints to remove, from all sorted by age: all but the newest ``keep`` and the best one.

        A corrupt checkpoint does not count as kept. It is removed once it is older than all that are kept.
        """
        complete = [entry for entry in found if not entry.problem]
        kept = complete[: self._keep]
        oldest = found.index(kept[-1]) if kept else len(found)
        # Metrics that are not finite are ignored; among equal ones the newest counts.
        rated: dict[float, CheckpointEntry] = {}
        for entry in complete:
            if entry.manifest and entry.manifest.metric is not None and math.isfinite(entry.manifest.metric):
                rated.setdefault(entry.manifest.metric, entry)
        if rated and self._best:
            kept.append(rated[min(rated) if self._best[1] == "min" else max(rated)])
        return [
            entry for place, entry in enumerate(found) if entry not in kept and (not entry.problem or place > oldest)
        ]

    def _aside(self, target: Path, temporary: Path) -> Path:
        """Return a name for a checkpoint that one of the same step replaces: a visible name if it must be kept."""
        try:
            sequence = read_manifest(target).sequence
        except CorruptError:
            sequence = 0
        if sequence > self._floor:
            return target.parent / temporary.name.replace(".tmp-", ".old-", 1)
        aside, number = target.with_name(f"{target.name}.before"), 1
        while aside.exists():
            number += 1
            aside = target.with_name(f"{target.name}.before-{number}")
        return aside

    def _clear_unfinished(self, but: Path | None = None) -> None:
        """Remove unfinished saves of dead processes: those of this host, and of this job on any host.

        The name contains job, host and process. Saves of other jobs on other hosts stay, since those may be running. A
        checkpoint that an unfinished save was replacing gets its name back, whatever its job, unless its process is
        alive on this host.
        """
        host = _short(socket.gethostname())
        for path, step, kind, mark in unfinished(self.path):
            job, _, rest = mark.partition("-")
            where, _, process = rest.partition("-")
            process = process.partition(".")[0]
            if path == but or (where == host and process != str(os.getpid()) and _alive(process)):
                continue
            ours = job == self._job or where == host
            if kind == "old" and not (self.path / name_of(step)).exists():
                if ours or (path / MANIFEST).exists():
                    with suppress(OSError):
                        path.rename(self.path / name_of(step))
            elif ours:
                shutil.rmtree(path, ignore_errors=True)


def note_save(target: Path | None, step: int, *, leaving: bool = False) -> None:
    """Record a committed checkpoint in the run's directory, if there is one; None at the start of an attempt.

    ``leaving`` is True if all ranks exit now, to continue later from there.
    """
    run = os.environ.get(contract.RUN_DIR)
    if not run:
        return
    path = str(target.absolute()) if target else None
    attempt = int(os.environ.get(contract.ATTEMPT) or 0)
    record = {"attempt": attempt, "step": step, "path": path, "leaving": leaving, "time": round(time.time(), 3)}
    try:
        with Path(run, contract.CHECKPOINTS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
    except OSError as error:
        log(f"warning: the run's record does not have the checkpoint of step {step}: {error}")


def job_id() -> str:
    """Return eight letters that identify this job; host and path identify a script started by hand."""
    name = next((f"{name}={value}" for name, value in _job_ids() if value not in (None, "", "none")), "")
    return _short(name or f"{socket.gethostname()}/{Path(sys.argv[0]).resolve()}")


def _job_ids() -> Iterator[tuple[str, str | None]]:
    """Yield the variables that identify a job and stay the same when it is requeued, with their values."""
    yield from ((name, os.environ.get(name)) for name in (contract.RUN_DIR, contract.RUN_ID))
    for _, environment in schedulers.environments():
        yield environment.job_id, environment.job(os.environ)
    yield "TORCHELASTIC_RUN_ID", os.environ.get("TORCHELASTIC_RUN_ID")


def owner(job: str, number: int) -> str:
    """Return the mark of this process in the names of incomplete directories."""
    return f"{job}-{_short(socket.gethostname())}-{os.getpid()}.{number}"


def temporary_name(step: int, mark: str) -> str:
    """Return the name under which a checkpoint is written; ``mark`` is from :func:`owner`."""
    return f".{name_of(step)}.tmp-{mark}"


def point_latest(target: Path) -> None:
    """Point ``latest`` beside the checkpoint to it, atomically."""
    link = target.parent / LATEST
    temporary = target.parent / f".{LATEST}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(target.name)
    except PermissionError:  # A file system without links.
        write_durably(temporary, f"{target.name}\n".encode())
    temporary.replace(link)
    sync_directory(target.parent)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # Another user's process.
    return True


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
