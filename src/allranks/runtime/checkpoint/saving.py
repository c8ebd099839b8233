"""Writes a save: the background thread, the barrier between ranks, and the files of a rank.

The thread must cost the training little: its checksums and system calls release the GIL, its priority is low, and
direct writes neither copy the state into the page cache nor make the kernel throttle other writers when that is full.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allranks.errors import AllranksError
from allranks.record.checkpoints import PART, checksum
from allranks.runtime.peers import Peers, poll

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: File names and their entries in the manifest.
Written = dict[str, dict[str, int]]
#: Direct writes need addresses and lengths that are multiples of this.
BLOCK = 4096
#: Bytes to touch in one call, few enough for torch to use one thread.
_TOUCHED = 16384 * BLOCK
#: Added to the niceness of the writer's thread. At 19 it gets next to nothing on a busy machine, and at 0 it takes half
#: a core from the training.
_NICENESS = 5
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass
class Save:
    """A save.

    Attributes:
        step: number of optimizer steps done.
        temporary: directory in which it is written.
        several: whether several ranks write.
        commit: what rank 0 does once all ranks have written; None when that has started, or is part of ``future``.
        future: this rank's work on it; None if only other ranks work.
        failure: why it failed, naming the rank; None if it is durable, or not complete.
    """

    step: int
    temporary: Path
    several: bool
    commit: Callable[[Written], Written] | None
    future: Future[Written] | None = None
    failure: str | None = None


class Saver:
    """Writes one save at a time. Ranks agree on ``pending`` and ``failure``, and then call ``settle``.

    Attributes:
        save: the save that is not complete, on all ranks alike; None between saves.
    """

    def __init__(self, ctx: Context) -> None:
        self._control = ctx.control
        self._rank = ctx.rank
        self._world_size = ctx.world_size
        self._barrier = StoreBarrier(ctx)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="allranks-checkpoint", initializer=lower_priority)
        self.save: Save | None = None

    @property
    def pending(self) -> bool:
        """Whether this rank still works on the save."""
        return self.save is not None and self.save.future is not None and not self.save.future.done()

    @property
    def failure(self) -> str | None:
        """Why this rank's part of the save failed; None if it did not, or is pending."""
        future = self.save.future if self.save else None
        error = future.exception() if future and future.done() else None
        if error is None:
            return None
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        else:
            reason = error.what if isinstance(error, AllranksError) else f"{type(error).__name__}: {error}"
        return f"rank {self._rank} on {socket.gethostname()}: {reason}"

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Run other work in the thread."""
        return self._pool.submit(work)

    def start(self, save: Save, write: Callable[[], Written] | None) -> None:
        """Start a save; all ranks call it. ``write`` writes this rank's files, if it has any."""
        assert self.save is None
        self.save = save
        self._barrier.start_round(self._world_size if save.several else 1)
        if not save.several:
            commit, save.commit = save.commit, None
            if write is not None:
                assert commit is not None
                save.future = self._submit(lambda: commit(write()))
        elif write is not None:
            save.future = self._submit(write)
        else:
            self._barrier.arrive(self._barrier.key)

    def settle(self, *, failed: bool) -> Save | None:
        """Continue once no rank works on the save; return it if it is complete, None if rank 0 commits it now.

        ``failed`` is True if any rank has failed: the same on all ranks.
        """
        save = self.save
        assert save is not None
        if failed:
            reasons = [reason for reason in self._control.gather(self.failure) if reason]
            save.failure = "; ".join(dict.fromkeys(reasons))
            if self._rank == 0:
                self._pool.submit(partial(shutil.rmtree, save.temporary, ignore_errors=True))
        if failed or save.commit is None:
            self.save = None
            return save
        commit, save.commit = save.commit, None
        files: Written = {}
        for written in self._control.gather(save.future.result() if save.future else {}):
            files.update(written)
        self._barrier.start_round(1)
        save.future = self._submit(lambda: commit(files)) if self._rank == 0 else None
        return None

    def finish(self) -> Save | None:
        """Wait until the save is complete and return it, None if there was none; all ranks call it."""
        ended = None
        while self.save is not None:
            if self.save.future is not None:
                wait([self.save.future])
            self._barrier.wait()
            ended = self.settle(failed=bool(self._control.agree(int(self.failure is not None))[0]))
        return ended

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _submit(self, work: Callable[[], Written]) -> Future[Written]:
        """Do this rank's part of a save in the thread, and then arrive at the barrier."""
        key = self._barrier.key

        def work_and_arrive() -> Written:
            try:
                return work()
            finally:
                self._barrier.arrive(key)

        return self._pool.submit(work_and_arrive)


