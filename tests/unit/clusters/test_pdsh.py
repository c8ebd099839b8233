"""The command line of pdsh, and what is refused for it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from allranks.clusters.pdsh import pdsh_command, script
from allranks.clusters.registry import load_kind
from allranks.errors import JobError, LaunchError
from allranks.job.load import load_job
from allranks.launch.submit import Launch, dry_run

WORDS = {"gpu1": ("0", "8"), "ada@gpu2": ("1", "8")}


def plan_of(folder: Path, hosts: str, rest: str = ""):
    """Plan a job on hosts of pdsh."""
    (folder / "train.py").write_text("")
    (folder / "clusters.yaml").write_text("lab: {kind: pdsh}\n")
    (folder / "job.yaml").write_text(
        f"script: train.py\ncluster: lab\nresources: {{hosts: '{hosts}', gpus_per_node: 2}}\n{rest}"
    )
    loaded = load_job(folder / "job.yaml", flags={}, environ={}, cwd=folder)
    kind = load_kind(loaded.cluster.kind)
    launch = Launch(loaded.job, "", loaded.folder, folder / "runs", dict(os.environ))
    return kind, dry_run(launch, kind)


def test_one_command_for_all():
    command = pdsh_command("/runs/one", "start.sh", WORDS, ["0"])
    assert command == (
        *("pdsh", "-S", "-f", "2", "-w", "gpu1,ada@gpu2"),
        "bash /runs/one/pdsh.sh %h start.sh gpu1=0,8 gpu2=1,8 0",
    )


def test_a_folder_that_a_shell_and_pdsh_would_read_otherwise():
    (*_, said) = pdsh_command("/it's 100%h", "end.sh", WORDS, [])
    assert shlex.split(said.replace("%%", "%"))[1] == "/it's 100%h/pdsh.sh"


@pytest.mark.parametrize(
    ("host", "said"),
    [("gpu1", "gpu1 0 8 5"), ("gpu2", "gpu2 1 8 5"), ("%h", None), ("gpu", None)],
)
def test_each_machine_finds_its_own_words(tmp_path: Path, host: str, said: str | None):
    (tmp_path / "pdsh.sh").write_text(script("test", str(tmp_path)))
    (tmp_path / "start.sh").write_text('echo "$HOST $*"; exit 9\n')
    words = ["bash", str(tmp_path / "pdsh.sh"), host, "start.sh", "gpu1=0,8", "gpu2=1,8", "5"]
    done = subprocess.run(words, env={**os.environ, "HOST": host}, capture_output=True, text=True)
    if said:
        assert (done.returncode, done.stdout, done.stderr) == (9, f"{said}\nallranks: exit code 9\n", "")
    else:
        assert (done.returncode, done.stdout) == (71, "allranks: exit code 71\n")
        assert done.stderr.startswith(f"pdsh says that this is {host}, and no node is called so: it must ")


def test_the_plan_has_the_same_command_for_all_nodes(tmp_path: Path):
    kind, plan = plan_of(tmp_path, "gpu[1-2]")
    assert (plan.kind, plan.cluster) == ("pdsh", "lab")
    command = pdsh_command(plan.run_dir, "start.sh", {"gpu1": ("0", "2"), "gpu2": ("1", "2")}, ["0"])
    assert [node.command for node in plan.commands] == [command] * 2
    assert [node.command[-1][-4:] for node in kind.again(plan, 12).commands] == ["2 12"] * 2


@pytest.mark.parametrize(
    ("hosts", "rest", "what"),
    [
        ("gpu1:2222", "", "gpu1:2222: pdsh takes no port 2222"),
        ("2001:db8::7", "", "2001:db8::7: pdsh takes no address of IPv6"),
        ("gpu1", "sync: rsync\n", "sync: over pdsh nothing is copied to the machines"),
        ("gpu1", "launch: {attach: true}\n", "launch.attach: pdsh does not report a connection that breaks"),
    ],
)
def test_what_only_ssh_has(tmp_path: Path, hosts: str, rest: str, what: str):
    with pytest.raises(JobError) as told:
        plan_of(tmp_path, hosts, rest)
    assert told.value.what == what
    assert told.value.fix and told.value.fix.startswith("kind: ssh in the entry of clusters.yaml")


def test_there_is_no_pdsh(tmp_path: Path):
    kind, plan = plan_of(tmp_path, "gpu[1-2]")
    with pytest.raises(LaunchError) as told:
        kind.start(plan, {"PATH": str(tmp_path)}, detach=False, interrupted=lambda: 0)
    assert (told.value.what, told.value.fix) == ("cannot run pdsh", "install pdsh, or kind: ssh")
