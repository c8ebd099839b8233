"""Ranks as real processes."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL", "MASTER_", "TORCHELASTIC", "SLURM_", "PBS_", "OMPI_", "PMI", "ALLRANKS_")


@pytest.fixture
def clean_env() -> dict[str, str]:
    """Give an environment in which nothing has started us as a rank."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**env, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def free_port() -> int:
    """Give a port that is free, of those that no connection from here gets while the ranks are being started."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


@pytest.fixture
def run_ranks(tmp_path: Path, clean_env: dict[str, str], free_port: int) -> Callable[..., list[tuple[int, str, str]]]:
    """Give a function that runs a script on each of the ranks; it gives code, stdout and stderr of each."""

    def run(
        script: str, world_size: int = 2, ranks: Sequence[int] | None = None, **variables: str
    ) -> list[tuple[int, str, str]]:
        path = tmp_path / "script.py"
        path.write_text(script)
        processes = []
        for rank in range(world_size) if ranks is None else ranks:
            env = {
                **clean_env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port),
                **variables,
            }
            command = [sys.executable, str(path)]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        results = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=120)
                results.append((process.returncode, out, err))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return results

    return run
