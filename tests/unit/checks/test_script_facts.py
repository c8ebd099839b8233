"""What is read of a script without running it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from allranks.checks.collect import script
from allranks.checks.collect.gather import ProbeRequest

Read = Callable[..., dict[str, Any]]


@pytest.fixture
def read_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Give a function that writes files, and reads them as a node does; what is in site-packages is installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def look(train: str = "", files: dict[str, str] | None = None, module: str = "") -> dict[str, Any]:
        for name, text in {"train.py": train, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kind, target = ("module", module) if module else ("script", str(tmp_path / "train.py"))
        return script.script(ProbeRequest((), kind=kind, target=target))

    return look


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python for real."""
    environ = {**os.environ, "PYTHONPATH": str(folder / "site-packages")}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True)


def missing(found: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(each["name"], Path(each["file"]).name, each["line"]) for each in found["missing"]]


WORKS = {
    "a guard of a module that is imported": (
        "import helper",
        {"helper.py": "if __name__ == '__main__':\n    import nosuch\n"},
    ),
    "a with that swallows": ("import contextlib\nwith contextlib.suppress(ImportError):\n    import nosuch\n", {}),
    "a with that swallows, of somebody else's": (
        "from tried import try_import\nwith try_import() as tried:\n    import nosuch\n",
        {"site-packages/tried.py": "import contextlib\ndef try_import(): return contextlib.suppress(ImportError)\n"},
    ),
    "a module that is put there": ("import sys\nsys.modules['made'] = sys\nimport made\n", {}),
    "a path that a package alters": (
        "import rootutils\nrootutils.setup_root(__file__)\nimport deep\n",
        {
            "site-packages/rootutils.py": "import os, sys\ndef setup_root(file): sys.path.append(os.path.dirname(file)"
            " + '/lib')\n",
            "lib/deep.py": "",
        },
    ),
    "a package of two parts": (
        "import parted.second\n",
        {
            "parted/__init__.py": "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n",
            "site-packages/parted/__init__.py": "",
            "site-packages/parted/second.py": "",
        },
    ),
    "a directory in a package": ("import pack.sub.mod\n", {"pack/__init__.py": "", "pack/sub/mod.py": ""}),
    "a module that its package has a name like": (
        "from pack import net\n",
        {"pack/__init__.py": "def net(): ...\n", "pack/net.py": "import nosuch\n"},
    ),
    "modules that an installed package makes": (
        "import lazy.ops\n",
        {"site-packages/lazy/__init__.py": "import sys\nsys.modules['lazy.ops'] = sys\n"},
    ),
}


@pytest.mark.parametrize("what", WORKS)
def test_what_works_is_not_refused(read_in: Read, tmp_path: Path, what: str) -> None:
    found = read_in(*WORKS[what])
    assert run(tmp_path, "train.py").returncode == 0
    assert found["error"] is None
    assert found["missing"] == [] or found["alters_path"]


FAILS = {
    "in a module that is imported relatively": (
        "import pack.mod\n",
        {"pack/__init__.py": "", "pack/mod.py": "from .net import x\n", "pack/net.py": "x = 1\nimport nosuch\n"},
        ("nosuch", "net.py", 2),
    ),
    "in the package of a module": (
        "import pack.mod\n",
        {"pack/__init__.py": "import nosuch\n", "pack/mod.py": ""},
        ("nosuch", "__init__.py", 1),
    ),
}


@pytest.mark.parametrize("where", FAILS)
def test_what_is_missing_is_told(read_in: Read, tmp_path: Path, where: str) -> None:
    train, files, place = FAILS[where]
    found = read_in(train, files)
    assert missing(found) == [place]
    assert not found["alters_path"]
    last = run(tmp_path, "train.py").stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: No module named '{found['missing'][0]['name']}'"


def test_what_is_imported_in_any_case_must_be_there(read_in: Read) -> None:
    found = read_in(train="import json, nosuch_a\nfrom nosuch_b.c import d\nwith open('x'):\n    import nosuch_c\n")
    assert missing(found) == [
        ("nosuch_a", "train.py", 1),
        ("nosuch_b.c", "train.py", 2),
    ]
    assert (found["error"], found["imports"]) == (None, 1)


