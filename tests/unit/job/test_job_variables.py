"""Names that a job cannot give a value: the shell's, ours, and those that each rank gets from its agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.errors import JobError
from allranks.job.load import load_job

OURS = "names that start with ALLRANKS_ are those of allranks itself"
AGENTS = "its agent sets it for each rank"


def error(folder: Path, name: str) -> str:
    (folder / "job.yaml").write_text(f"script: train.py\nenvironment:\n  variables:\n    {name}: 1\n")
    with pytest.raises(JobError) as caught:
        load_job(Path("job.yaml"), flags={}, environ={}, cwd=folder)
    return str(caught.value)


def test_names_that_bash_keeps_for_itself(tmp_path: Path) -> None:
    assert error(tmp_path, "UID") == (
        "job.yaml:4: 'UID' cannot be set: the shell keeps that name for itself\n  fix: another name"
    )


@pytest.mark.parametrize(
    ("name", "why", "fix"),
    [
        ("ALLRANKS_LIFELINE", OURS, "take another name"),
        ("ALLRANKS_RUN_DIR", OURS, "take another name"),
        ("ALLRANKS_BACKEND", OURS, "write launch.backend (--backend)"),
        ("ALLRANKS_NNODES", OURS, "write resources.nodes (--nnodes)"),
        ("ALLRANKS_LOG_LEVEL", OURS, "write debug (--log-level)"),
        ("RANK", AGENTS, "leave it out"),
        ("LOCAL_RANK", AGENTS, "leave it out"),
        ("GROUP_RANK", AGENTS, "leave it out"),
        ("ROLE_RANK", AGENTS, "leave it out"),
        ("ROLE_NAME", AGENTS, "leave it out"),
        ("ROLE_WORLD_SIZE", AGENTS, "leave it out"),
        (
            "WORLD_SIZE",
            AGENTS,
            "write resources.nodes (--nnodes) and launch.nproc_per_node (--nproc-per-node)",
        ),
        ("LOCAL_WORLD_SIZE", AGENTS, "write launch.nproc_per_node (--nproc-per-node)"),
        ("GROUP_WORLD_SIZE", AGENTS, "write resources.nodes (--nnodes)"),
        ("MASTER_ADDR", AGENTS, "write launch.master_addr (--master-addr)"),
        ("MASTER_PORT", AGENTS, "write launch.master_port (--master-port)"),
        ("TORCHELASTIC_MAX_RESTARTS", AGENTS, "write launch.max_restarts (--max-restarts)"),
        ("TORCHELASTIC_RUN_ID", AGENTS, "leave it out"),
    ],
)
def test_names_that_are_ours_or_the_agents(tmp_path: Path, name: str, why: str, fix: str) -> None:
    assert error(tmp_path, name) == f"job.yaml:4: '{name}' cannot be set\n  why: {why}\n  fix: {fix}"


def test_a_flag_gives_them_no_value_either(tmp_path: Path) -> None:
    flags = {"script": "t", "environment.variables": ("ALLRANKS_LIFELINE=1",)}
    with pytest.raises(JobError) as caught:
        load_job(None, flags=flags, environ={}, cwd=tmp_path)
    assert str(caught.value) == f"--env: 'ALLRANKS_LIFELINE' cannot be set\n  why: {OURS}\n  fix: take another name"


def test_names_that_only_look_alike_are_the_users(tmp_path: Path) -> None:
    names = ("ROLE_ARN", "RANKS", "MASTER_PORTS", "BACKEND", "NPROC_PER_NODE", "MY_ALLRANKS_X", "TORCH_LOGS")
    flags = {"script": "t", "environment.variables": tuple(f"{name}=1" for name in names)}
    loaded = load_job(None, flags=flags, environ={}, cwd=tmp_path)
    assert loaded.job.environment.variables == dict.fromkeys(names, "1")
