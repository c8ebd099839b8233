"""Bytes on disk: one rank's files of a checkpoint, written so that they are there after a crash.

This runs in a thread of its own, beside the training, so it takes as little as it can: checksums and system calls
that release the interpreter, a low priority, and direct writes, which neither copy the state into the page cache
nor make the kernel throttle others when that is full.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from allranks.runs import blocksums
from allranks.runs.checkpoints import PART
from allranks.runtime.checkpoint.buffer import BLOCK, Buffer

#: What the writer's thread adds to the process's niceness. At 19 it gets next to nothing on a busy machine, and at 0
#: it takes half a core from the training while it computes.
_NICER = 5
#: Bytes that torch sums up in one thread.
_ALONE = 1 << 17
_DIRECT = getattr(os, "O_DIRECT", 0)


def give_way() -> None:
    """Let the calling thread, and no other, come after the training."""
    with suppress(OSError):  # A container may forbid it.
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def write_rank(
    folder: Path, rank: int, buffer: Buffer, size: int, index: dict[str, Any], small: dict[str, bytes]
) -> dict[str, dict[str, int]]:
    """Write the files of a rank durably into ``folder``, and return what the manifest says about them.

    Args:
        folder: made if it is not there.
        rank: this one.
        buffer: its first ``size`` bytes are the data.
        size: bytes of data; none gives no data file.
        index: of the data file, to which the checksums are added.
        small: other files and what is in them.

    Raises:
        OSError: the disk is full, say.
    """
    folder.mkdir(exist_ok=True)
    files: dict[str, dict[str, int]] = {}
    if size or index["aliases"]:
        whole = -(-size // BLOCK) * BLOCK
        data, name = index["data"], f"rank-{rank}.json"
        sums = _write_data(folder / data, buffer, whole)
        files[data] = {"size": whole}
        small = {**small, name: json.dumps({**index, "part": PART, "sums": sums}).encode()}
    for name, content in small.items():
        write_durably(folder / name, content)
        files[name] = {"size": len(content), "crc32": zlib.crc32(content)}
    sync_folder(folder)
    return files


def checksum(part: memoryview) -> int:
    """Return the checksum of a part; also where there is no NumPy, quickly."""
    if "numpy" in sys.modules:
        return blocksums.checksum(part)
    words, few = torch.frombuffer(part, dtype=torch.int64), _ALONE // 8
    pieces = [words[start : start + few] for start in range(0, len(words), few)]
    sums = torch.cat([piece.view(-1, blocksums.BLOCK // 8).sum(1) for piece in pieces])
    return blocksums.of_sums(bytes(sums.untyped_storage()))


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file and have it on disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some network file systems cannot, and need not.
            raise
    finally:
        os.close(descriptor)


def _write_data(path: Path, buffer: Buffer, size: int) -> list[int]:
    """Write the beginning of the buffer part by part; return the checksum of each."""
    sums = []
    direct = bool(_DIRECT)
    file = _open(path, direct)
    if file < 0:
        direct, file = False, _open(path, False)
    try:
        for start in range(0, size, PART):
            part = buffer.view(start, min(start + PART, size))
            sums.append(checksum(part))
            if direct and not _write(file, part, direct=True):
                os.close(file)
                direct, file = False, os.open(path, os.O_WRONLY)
                os.lseek(file, start, os.SEEK_SET)
            if not direct:
                _write(file, part, direct=False)
                os.fdatasync(file)  # Little by little: what piles up is written at the end, with everybody waiting.
        os.fsync(file)
    finally:
        os.close(file)
    return sums


def _open(path: Path, direct: bool) -> int:
    """Create a file; give -1 where the file system has no direct writes."""
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | (_DIRECT if direct else 0), 0o666)
    except OSError as error:
        if direct and error.errno in (errno.EINVAL, errno.ENOTSUP):
            return -1
        raise


def _write(file: int, part: memoryview, *, direct: bool) -> bool:
    """Write all of a part; give False if nothing of it could be written directly."""
    done = 0
    while done < len(part):
        try:
            count = os.write(file, part[done:])
        except OSError as error:
            if direct and error.errno == errno.EINVAL and not done:
                return False
            raise
        # The rest of a direct write that was cut short must begin at a block again.
        done += count - count % BLOCK if direct else count
        if direct and count % BLOCK:
            os.lseek(file, -(count % BLOCK), os.SEEK_CUR)
            if count < BLOCK:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return True
