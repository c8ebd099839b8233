"""Names that a job cannot give a value: the shell's, ours, and those that each rank gets from its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import JobError
from allranks.job.load import load_job


def error(folder: Path, name: str) -> str:
    (folder / "job.yaml").write_text(f"script: train.py\nenvironment:\n  variables:\n    {name}: 1\n")
    with pytest.raises(JobError) as caught:
        load_job(Path("job.yaml"), flags={}, environ={}, cwd=folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("UID", ""),
        ("ALLRANKS_LIFELINE", ""),
        ("ALLRANKS_RUN_DIR", ""),
        ("ALLRANKS_BACKEND", "launch.backend (--backend)"),
        ("ALLRANKS_NNODES", "resources.nodes (--nnodes)"),
        ("ALLRANKS_LOG_LEVEL", "debug (--log-level)"),
        ("RANK", ""),
        ("LOCAL_RANK", ""),
        ("GROUP_RANK", ""),
        ("ROLE_RANK", ""),
        ("ROLE_NAME", ""),
        ("ROLE_WORLD_SIZE", ""),
        ("WORLD_SIZE", "resources.nodes (--nnodes) and launch.nproc_per_node (--nproc-per-node)"),
        ("LOCAL_WORLD_SIZE", "launch.nproc_per_node (--nproc-per-node)"),
        ("GROUP_WORLD_SIZE", "resources.nodes (--nnodes)"),
        ("MASTER_ADDR", "launch.master_addr (--master-addr)"),
        ("MASTER_PORT", "launch.master_port (--master-port)"),
        ("TORCHELASTIC_MAX_RESTARTS", "launch.max_restarts (--max-restarts)"),
        ("TORCHELASTIC_RUN_ID", ""),
    ],
)
def test_names_that_are_taken_and_the_key_in_their_place(tmp_path: Path, name: str, key: str) -> None:
    what, *_, fix = error(tmp_path, name).splitlines()
    assert what.startswith(f"job.yaml:4: '{name}' ")
    assert fix.endswith(key)


def test_a_flag_gives_them_no_value_either(tmp_path: Path) -> None:
    flags = {"script": "t", "environment.variables": ("ALLRANKS_LIFELINE=1",)}
    with pytest.raises(JobError) as caught:
        load_job(None, flags=flags, environ={}, cwd=tmp_path)
    assert str(caught.value).startswith("--env: 'ALLRANKS_LIFELINE' ")


def test_names_that_only_look_alike_are_the_users(tmp_path: Path) -> None:
    names = ("ROLE_ARN", "RANKS", "MASTER_PORTS", "BACKEND", "NPROC_PER_NODE", "MY_ALLRANKS_X", "TORCH_LOGS")
    flags = {"script": "t", "environment.variables": tuple(f"{name}=1" for name in names)}
    loaded = load_job(None, flags=flags, environ={}, cwd=tmp_path)
    assert loaded.job.environment.variables == dict.fromkeys(names, "1")
