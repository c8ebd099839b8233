"""The program that probes a node, started as a node does, in a working directory like a user's; and its job."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks import contract
from allranks.checks.collect.gather import FACTS, ProbeRequest, read_reports
from allranks.checks.probe import _BOOTSTRAP, TOO_OLD, _write_files, job_of, program, read_logs
from allranks.clusters.base import Probe, ProbeResult
from allranks.job.spec import Job
from allranks.system.commands import Answer

CODE = _BOOTSTRAP


def look(
    folder: Path, order: ProbeRequest, extra: tuple[Path, ...] = (), options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Have a directory looked at from within; return the facts."""
    command = [sys.executable, *options, "-c", CODE, "0"]
    done = subprocess.run(command, cwd=folder, input=program(order, extra), capture_output=True, text=True)
    assert done.stderr == ""
    told = read_reports(done.stdout)[0]
    assert told["errors"] == {}
    facts: dict[str, Any] = told["facts"]
    return facts


def test_no_module_of_the_program_is_a_file_of_the_job_s(tmp_path: Path) -> None:
    for name in sys.stdlib_module_names - {"builtins", "sys"}:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\nraise SystemExit(9)\n")
    (tmp_path / "train.py").write_text("import beside\n")
    (tmp_path / "beside.py").touch()
    wanted = tuple(name for name in FACTS if name not in ("site", "gpus"))
    found = look(tmp_path, ProbeRequest(wanted, kind="script", target=str(tmp_path / "train.py")))
    assert (found["script"]["missing"], found["script"]["imports"]) == ([], 1)
    found = look(tmp_path, ProbeRequest(("script",), kind="module", target="train"))
    assert (found["script"]["missing"], found["script"]["imports"]) == ([], 1)
    assert [*tmp_path.glob("ran-*")] == []


def test_what_is_sent_along_is_not_there_for_the_job(tmp_path: Path) -> None:
    (tmp_path / "sent_q.py").touch()
    train = tmp_path / "work" / "train.py"
    train.parent.mkdir()
    train.write_text("import allranks.runtime\nfrom allranks import init\nimport sent_q\n")
    order = ProbeRequest(("script",), kind="script", target=str(train))
    found = look(train.parent, order, (tmp_path / "sent_q.py",))
    assert [each["name"] for each in found["script"]["missing"]] == ["sent_q"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has -P since 3.11")
@pytest.mark.parametrize("target", ["train", "/train.py"])
def test_an_interpreter_that_leaves_the_folder_out_of_its_path(tmp_path: Path, target: str) -> None:
    (tmp_path / "train.py").write_text("import beside\n")
    (tmp_path / "beside.py").touch()
    kind, target = ("script", f"{tmp_path}/train.py") if "/" in target else ("module", target)
    found = look(tmp_path, ProbeRequest(("script",), kind=kind, target=target), options=("-P",))["script"]
    words = ["-m", target] if kind == "module" else [target]
    assert subprocess.run([sys.executable, "-P", *words], cwd=tmp_path, stderr=subprocess.DEVNULL).returncode == 1
    assert found["error"] == "there is no module train" if kind == "module" else len(found["missing"]) == 1


def test_a_python_that_is_too_old_says_so() -> None:
    ast.parse(CODE, feature_version=(3, 4))
    old = f"import sys\nsys.version_info = (3, 9, 1)\n{CODE}"
    done = subprocess.run([sys.executable, "-c", old, "0"], input="", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (TOO_OLD, "Python 3.9\n")


# --- by a job ---


def test_the_job_that_looks_asks_for_the_same_nodes_and_sets_nothing_up(tmp_path: Path) -> None:
    asked = Job.model_validate(
        {
            "script": "train.py",
            "resources": {"nodes": 4, "gpus_per_node": 8, "time": "2-0:00:00"},
            "scheduler": {"partition": "gpu", "array": "0-7", "output": "log"},
            "notify": {"mail": "ada@x.org", "command": "send"},
            "environment": {"conda": "torch", "variables": {"A": "1"}, "setup": "a", "node_setup": "b"},
            "launch": {"launcher_args": ["--mpi=none"]},
        }
    )
    mine = job_of(asked, tmp_path)
    assert (mine.script, mine.binary, mine.launch.nproc_per_node) == (None, "bash", 1)
    assert (mine.resources.nodes, mine.resources.gpus_per_node, mine.resources.time) == ((4, 4), 8, 300)
    assert (mine.scheduler.partition, mine.scheduler.array, mine.scheduler.output) == ("gpu", None, None)
    assert (mine.environment.conda, mine.environment.node_setup) == (None, ())
    assert mine.environment.variables == {"A": "1"}
    assert mine.launch.launcher_args == ("--mpi=none",)
    short = asked.model_copy(update={"resources": asked.resources.model_copy(update={"time": 60})})
    assert job_of(short, tmp_path).resources.time == 60


def test_a_rank_tells_how_its_look_ended_and_does_not_fail(tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    _write_files(Probe('read -r line; echo "$line for $1"; echo broken >&2; exit 7\n', "the program\n", folder, 1.0))
    words = job_of(Job(binary="true"), folder).args
    environ = {"PATH": "/usr/bin:/bin", "GROUP_RANK": "1", "HOSTNAME": "elsewhere"}
    done = subprocess.run(["bash", *words], env=environ, capture_output=True, text=True, check=True)
    node = tmp_path / "attempt" / "node-001"
    node.mkdir(parents=True)
    (node / "rank-1.out").write_text(done.stdout)
    (node / "rank-1.err").write_text(done.stderr)
    (told,) = read_logs(tmp_path / "attempt").values()
    assert told.host == "elsewhere"
    (tmp_path / "attempt" / "hosts").write_text("n1\nn2\nn3\n")
    (told,) = read_logs(tmp_path / "attempt").values()
    assert told.host == "n2"
    assert (told.answer.code, told.answer.last_words) == (7, "broken")
    assert "the program for 1\n" in told.answer.out


def test_what_was_decided_for_the_rank_that_looks_is_not_looked_at(tmp_path: Path) -> None:
    """The ranks of the job have other numbers of threads."""
    _write_files(Probe('echo "threads ${OMP_NUM_THREADS-unset} ${MKL_NUM_THREADS-unset}"\n', "", tmp_path, 1.0))
    words = job_of(Job(binary="true"), tmp_path).args
    environ = {"PATH": "/usr/bin:/bin", "GROUP_RANK": "0", "OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "4"}
    environ |= {contract.DECIDED: "OMP_NUM_THREADS GLOO_SOCKET_IFNAME"}
    done = subprocess.run(["bash", *words], env=environ, capture_output=True, text=True, check=True)
    assert "threads unset 4" in done.stdout.splitlines()


def test_a_look_that_has_not_ended_is_late(tmp_path: Path) -> None:
    node = tmp_path / "node-000"
    node.mkdir()
    (node / "rank-0.out").write_text("allranks-look 0 n1\n")
    late = Answer(1, "allranks-look 0 n1\n", "its probe did not finish in time", unreached=True, is_late=True)
    assert read_logs(tmp_path) == {0: ProbeResult("n1", late)}


def test_a_node_without_the_folder_tells_nothing_and_ends_well(tmp_path: Path) -> None:
    words = job_of(Job(binary="true"), tmp_path / "gone").args
    done = subprocess.run(["bash", *words], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
