"""Every mistake has its place, the reason and the fix, in plain words."""

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


INIT = "allranks init writes one to start from"
DEEP = "lists and mappings are nested in each other more than 64 times"
SEE = "compare with the job file that allranks init writes"


@pytest.mark.parametrize(
    ("text", "what", "why", "fix"),
    [
        ("", "job.yaml: the file says nothing", "it is empty or holds only comments", INIT),
        ("# x\n---\n", "job.yaml: the file says nothing", "it is empty or holds only comments", INIT),
        (
            "- a",
            "job.yaml:1: the file must hold keys and values, not a list",
            None,
            f"write lines such as 'name: value'; {INIT}",
        ),
        (b"a: 1\nb: \xff", "job.yaml:2: the file is not UTF-8", None, "save it as UTF-8; is it a text file?"),
        (
            "a: \x01",
            "job.yaml:1: the character \\x01 cannot stand in a YAML file",
            None,
            "write it as an escape in double quotes, or remove it; is job.yaml a text file?",
        ),
        (
            "script: t\n\tname: x",
            "job.yaml:2: a tab stands here",
            "YAML takes no tabs",
            "write spaces instead of the tab",
        ),
        ("script: [t", "job.yaml:1: this is not YAML, at column 11", "a bracket is not closed", SEE),
        ("script: 't", "job.yaml:1: this is not YAML, at column 11", "a quotation mark is not closed", SEE),
        (
            "script: a: b",
            "job.yaml:1: this is not YAML, at column 10",
            "a colon stands where no key can be",
            "indent it as its neighbours are, or quote text that holds ': '",
        ),
        (
            "script: @x",
            "job.yaml:1: this is not YAML, at column 9",
            "'@' cannot stand at the start of a value",
            "put the value in quotes",
        ),
        (
            "script: *x",
            "job.yaml:1: this is not YAML, at column 9",
            "the alias *x has no anchor &x above it",
            SEE,
        ),
        ("[" * 3000, "job.yaml:1: this is not YAML, at column 66", DEEP, SEE),
        ("{a: " * 3000, "job.yaml:1: this is not YAML, at column 258", DEEP, SEE),
        ("- " * 3000, "job.yaml:1: this is not YAML, at column 130", DEEP, SEE),
        (
            "".join(f"{' ' * depth}a:\n" for depth in range(99)),
            "job.yaml:65: this is not YAML, at column 67",
            DEEP,
            SEE,
        ),
        (
            "script: t\nname: n\nscript: u",
            "job.yaml:3: the key 'script' is given twice",
            "it is also in line 1",
            "remove one of the two",
        ),
        (
            "script: !!python/object/apply:os.system [ls]",
            "job.yaml:1: the tag '!!python/object/apply:os.system' is not allowed",
            "job files hold plain values only",
            SEE,
        ),
        ("a: &a [*a]", "job.yaml:1: an alias contains itself", "it would never end", SEE),
        ("script: t\nresorces: {}", "job.yaml:2: unknown key 'resorces'", None, "did you mean 'resources'?"),
        (
            "partition: x",
            "job.yaml:1: unknown key 'partition'",
            None,
            "it is scheduler.partition: write partition under scheduler",
        ),
        (
            "resources:\n  partition: x",
            "job.yaml:2: unknown key 'partition' in resources",
            None,
            "it is scheduler.partition: write partition under scheduler",
        ),
        (
            "launch: {args: x}",
            "job.yaml:1: unknown key 'args' in launch",
            None,
            "args stands at the top level",
        ),
        (
            "resources: {mem: 3}",
            "job.yaml:1: unknown key 'mem' in resources",
            None,
            "did you mean 'resources.memory'?",
        ),
        (
            "environment: {HF_TOKEN: abc}",
            "job.yaml:1: unknown key 'HF_TOKEN' in environment",
            None,
            "it is environment.variables.HF_TOKEN: write HF_TOKEN under environment.variables",
        ),
        (
            "script: t\nlaunch: 3",
            "job.yaml:2: launch must be a mapping, not a number",
            None,
            "write 'launch:' and below it, indented, lines such as 'launcher: ...'",
        ),
        (
            "script: t\nlaunch: {backend: nncl}",
            "job.yaml:2: launch.backend cannot be 'nncl'",
            "it must be nccl or gloo",
            "did you mean 'nccl'?",
        ),
        (
            "script: t\nlaunch: {max_restarts: true}",
            "job.yaml:2: launch.max_restarts cannot be true",
            "it must be a number",
            None,
        ),
        (
            "script: t\nresources:\n  time: soon",
            "job.yaml:3: resources.time cannot be 'soon'",
            "invalid duration: 'soon'",
            "write 48:00:00, 2-12:00, 90 (minutes), 30min or 12h",
        ),
        (
            "script: t\nenvironment: {variables: {A: true}}",
            "job.yaml:2: environment.variables.A cannot be true",
            "it must be text",
            'put it in quotes: "true"',
        ),
        (
            "script: t\nenvironment: {variables: {1A: x}}",
            "job.yaml:2: invalid name of an environment variable: '1A'",
            "a name is letters, digits and '_', and does not start with a digit",
            None,
        ),
        ("script: t\nargs: [a, null]", "job.yaml:2: args entry 2 cannot be null", "it must be text", None),
        (
            "script: t\nargs: 'a \"b'",
            "job.yaml:2: args cannot be 'a \"b'",
            "a quotation mark is not closed",
            "write a list, one entry for each argument",
        ),
        (
            'script: "a\\0b"',
            "job.yaml:1: script holds a NUL character",
            "neither arguments nor environment variables can hold one",
            "remove it",
        ),
        (
            "script: t\nmodule: m",
            "job.yaml:2: script and module are given, but a job has only one of them",
            "script at job.yaml:1 and module at job.yaml:2",
            "remove module",
        ),
        (
            "name: x",
            "the job has no script, module or binary",
            "the job file names none",
            "write 'script: train.py' in the job file, or allranks run train.py (or -m MODULE, --binary FILE)",
        ),
        (
            "script: t\ncluster: loca",
            "job.yaml:2: there is no cluster 'loca'",
            "known clusters: local",
            "did you mean 'local'?",
        ),
        (
            "script: t\nenvironment:\n  setup: |\n    cd x && export HF_TOKEN=abc",
            "job.yaml:3: environment.setup gives HF_TOKEN a secret in plain text",
            "these lines are written into scripts and records",
            "put HF_TOKEN into environment.variables, or export it before you start allranks",
        ),
    ],
)
def test_mistakes_in_a_job_file(tmp_path: Path, text: str | bytes, what: str, why: str | None, fix: str | None) -> None:
    lines = [what, *([f"  why: {why}"] if why else []), *([f"  fix: {fix}"] if fix else [])]
    assert error(tmp_path, text) == "\n".join(lines)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("eight", "it must be a number, gpu, cpu or auto"),
        ("2.5", "it must be a number, gpu, cpu or auto"),
        ("0", "it must be at least 1\n  fix: write gpu for a rank per GPU, or auto"),
        ("-1", "it must be at least 1\n  fix: write gpu for a rank per GPU, or auto"),
    ],
)
def test_a_wrong_number_of_ranks(tmp_path: Path, value: str, why: str) -> None:
    flagged = error(tmp_path, "script: t", flags={"launch.nproc_per_node": value})
    assert flagged == f"--nproc-per-node: cannot be '{value}'\n  why: {why}"
    assert error(tmp_path, environ={"NPROC_PER_NODE": value}) == f"NPROC_PER_NODE: cannot be '{value}'\n  why: {why}"
    shown = value if value != "eight" else "'eight'"
    written = error(tmp_path, f"script: t\nlaunch: {{nproc_per_node: {value}}}")
    assert written == f"job.yaml:2: launch.nproc_per_node cannot be {shown}\n  why: {why}"


