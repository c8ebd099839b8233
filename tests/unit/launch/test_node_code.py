"""The archive of the code that a run carries for its nodes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from zipfile import ZipFile

import pytest

from allranks.record.files import copy_node_code

WHERE = """\
import allranks.agent.main as main, allranks.runtime.context as context
print(main.__file__, context.__file__, main.main.__code__.co_filename)
"""


def imported(archive: Path) -> list[str]:
    """Import from an archive, without this installation; return the files of two modules, and one as frames name it."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(archive)!r})\n{WHERE}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    copy_node_code(tmp_path / "code")
    return tmp_path / "code"


def test_modules_are_taken_compiled_whatever_the_times_of_the_sources_are(archive):
    from allranks.agent import main

    inside = archive / "allranks"
    files = [f"{inside}/agent/main.pyc", f"{inside}/runtime/context.pyc"]
    assert imported(archive) == [*files, main.__file__]


def test_another_version_of_python_takes_the_sources(archive, tmp_path):
    other = tmp_path / "other"
    with ZipFile(archive) as source, ZipFile(other, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data.replace(MAGIC_NUMBER, b"\0\0\r\n", 1) if name.endswith("c") else data)
    main = f"{other}/allranks/agent/main.py"
    assert imported(other) == [main, f"{other}/allranks/runtime/context.py", main]


def test_a_run_has_one_file_of_code(allranks):
    allranks.script("import allranks.agent as agent\nprint(agent.__file__)")
    done = allranks("run", "train.py")
    assert done.stdout == f"[0] {allranks.run()}/code/allranks/agent/__init__.pyc\n"
    assert len([path for path in allranks.run().rglob("*") if path.is_file()]) < 20
    assert (allranks.run() / "code").stat().st_mode & 0o777 == 0o600


def test_runs_share_their_code_unless_their_readers_differ(allranks):
    """It has 2 MB, and a directory may hold a thousand runs."""
    allranks.script("")
    for options in ([], [], ["--group-readable"], ["--group-readable"]):
        assert allranks("run", "train.py", *options).rc == 0
    codes = [(run / "code").stat() for run in sorted(allranks.runs())]
    assert [code.st_mode & 0o777 for code in codes] == [0o600, 0o600, 0o640, 0o640]
    first, second, third, fourth = (code.st_ino for code in codes)
    assert first == second != third == fourth


def test_code_that_has_changed_is_written_anew(archive, tmp_path):
    (tmp_path / "other.py").write_text("value = 1\n")
    copy_node_code(tmp_path / "same", earlier=archive)
    copy_node_code(tmp_path / "more", [tmp_path / "other.py"], earlier=archive)
    (tmp_path / "other.py").write_text("value = 22\n")
    copy_node_code(tmp_path / "changed", [tmp_path / "other.py"], earlier=tmp_path / "more")
    same, more, changed = (tmp_path / name for name in ("same", "more", "changed"))
    assert same.samefile(archive) and not more.samefile(archive) and not changed.samefile(more)
    assert ZipFile(changed).read("other.py") == b"value = 22\n"


def test_without_an_earlier_archive_one_is_written(archive, tmp_path):
    for earlier, text in ((tmp_path / "absent", None), (tmp_path / "empty", b""), (tmp_path / "foreign", b"x" * 99)):
        if text is not None:
            earlier.write_bytes(text)
        target = tmp_path / f"{earlier.name}-new"
        copy_node_code(target, earlier=earlier)
        assert target.read_bytes() == archive.read_bytes()
