"""Making a save count, and removing what no longer does. Rank 0 does this."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from allranks import contract
from allranks.runs.checkpoints import (
    LATEST,
    MANIFEST,
    DamagedError,
    Entry,
    Manifest,
    entries,
    name_of,
    read_manifest,
    unfinished,
)
from allranks.runtime.checkpoint.writing import sync_folder, write_durably
from allranks.runtime.say import say

#: What tells one job from another, the same when it is requeued. Checked in this order.
_JOB_IDS = (contract.RUN_DIR, contract.RUN_ID, "SLURM_JOB_ID", "PBS_JOBID", "TORCHELASTIC_RUN_ID")


def job_id() -> str:
    """Return eight letters that stand for this job; a script started by hand is known by its host and its path."""
    name = next(
        (f"{name}={os.environ[name]}" for name in _JOB_IDS if os.environ.get(name) not in (None, "", "none")), ""
    )
    return _short(name or f"{socket.gethostname()}/{Path(sys.argv[0]).resolve()}")


def owner(job: str, number: int) -> str:
    """Return what marks a folder that is not in use yet, or no more, as this process's own."""
    return f"{job}-{_short(socket.gethostname())}-{os.getpid()}.{number}"


def temporary_name(step: int, mark: str) -> str:
    """Return the name under which a checkpoint is written; ``mark`` is of :func:`owner`."""
    return f".{name_of(step)}.tmp-{mark}"


def commit(temporary: Path, manifest: Manifest, floor: int = -1) -> Path:
    """Write the manifest, give the checkpoint its name, and point ``latest`` to it; return its folder.

    Args:
        temporary: where it was written.
        manifest: of it.
        floor: a checkpoint of the same step whose sequence number is not above this is kept under another name.

    Raises:
        OSError: the disk is full, say. Nothing counts then.
    """
    folder = temporary.parent
    target = folder / name_of(manifest.step)
    write_durably(temporary / MANIFEST, manifest.to_text().encode())
    sync_folder(temporary)
    aside = None
    if target.exists():
        aside = _aside(target, temporary, floor)
        target.rename(aside)
    temporary.rename(target)
    sync_folder(folder)
    point_latest(target)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)
    elif aside is not None:
        say(f"{target} was there before this training began: it is now {aside.name}")
    return target


def note(target: Path | None, step: int, *, leaving: bool) -> None:
    """Note in the run's folder, if there is a run, how far the training is: by that an attempt's progress is known.

    Args:
        target: a checkpoint that counts; None for the beginning of an attempt.
        step: the steps done.
        leaving: whether all ranks leave now, to be continued from there.
    """
    run = os.environ.get(contract.RUN_DIR)
    if run:
        attempt = int(os.environ.get(contract.ATTEMPT) or 0)
        record = {
            "attempt": attempt,
            "step": step,
            "path": str(target.absolute()) if target else None,
            "leaving": leaving,
        }
        with Path(run, contract.CHECKPOINTS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")


def _aside(target: Path, temporary: Path, floor: int) -> Path:
    """Choose where a checkpoint goes that another one of its step replaces; a visible name, if it is to stay."""
    if _sequence(target) > floor:
        return target.parent / temporary.name.replace(".tmp-", ".old-", 1)
    names = (f"{target.name}.before{number}" for number in ("", *(f"-{count}" for count in range(2, 1000))))
    return next(target.parent / name for name in names if not (target.parent / name).exists())


def _sequence(path: Path) -> int:
    try:
        return read_manifest(path).sequence
    except DamagedError:
        return 0


def point_latest(target: Path) -> None:
    """Let ``latest`` beside the checkpoint point to it, at once."""
    link = target.parent / LATEST
    temporary = target.parent / f".{LATEST}-{os.getpid()}"
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        temporary.symlink_to(target.name)
    except PermissionError:  # A file system without links.
        write_durably(temporary, f"{target.name}\n".encode())
    temporary.replace(link)
    sync_folder(target.parent)


def superfluous(found: list[Entry], keep: int, mode: str | None) -> list[Entry]:
    """Choose what to remove: all but the newest ``keep`` and the best one.

    What is damaged does not count as kept. It goes when it is older than all that is kept.

    Args:
        found: the newest first.
        keep: how many to keep.
        mode: ``min`` or ``max``: which metric is best; None keeps none for its metric.
    """
    whole = [entry for entry in found if not entry.problem]
    kept = whole[:keep]
    if best := best_of(whole, mode):
        kept.append(best)
    oldest = found.index(kept[min(keep, len(kept)) - 1]) if kept else len(found)
    return [entry for place, entry in enumerate(found) if entry not in kept and (not entry.problem or place > oldest)]


def best_of(found: Iterable[Entry], mode: str | None) -> Entry | None:
    """Return the checkpoint with the best metric; the newest of those that are equally good.

    A metric that is no finite number is none.
    """
    known = [(entry.manifest.metric, entry) for entry in found if entry.manifest and entry.manifest.metric is not None]
    rated = [(metric, entry) for metric, entry in known if math.isfinite(metric)]
    if not rated or mode is None:
        return None
    best = (min if mode == "min" else max)(metric for metric, _ in rated)
    return next(entry for metric, entry in rated if metric == best)


def prune(
    folder: Path, keep: int, mode: str | None, job: str, began: float, damaged: set[Path], floor: int = -1
) -> list[str]:
    """Remove what is superfluous; return names of checkpoints that another job wrote since ``began``, left alone.

    Those whose sequence number is not above ``floor`` are left alone, and not counted.
    """
    found = [
        Entry(entry.path, entry.step, entry.manifest, entry.problem or ("damaged" if entry.path in damaged else None))
        for entry in entries(folder)
        if entry.sequence > floor
    ]
    foreign = [
        entry.path for entry in found if entry.manifest and entry.manifest.job != job and entry.manifest.time > began
    ]
    own = [entry for entry in found if entry.path not in foreign]
    for entry in superfluous(own, keep, mode):
        aside = folder / f".{entry.path.name}.gone-{owner(job, 0)}"
        with suppress(OSError):  # It is tried again after the next save.
            entry.path.rename(aside)
            shutil.rmtree(aside)
    return [path.name for path in foreign]


def clear_unfinished(folder: Path, job: str, but: Path | None = None) -> None:
    """Remove what processes that are gone were cut off in writing: those of this host, and of this job anywhere.

    The name tells the job, the host and the process. Of another job on another host it cannot be known whether it is
    at work, so that nothing of it is removed. A checkpoint that was cut off in being replaced by another one of the
    same step gets its name back, whosever it is, unless its process is alive here.
    """
    host = _short(socket.gethostname())
    for path, step, kind, mark in unfinished(folder):
        theirs, _, rest = mark.partition("-")
        where, _, process = rest.partition("-")
        process = process.partition(".")[0]
        if path == but or (where == host and process != str(os.getpid()) and _alive(process)):
            continue
        ours = theirs == job or where == host
        if kind == "old" and not (folder / name_of(step)).exists():
            if ours or (path / MANIFEST).exists():
                with suppress(OSError):
                    path.rename(folder / name_of(step))
        elif ours:
            shutil.rmtree(path, ignore_errors=True)


def last_sequence(folder: Path) -> int:
    """Return the sequence number of the newest checkpoint in the folder."""
    return max((entry.sequence for entry in entries(folder)), default=0)


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # Somebody else's, but alive.
    return True


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
