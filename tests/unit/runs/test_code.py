"""The user's code of a run: the commit, and what is changed beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from allranks.runs.code import Code, code_of, differing_files, record_code
from allranks.runs.record import Record, Run

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="there is no git here")


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "init.defaultBranch=main")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, **files: str) -> str:
    """Write files that are named without their ``.py``, commit all, and return the commit."""
    if not (folder / ".git").exists():
        git(folder, "init")
        (folder / ".gitignore").write_text("runs/\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "a change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "run" / "attempts" / "000").mkdir(parents=True)
    about = {"name": "a", "cluster": "local", "kind": "local", "world_size": 1, "nnodes": 1, "host": "n1"}
    return Run(tmp_path / "run", Record(id="a", **about, stop_timeout=1.0, file_mode=0o600, created=0.0))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


def recorded(run: Run, script: Path, **environ: str) -> Code | None:
    if thread := record_code(run, script, environ):
        thread.join()
    return code_of(run)


def test_a_clean_work_tree(run: Run, tree: Path) -> None:
    made = commit(tree, train="1\n")
    (tree / "sub").mkdir()
    (tree / "new.py").write_text("not tracked\n")
    found = recorded(run, tree / "sub" / "train.py")
    assert found == Code(str(tree.resolve()), made, "main", {})
    assert str(found) == made[:9]
    assert not (run.attempt_folder / "code.diff").exists()


def test_tracked_files_that_are_changed_and_no_secret(run: Run, tree: Path) -> None:
    made = commit(tree, train="1\n", model="1\n", data="1\n")
    (tree / "train.py").write_text("2\n")
    (tree / "data.py").write_text("token = 'correct-horse'\nurl = 'https://hooks/T0'\n")
    found = recorded(run, tree / "train.py", HF_TOKEN="correct-horse", ALLRANKS_NOTIFY_WEBHOOK="https://hooks/T0")
    assert found
    assert (found.commit, [*found.changed], all(found.changed.values())) == (made, ["data.py", "train.py"], True)
    assert str(found).startswith(f"{made[:9]} with 2 files changed (")
    diff = run.attempt_folder / "code.diff"
    lines = [line for line in diff.read_text().splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert lines == ["-1", "+token = '<secret>'", "+url = '<secret>'", "-1", "+2"]
    assert diff.stat().st_mode & 0o777 == 0o600


def test_a_long_diff_is_cut(run: Run, tree: Path) -> None:
    commit(tree, data="", train="1\n")
    (tree / "data.py").write_text("0123456789abcde\n" * (1 << 15))
    (tree / "train.py").write_text("2\n")
    found = recorded(run, tree / "train.py")
    assert found
    assert found.changed == {"data.py": "", "train.py": ""}
    assert (run.attempt_folder / "code.diff").stat().st_size == 1 << 18


def test_what_is_in_no_work_tree_and_one_without_a_commit(run: Run, tree: Path) -> None:
    assert recorded(run, tree / "train.py") is None
    git(tree, "init")
    assert recorded(run, tree / "train.py") is None
    assert [*run.attempt_folder.iterdir()] == []


def test_files_that_differ(tree: Path) -> None:
    first = commit(tree, train="1\n", model="1\n", data="1\n")
    second = commit(tree, model="2\n")

    def code(made: str, **changed: str) -> Code:
        return Code(str(tree), made, "main", changed)

    assert differing_files(code(first), code(second)) == ["model.py"]
    assert differing_files(code(first, train="a"), code(second, data="b")) == ["data", "model.py", "train"]
    assert differing_files(code(first, train="a", data="b"), code(first, train="a", data="c")) == ["data"]
    assert differing_files(code(first, train=""), code(first, train="")) == ["train"]
    gone = Code(str(tree / "gone"), second, "main", {})
    assert differing_files(code(first), gone) == []


def test_compare_and_report_show_it(allranks: Any) -> None:
    allranks.folder.mkdir(exist_ok=True)
    first = commit(allranks.folder, train="")
    names = []
    for text in ("1\n", "2\n"):
        allranks.script(text)
        assert allranks("run", "train.py").rc == 0
        names.append(allranks.runs()[-1].name)
    second = commit(allranks.folder)
    assert allranks("run", "train.py", "--detach").rc == 0
    last = allranks.runs()[-1]
    assert json.loads((last / "attempts/000/code.json").read_text())["commit"] == second
    assert allranks("logs", "-f", last.name).rc == 0
    done = allranks("compare", *names, last.name)
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("code "))
    assert [row.count(first[:9]), row.count(second[:9]), row.count("with 1 file changed (")] == [2, 1, 2]
    for name in (names[1], last.name):
        assert f"allranks: code: 1 file of {name} differs: train.py\n" in done.stderr
    settings = dict(json.loads(allranks("report", last.name, "--json").stdout)["settings"])
    assert settings["code"] == second[:9]
