"""Memory that a state is copied into before it is written: made once, and used again for each save."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

#: Direct writes want addresses and lengths in multiples of this.
BLOCK = 4096
#: Pages that are touched in one call, few enough for torch to use one thread.
_TOUCHED = 16384 * BLOCK


class Buffer:
    """So many bytes of memory, rounded up to whole blocks.

    Args:
        size: bytes that are needed.
        pinned: make it quick to copy to from a GPU.

    Attributes:
        size: bytes that it has.
        bytes: a tensor over it.
    """

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        self.bytes = _pinned(self.size) if pinned else torch.frombuffer(_pages(self.size), dtype=torch.uint8)
        array = (ctypes.c_char * self.size).from_address(self.bytes.data_ptr())
        self._view = memoryview(array).cast("B")

    def touch(self) -> None:
        """Have the kernel find all pages now, which takes longer than copying into them."""
        for start in range(0, self.size, _TOUCHED):
            self.bytes[start : start + _TOUCHED : BLOCK] = 0

    def view(self, start: int, stop: int) -> memoryview:
        """Give a stretch of it to write to a file."""
        return self._view[start:stop]


def _pages(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Fewer faults; data loader workers need no copy of it.
        with suppress(AttributeError, OSError):
            pages.madvise(getattr(mmap, advice))
    return pages


def _pinned(size: int) -> torch.Tensor:
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=True)
    skipped = -memory.data_ptr() % BLOCK
    return memory[skipped : skipped + size]