def test_what_may_be_left_out_is_not_missed(read_in: Read) -> None:
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


def test_modules_beside_the_script_are_read_too(read_in: Read) -> None:
    found = read_in(
        train="import own_parts.net\n",
        files={"own_parts/__init__.py": "import nosuch_a\n", "own_parts/net.py": "import nosuch_b\n"},
    )
    assert missing(found) == [("nosuch_b", "net.py", 1), ("nosuch_a", "__init__.py", 1)]


@pytest.mark.parametrize("train", ["import own_net\n", "from own_q import net\n", "from own_q.more import sure\n"])
def test_a_module_beside_the_script_counts_for_what_nodes_compare(read_in: Read, train: str) -> None:
    def digest(text: str) -> str:
        files = {
            **{"own_net.py": text, "own_q/__init__.py": "net = None\n", "own_q/net.py": text},
            **{"own_q/more.py": "from .lower import *\nsure = 1\n", "own_q/lower.py": text},
        }
        word: str = read_in(train=train, files=files)["digest"]
        return word

    one = digest("x = 1\n")
    assert digest("x = 1\n") == one
    assert digest("x = 2\n") != one


def test_where_else_a_module_is(read_in: Read, tmp_path: Path) -> None:
    read_in(files={"lib_q/a.py": "", "scripts/train.py": "import lib_q\nimport data_q\n", "data_q/x.csv": ""})
    found = script.script(ProbeRequest((), kind="script", target=str(tmp_path / "scripts/train.py")))
    assert [(each["name"], each["near"]) for each in found["missing"]] == [("lib_q", str(tmp_path)), ("data_q", None)]


