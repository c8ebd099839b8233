"""What is read of a script without running it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.probe.sources import read


@pytest.fixture
def read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that writes files, the first of them the script, and reads it as a node does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def look(train: str, files: dict[str, str] | None = None) -> dict[str, Any]:
        for name, text in {"train.py": train, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return read(tmp_path / "train.py")

    return look


def _missing(found: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(each["name"], Path(each["file"]).name, each["line"]) for each in found["missing"]]


def test_what_is_imported_in_any_case_must_be_there(read_in: Any) -> None:
    found = read_in(
        train="import json, nosuch_a\nfrom nosuch_b.c import d\nwith open('x'):\n    import nosuch_c\n"
        "if __name__ == '__main__':\n    import nosuch_d\n"
    )
    assert _missing(found) == [
        ("nosuch_a", "train.py", 1),
        ("nosuch_b.c", "train.py", 2),
        ("nosuch_c", "train.py", 4),
        ("nosuch_d", "train.py", 6),
    ]
    assert (found["error"], found["imports"]) == (None, 1)


def test_what_may_be_left_out_is_not_missed(read_in: Any) -> None:
    found = read_in(
        train="""\
try:
    import nosuch_a
except ImportError:
    nosuch_a = None
if input():
    import nosuch_b
def later():
    import nosuch_c
from . import nosuch_d
"""
    )
    assert found["missing"] == []


def test_modules_beside_the_script_are_read_too(read_in: Any) -> None:
    found = read_in(
        train="import own_parts.net\nimport own_parts.nosuch\n",
        files={"own_parts/__init__.py": "import nosuch_a\n", "own_parts/net.py": "import nosuch_b\n"},
    )
    assert _missing(found) == [("own_parts.nosuch", "train.py", 2), ("nosuch_b", "net.py", 1)]


def test_a_module_beside_the_script_counts_for_what_nodes_compare(read_in: Any) -> None:
    one = read_in(train="import own_net\n", files={"own_net.py": "x = 1\n"})["digest"]
    assert read_in(train="import own_net\n", files={"own_net.py": "x = 1\n"})["digest"] == one
    assert read_in(train="import own_net\n", files={"own_net.py": "x = 2\n"})["digest"] != one


@pytest.mark.parametrize(
    ("text", "alters"),
    [
        ("import sys\nsys.path.insert(0, '..')\nimport layers\n", True),
        ("import site\nsite.addsitedir('x')\n", True),
        ("import os, sys\nprint(os.path.join('a'), sys.argv)\n", False),
    ],
)
def test_a_script_that_alters_its_path_is_known(read_in: Any, text: str, alters: bool) -> None:
    assert read_in(train=text)["alters_path"] is alters


def test_nothing_is_run(read_in: Any, tmp_path: Path) -> None:
    effect = "open('ran', 'w')\n"
    read_in(train=f"import own_a.b\n{effect}", files={"own_a/__init__.py": effect, "own_a/b.py": effect})
    assert not (tmp_path / "ran").exists()


def test_what_is_no_python_is_told_with_its_line(read_in: Any, tmp_path: Path) -> None:
    error = read_in(train="x = 1\nif x\n")["error"]
    assert error.startswith(f"{tmp_path}/train.py:2 is no Python 3.")
    assert error.endswith(": expected ':'")


@given(st.lists(st.sampled_from(["import json", "x = 1", "import nosuch_q", "def f(): import nosuch_r"]), max_size=6))
def test_only_lines_at_the_top_count(lines: list[str]) -> None:
    from allranks.probe.sources import _imports

    wanted = [line.split()[1] for line in lines if line.startswith("import")]
    assert [name for name, _ in _imports(ast.parse("\n".join(lines)).body)] == wanted