class StoreBarrier:
    """A barrier in the store for the writing ranks, because a collective operation would time out.

    All ranks start the same rounds. A rank stops waiting if the store or another rank is gone; the next collective
    operation reports that.
    """

    def __init__(self, ctx: Context) -> None:
        self._store = ctx._store
        self._peers = Peers(ctx.rank, ctx.world_size, self._store)
        self._name = ctx.control.broadcast(secrets.token_hex(8))
        self._round = 0
        self._expected = 0
        self.key = ""

    def start_round(self, expected: int) -> None:
        """Start a round of ``expected`` ranks."""
        self._round += 1
        self._expected = expected
        self.key = f"checkpoint/{self._name}/{self._round}"

    def arrive(self, key: str) -> None:
        """Count this rank in the round with this key; from any thread."""
        with suppress(RuntimeError):
            self._store.add(key, 1)

    def wait(self) -> None:
        """Wait until all expected ranks have arrived, however long it takes."""
        with suppress(RuntimeError):
            poll(lambda: self._store.add(self.key, 0) >= self._expected or self._peers.are_missing() or None)


class Buffer:
    """Memory that holds a state while it is written: allocated once, and used again for each save.

    Args:
        size: number of bytes, rounded up to whole blocks.
        pinned: allocate pinned memory, for fast copies from a GPU.

    Attributes:
        bytes: a tensor over it.
        view: the same for writing to a file.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        if pinned:
            memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=True)
            skipped = -memory.data_ptr() % BLOCK
            self.bytes = memory[skipped : skipped + size]
        else:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Fewer page faults; no copy for data-loader workers.
                with suppress(AttributeError, OSError):
                    pages.madvise(getattr(mmap, advice))
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.view = memoryview((ctypes.c_char * size).from_address(self.bytes.data_ptr())).cast("B")

    def touch(self) -> None:
        """Make the kernel map all pages now, which takes longer than copying to them."""
        for start in range(0, self.size, _TOUCHED):
            self.bytes[start : start + _TOUCHED : BLOCK] = 0


def lower_priority() -> None:
    """Lower the priority of the calling thread alone."""
    with suppress(OSError):  # A container may forbid it.
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))


def write_rank(
    directory: Path, rank: int, buffer: Buffer, size: int, index: dict[str, Any], small: dict[str, bytes]
) -> Written:
    """Write the files of a rank durably into ``directory``, and return their entries in the manifest.

    They are the data (the first ``size`` bytes of the buffer), its ``index`` with checksums, and ``small`` files by
    name.
    """
    directory.mkdir(exist_ok=True)
    files: Written = {}
    if size or index["aliases"]:
        whole = -(-size // BLOCK) * BLOCK
        data, name = index["data"], f"rank-{rank}.json"
        sums = _write_data(directory / data, buffer, whole)
        files[data] = {"size": whole}
        small = {**small, name: json.dumps({**index, "part": PART, "sums": sums}).encode()}
    for name, content in small.items():
        write_durably(directory / name, content)
        files[name] = {"size": len(content), "crc32": zlib.crc32(content)}
    sync_directory(directory)
    return files


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file and flush it to disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems do not support it, and do not need it.
            raise
    finally:
        os.close(descriptor)


def _write_data(path: Path, buffer: Buffer, size: int) -> list[int]:
    """Write the first ``size`` bytes of the buffer part by part; return the checksum of each part."""
    sums = []
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
    direct = bool(_DIRECT)
    try:
        file = os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if not direct or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        direct, file = False, os.open(path, flags, 0o666)  # The file system does not support direct writes.
    try:
        for start in range(0, size, PART):
            part = buffer.view[start : min(start + PART, size)]
            sums.append(checksum(part))
            done = 0
            while done < len(part):
                try:
                    done += os.write(file, part[done:])
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    direct = False
                direct = direct and done % BLOCK == 0  # The rest of an incomplete write must start at a block.
                if not direct:
                    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)
            if not direct:
                os.fdatasync(file)  # Now, because the final fsync would write all of it while the training waits.
        os.fsync(file)
    finally:
        os.close(file)
    return sums