def test_a_directory_of_very_many_files_is_not_searched_to_its_end(
    read_in: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in(files={"many_q/a.py": "", "scripts/train.py": "import many_q\n"})
    monkeypatch.setattr(script, "_MOST_ENTRIES", 0)
    found = script.script(ProbeRequest((), kind="script", target=str(tmp_path / "scripts/train.py")))
    assert [each["near"] for each in found["missing"]] == [None]


@pytest.mark.parametrize(
    ("folder", "owner", "names"),
    [
        ("env/src", "sys.prefix", "env"),
        ("env/src", "sys.base_prefix", "env"),
        ("env/src", "os.__file__", "env/src/os.py"),
    ],
)
def test_python_below_the_script_is_not_the_job_s(
    read_in: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, owner: str, names: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    train, files = "import other_q.made\n", {f"{folder}/other_q/__init__.py": "import sys, nosuch_q\nsys.path\n"}
    assert missing(read_in(train, files)) == [("nosuch_q", "__init__.py", 1)]
    monkeypatch.setattr(owner, str(tmp_path / names))
    found = read_in(train, files)
    assert (found["missing"], found["alters_path"], found["imports"]) == ([], False, 1)


def test_what_is_installed_below_the_script_is_not_the_job_s(read_in: Read) -> None:
    files = {"site-packages/other_q/__init__.py": "import sys, nosuch_q\nsys.path\n"}
    found = read_in("import other_q.made\n", files)
    assert (found["missing"], found["alters_path"], found["imports"]) == ([], False, 1)


class Editable:
    """Finds a module that no directory has, as an editable install does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "built_q" else None


def test_what_another_finder_finds_is_there(read_in: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    train = "import built_q.core\n"
    assert missing(read_in(train)) == [("built_q.core", "train.py", 1)]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable()])
    assert read_in(train)["missing"] == []


def test_a_script_is_looked_for_beside_what_its_link_names(read_in: Read, tmp_path: Path) -> None:
    read_in(files={"real/train.py": "import beside_q\n", "real/beside_q.py": ""})
    (tmp_path / "link.py").symlink_to("real/train.py")
    assert run(tmp_path, "link.py").returncode == 0
    assert script.script(ProbeRequest((), kind="script", target=str(tmp_path / "link.py")))["missing"] == []


@pytest.mark.parametrize(
    ("text", "alters"),
    [
        ("import sys\nsys.path.insert(0, '..')\nimport layers\n", True),
        ("from sys import path\npath.insert(0, '..')\n", True),
        ("import site\nsite.addsitedir('x')\n", True),
        ("import pyximport\npyximport.install()\nimport fast\n", True),
        ("from autoroot import root\nimport mine\n", True),
        ("import os, sys\nprint(os.path.join('a'), sys.argv, cfg.path, self.modules)\n", False),
    ],
)
def test_a_script_that_alters_its_path_is_known(read_in: Read, text: str, alters: bool) -> None:
    assert read_in(train=text)["alters_path"] is alters


@pytest.mark.parametrize("module", ["spread.inner.go", "spread.inner"])
def test_a_module_in_plain_folders_is_run(read_in: Read, tmp_path: Path, module: str) -> None:
    text = "from .part import x\nimport nosuch\n"
    files = {"spread/inner/go.py": text, "spread/inner/__main__.py": text, "spread/inner/part.py": "x = 1\n"}
    found = read_in(files=files, module=module)
    assert [name for name, *_ in missing(found)] == ["nosuch"]
    assert run(tmp_path, "-m", module).stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'nosuch'"


def test_a_module_that_is_not_there(read_in: Read, tmp_path: Path) -> None:
    files = {"flat.py": "", "made/__init__.py": "__path__.append('elsewhere')\n", "elsewhere/sub.py": ""}
    assert read_in(files=files, module="flat.sub")["error"] == "there is no module flat.sub"
    assert run(tmp_path, "-m", "flat.sub").returncode == 1
    assert read_in(files=files, module="made.sub")["error"] is None
    assert run(tmp_path, "-m", "made.sub").returncode == 0


def test_nothing_is_run(read_in: Read, tmp_path: Path) -> None:
    effect = "open('ran', 'w')\n"
    read_in(train=f"import own_a.b\n{effect}", files={"own_a/__init__.py": effect, "own_a/b.py": effect})
    assert not (tmp_path / "ran").exists()


def test_what_is_no_python_is_told_with_its_line(read_in: Read, tmp_path: Path) -> None:
    found = read_in(train="import own\n", files={"own.py": "x = 1\nif x\n"})
    assert found["is_there"]
    assert found["error"].startswith(f"{tmp_path}/own.py:2 is not valid Python 3.")
    error = read_in(train="x = 1\nif x\n")["error"]
    assert error.startswith(f"{tmp_path}/train.py:2 is not valid Python 3.")
    assert error.endswith(": expected ':'")


ON_ONE_RANK = """\
import allranks
with allranks.init() as ctx:
    saver = ctx.checkpoints("there", model=ctx.prepare(make()))
    for step in range(9):
        if ctx.is_main and step % 3 == 0:
            saver.save()
    if ctx.rank == 0:
        print("done")
        ctx.barrier()
        ctx.metrics.means()
"""
#: Calls of rank 0 that wait for nobody, or are made by the others as well.
FINE = [
    "if ctx.is_main:\n    print('done')\n    other.save()\n",
    "if not ctx.is_main:\n    ctx.barrier()\n",
    "if ctx.is_main:\n    ctx.sum(1.0)\nelse:\n    ctx.sum(0.0)\n",
    "if step == 0:\n    ctx.barrier()\n",
    "if ctx.is_main or step:\n    ctx.barrier()\n",
]


def test_calls_of_rank_0_that_all_ranks_have_to_make_are_found(read_in: Read) -> None:
    found = [(each["call"], Path(each["file"]).name, each["line"]) for each in read_in(train=ON_ONE_RANK)["lone"]]
    calls = [("saver.save()", 6), ("ctx.barrier()", 9), ("ctx.metrics.means()", 10)]
    assert found == [(call, "train.py", line) for call, line in calls]


@pytest.mark.parametrize("text", FINE)
def test_what_rank_0_may_do_alone_is_not_found(read_in: Read, text: str) -> None:
    assert read_in(train=f"import allranks\n{text}")["lone"] == []
