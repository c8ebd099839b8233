"""Every mistake is reported with its place; the messages are in tests/golden/messages.txt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import JobError
from allranks.job.load import load_job


def error(folder: Path, text: str | bytes | None = None, target: str | None = "job.yaml", **given: Any) -> str:
    """Return what is said about a job file of that text."""
    if text is not None:
        (folder / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    path = Path(target) if target is not None else None
    with pytest.raises(JobError) as caught:
        load_job(path, flags=given.get("flags", {}), environ=given.get("environ", {}), cwd=folder)
    assert caught.value.__context__ is None, "a traceback would show the values"
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("- a", "job.yaml:1"),
        (b"a: 1\nb: \xff", "job.yaml:2"),
        ("a: \x01", "job.yaml:1"),
        ("script: t\nname: [t", "job.yaml:2"),
        ("script: t\nname: n\nscript: u", "job.yaml:3"),
        ("script: !!python/object/apply:os.system [ls]", "job.yaml:1"),
        ("a: &a [*a]", "job.yaml:1"),
        ("[" * 3000, "job.yaml:1"),
        ("script: t\nresorces: {}", "job.yaml:2"),
        ("script: t\nlaunch: 3", "job.yaml:2"),
        ("script: t\nlaunch: {backend: nncl}", "job.yaml:2"),
        ("script: t\nresources:\n  time: soon", "job.yaml:3"),
        ("script: t\nargs: 'a \"b'", "job.yaml:2"),
        ('script: "a\\0b"', "job.yaml:1"),
        ("script: t\nmodule: m", "job.yaml:2"),
    ],
)
def test_an_error_names_the_line_and_hides_the_traceback(tmp_path: Path, text: str | bytes, where: str) -> None:
    assert error(tmp_path, text).startswith(f"{where}: ")


@pytest.mark.parametrize("value", ["eight", "2.5", "0", "-1"])
def test_an_error_names_where_the_value_is_from(tmp_path: Path, value: str) -> None:
    flags = {"launch.nproc_per_node": value}
    assert error(tmp_path, "script: t", flags=flags).startswith("--nproc-per-node: ")
    assert error(tmp_path, environ={"NPROC_PER_NODE": value}).startswith("NPROC_PER_NODE: ")
    assert error(tmp_path, f"script: t\nlaunch: {{nproc_per_node: {value}}}").startswith("job.yaml:2: ")


def test_several_mistakes_are_reported_at_once_in_their_order(tmp_path: Path) -> None:
    text = "script: t\nlaunch:\n  backend: mpi\n  nodse: 2\nresources:\n  gpus_per_node: many\n"
    assert error(tmp_path, text, flags={"launch.max_restarts": "-1"}).splitlines() == [
        "job.yaml:3: launch.backend cannot be 'mpi'",
        "  why: it must be nccl or gloo",
        "  fix: leave it out: allranks then chooses",
        "error: job.yaml:4: unknown key 'nodse' in launch",
        "  fix: did you mean 'resources.nodes'?",
        "error: job.yaml:6: resources.gpus_per_node cannot be 'many'",
        "  why: it must be a whole number",
        "  fix: write gpus_per_node: 1",
        "error: --max-restarts: cannot be '-1'",
        "  why: it must be at least 0",
        "  fix: --max-restarts 3",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch(mode=0)
    assert error(tmp_path).splitlines()[1:] == ["  why: permission denied", "  fix: ls -l job.yaml"]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = f"/proc/{os.getpid()}/mem"
    assert error(tmp_path, target=path).splitlines()[1:] == ["  why: input/output error", f"  fix: ls -l {path}"]


def test_a_huge_file_and_an_alias_bomb_do_not_hang(tmp_path: Path) -> None:
    assert error(tmp_path, "a: b\n" * 100_000).startswith("job.yaml: ")
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
    assert error(tmp_path, bomb).startswith("job.yaml:1: ")


def test_errors_in_a_cluster_file_name_its_line(tmp_path: Path) -> None:
    (tmp_path / "clusters.yaml").write_text("gpu: {launch: {x: 1}}\nlab: 3\nok: {kind: local, resources: {time: x}}\n")
    for name, where in (
        ("gpuu", "--on"),
        ("gpu", "clusters.yaml:1"),
        ("lab", "clusters.yaml:2"),
        ("ok", "clusters.yaml:3"),
    ):
        assert error(tmp_path, "script: t", flags={"cluster": name}).startswith(f"{where}: ")
