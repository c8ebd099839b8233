"""Ranks as real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import warm_python
from environments import clean_environment
from waiting import PATIENCE
from warm_python import WarmPython


@pytest.fixture
def clean_env() -> dict[str, str]:
    """Give an environment in which nothing has started us as a rank."""
    return {**clean_environment(Path.home()), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def free_port() -> int:
    """Give a free port of those that no connection from here gets while the ranks are being started."""
    return warm_python.free_port()


@pytest.fixture
def run_ranks(
    tmp_path: Path, clean_env: dict[str, str], free_port: int, warm_ranks: WarmPython
) -> Callable[..., list[tuple[int, str, str]]]:
    """Give a function that runs a script on each of the ranks; it gives code, stdout and stderr of each."""

    def run(
        script: str, world_size: int = 2, ranks: Sequence[int] | None = None, **variables: str
    ) -> list[tuple[int, str, str]]:
        path = tmp_path / "script.py"
        path.write_text(script)
        with ExitStack() as started:
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
                assert warm_ranks.can_run(env)
                process = warm_ranks.start("script", str(path), (), Path.cwd(), env)
                processes.append(started.enter_context(closing(process)))
            return [_text(process.finish(PATIENCE)) for process in processes]

    return run


def _text(ended: tuple[int, bytes, bytes]) -> tuple[int, str, str]:
    code, out, err = ended
    return code, out.decode(), err.decode()
