"""The checksum of data files: the same whoever computes it, and another one for anything that changed."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib

import numpy  # noqa: F401 - the quick way is taken where NumPy is loaded
import torch  # noqa: F401 - and this one where NumPy is not
from hypothesis import given
from hypothesis import strategies as st

from allranks.record.checkpoints import BLOCK, checksum, plain_sums


def some(seed: int, blocks: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(blocks * BLOCK))


@given(st.integers(0, 99), st.integers(0, 70))
def test_all_ways_agree(seed, blocks):
    data = memoryview(some(seed, blocks))
    assert checksum(data) == zlib.crc32(plain_sums(data))


def test_torch_alone_agrees(monkeypatch):
    data = memoryview(some(1, 70))
    expected = checksum(data)
    monkeypatch.delitem(sys.modules, "numpy")
    assert checksum(data) == expected


@given(st.integers(0, 3 * BLOCK - 1), st.integers(1, 255))
def test_a_changed_byte_is_seen(place, change):
    data = some(0, 3)
    before = checksum(memoryview(data))
    data[place] ^= change
    assert checksum(memoryview(data)) != before


def test_blocks_that_changed_places_are_seen():
    data = some(0, 2)
    assert checksum(memoryview(data)) != checksum(memoryview(data[BLOCK:] + data[:BLOCK]))


def test_no_numpy_is_needed():
    script = (
        "import sys; from allranks.record.checkpoints import checksum\n"
        "print(checksum(memoryview(bytes(8192))), 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(checksum(memoryview(bytes(8192)))), "False"]
