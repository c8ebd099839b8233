"""Writes one rank's files of a checkpoint durably.

This runs in a thread beside the training, so it costs little: checksums and system calls that release the interpreter,
a low priority, and direct writes, which neither copy the state into the page cache nor make the kernel throttle other
writers when that is full.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from allranks.record.checkpoints import PART, checksum

#: Direct writes want addresses and lengths in multiples of this.
BLOCK = 4096
#: Pages that are touched in one call, few enough for torch to use one thread.
_TOUCHED = 16384 * BLOCK
#: Added to the niceness of the writer's thread. At 19 it gets next to nothing on a busy machine, and at 0 it takes half
#: a core from the training.
_NICER = 5
_DIRECT = getattr(os, "O_DIRECT", 0)


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
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Fewer faults; data loader workers need no copy of it.
                with suppress(AttributeError, OSError):
                    pages.madvise(getattr(mmap, advice))
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self.view = memoryview((ctypes.c_char * size).from_address(self.bytes.data_ptr())).cast("B")

    def touch(self) -> None:
        """Let the kernel map all pages now, which takes longer than to copy to them."""
        for start in range(0, self.size, _TOUCHED):
            self.bytes[start : start + _TOUCHED : BLOCK] = 0


def lower_priority() -> None:
    """Lower the priority of the calling thread alone."""
    with suppress(OSError):  # A container may forbid it.
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def write_rank(
    directory: Path, rank: int, buffer: Buffer, size: int, index: dict[str, Any], small: dict[str, bytes]
) -> dict[str, dict[str, int]]:
    """Write the files of a rank durably into ``directory``, and return their entries in the manifest.

    They are the data (the first ``size`` bytes of the buffer), its ``index`` with checksums, and ``small`` files by
    name.
    """
    directory.mkdir(exist_ok=True)
    files: dict[str, dict[str, int]] = {}
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
    """Flush the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems cannot, and need not.
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
        direct, file = False, os.open(path, flags, 0o666)  # The file system has no direct writes.
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