def test_several_mistakes_are_reported_at_once_in_their_order(tmp_path: Path) -> None:
    text = "script: t\nlaunch:\n  backend: mpi\n  nodse: 2\nresources:\n  gpus_per_node: many\n"
    assert error(tmp_path, text, flags={"launch.max_restarts": "-1"}) == (
        "job.yaml:3: launch.backend cannot be 'mpi' (it must be nccl or gloo)\n"
        "job.yaml:4: unknown key 'nodse' in launch (did you mean 'resources.nodes'?)\n"
        "job.yaml:6: resources.gpus_per_node cannot be 'many' (it must be a whole number)\n"
        "--max-restarts: cannot be '-1' (it must be at least 0)"
    )


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert error(tmp_path, target="job.yml") == f"job.yml: there is no such job file\n  fix: {INIT}"
    (tmp_path / "job.yaml").touch()
    assert error(tmp_path, target="jbo.yaml") == (
        "jbo.yaml: there is no such job file\n  fix: did you mean 'job.yaml'?"
    )
    assert error(tmp_path, target=".") == (
        ".: this is a directory, not a job file\n  fix: name the file in it: job.yaml"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch(mode=0)
    assert error(tmp_path) == "job.yaml: the file cannot be read\n  why: permission denied\n  fix: ls -l job.yaml"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = f"/proc/{os.getpid()}/mem"
    assert error(tmp_path, target=path) == (
        f"{path}: the file cannot be read\n  why: input/output error\n  fix: ls -l {path}"
    )


def test_a_huge_file_and_an_alias_bomb_do_not_hang(tmp_path: Path) -> None:
    assert error(tmp_path, "a: b\n" * 100_000).startswith("job.yaml: the file is larger than 256 kB")
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl", strict=True)
    )
    assert error(tmp_path, bomb).startswith("job.yaml:1: the file is too large\n  why: with its aliases it has over")


def test_clusters(tmp_path: Path) -> None:
    (tmp_path / "clusters.yaml").write_text("gpu: {launch: {x: 1}}\nlab: 3\nok: {kind: local, resources: {time: x}}\n")
    assert error(tmp_path, "script: t", flags={"cluster": "gpuu"}) == (
        "--on: there is no cluster 'gpuu'\n  why: known clusters: local, gpu, lab and ok\n  fix: did you mean 'gpu'?"
    )
    assert error(tmp_path, flags={"cluster": "gpu"}) == (
        "clusters.yaml:1: unknown key 'x' in launch (known here: launcher, agent, launcher_args, nproc_per_node, "
        "backend, max_restarts, restart_delay, stop_timeout, hang_timeout, on_hang, master_addr, master_port, attach, "
        "stdin, interface and warm)\n"
        "clusters.yaml:1: the cluster gpu has no kind (write 'kind: local' below it)"
    )
    assert error(tmp_path, flags={"cluster": "lab"}).startswith(
        "clusters.yaml:2: the cluster lab must be a mapping, not a number"
    )
    assert error(tmp_path, flags={"cluster": "ok"}).startswith("clusters.yaml:3: resources.time cannot be 'x'\n")


def test_a_variable_that_is_not_set_here(tmp_path: Path) -> None:
    assert error(tmp_path, "script: t", flags={"environment.variables": ("HF_TOKEN",)}) == (
        "--env: 'HF_TOKEN' is not set here\n  fix: export it, or write --env NAME=VALUE"
    )
