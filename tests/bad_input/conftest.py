"""Disks that fill up and ports that are taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Give a port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    """Give a port on which nobody listens, outside the range that the kernel hands out by itself."""
    for port in range(23000 + os.getpid() % 4000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    pytest.skip("no free port below 32000")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Give a function that mounts a small disk of its own; it is unmounted after the test."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root of a Linux machine can mount a small disk")
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def fill() -> Callable[[Path], None]:
    """Give a function that writes until the disk of a directory is full."""

    def until_full(folder: Path) -> None:
        descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 16, 1 << 12):
                try:
                    while True:
                        os.write(descriptor, b"x" * size)
                except OSError:
                    continue
        finally:
            os.close(descriptor)

    return until_full
