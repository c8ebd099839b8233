"""The program that looks at a node, started as a node does, in a working directory like a user's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.checks.collect.gather import FACTS, ProbeRequest, read_reports
from allranks.checks.probe import _BOOTSTRAP, TOO_OLD, program

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
