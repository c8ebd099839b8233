"""Scripts that are not there or are no Python: refused at once, with nothing left behind."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
MISSING = "error: there is no script missing.py\n  why: looked for {folder}/missing.py\n"


def refused(allranks, *args, error: str) -> None:
    result = allranks("run", *args)
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr == error.format(folder=allranks.folder)
    assert allranks.runs() == []


def test_missing_script(allranks):
    refused(allranks, "missing.py", error=MISSING)


def test_missing_script_with_a_near_name(allranks):
    allranks.script("")
    error = "error: there is no script trian.py\n  why: looked for {folder}/trian.py\n  fix: did you mean train.py?\n"
    refused(allranks, "trian.py", error=error)


def test_missing_folder_of_a_script(allranks):
    error = "error: there is no script src/train.py\n  why: there is no directory {folder}/src\n"
    refused(allranks, "src/train.py", error=error)


def test_missing_script_of_a_job_file(allranks):
    allranks.job("script: missing.py\n")
    refused(allranks, error=MISSING)


def test_missing_program(allranks):
    error = "error: cannot run no-such-program\n  why: there is no such program here or on PATH\n"
    refused(allranks, "--binary", "no-such-program", error=error)


def test_program_that_is_not_executable(allranks):
    allranks.script("echo hi\n", "go.sh")
    error = "error: cannot run go.sh\n  why: it is not executable\n  fix: chmod +x go.sh\n"
    refused(allranks, "--binary", "go.sh", error=error)


def test_missing_working_directory(allranks):
    allranks.script("")
    error = "error: there is no working directory {folder}/no\n  fix: workdir (--workdir) must be a directory\n"
    refused(allranks, "train.py", "--workdir", "no", error=error)


def test_folder_without_main(allranks):
    (allranks.folder / "src").mkdir()
    refused(allranks, "src", error="error: src is a directory without a __main__.py\n  fix: name the script itself\n")


def test_link_to_nowhere(allranks):
    (allranks.folder / "train.py").symlink_to("gone.py")
    refused(allranks, "train.py", error="error: train.py is not a script\n  why: it points to gone.py\n")


def test_pipe_as_script(allranks):
    os.mkfifo(allranks.folder / "train.py")
    refused(
        allranks, "train.py", error="error: train.py is not a script\n  why: it is neither a file nor a directory\n"
    )


def test_elf_program(allranks):
    shutil.copyfile("/bin/true", allranks.folder / "my train")
    error = (
        "error: my train is not a Python script\n"
        "  why: it is a program of its own\n"
        "  fix: allranks run --binary './my train'\n"
    )
    refused(allranks, "my train", error=error)


def test_bash_script(allranks):
    allranks.script("#!/bin/bash\necho hi\n", "train.sh")
    error = (
        "error: train.sh is not a Python script\n"
        "  why: it is a program of its own\n"
        "  fix: allranks run --binary ./train.sh\n"
    )
    refused(allranks, "train.sh", error=error)


NO_PYTHON = {
    "text": (b"Dear reader,\nthis is no program.\n", f"train.py:1 is not valid Python {VERSION}", "invalid syntax"),
    "syntax": (b"import os\ndef f(:\n", f"train.py:2 is not valid Python {VERSION}", "invalid syntax"),
    "nul": (b"x = 1\0\n", "train.py is not a Python script", "it holds NUL bytes"),
    "latin-1": (b"a = 1\nb = '\xe9'\n", "train.py:2 cannot be read as Python", "byte 0xe9 is not utf-8"),
}


@pytest.mark.parametrize("kind", NO_PYTHON)
def test_source_that_is_no_python(allranks, kind: str):
    data, what, why = NO_PYTHON[kind]
    allranks.script(data)
    fix = "save it as UTF-8" if kind == "latin-1" else "correct it"
    refused(allranks, "train.py", error=f"error: {what}\n  why: {why}\n  fix: {fix}\n")


NEVER_SCRIPTS = {
    "job.json": ("it is JSON, and a job file ends with .yaml", "cp job.json job.yaml, since JSON is valid YAML; "),
    "job.toml": ("it is TOML, and a job file is YAML", "allranks init writes a job.yaml to start from; "),
    "a b.ipynb": ("it is a notebook", "make a script of it: jupyter nbconvert --to script 'a b.ipynb'"),
}


@pytest.mark.parametrize("name", NEVER_SCRIPTS)
def test_files_that_are_compiled_and_are_no_scripts(allranks, name: str):
    allranks.script("{}", name)
    why, fix = NEVER_SCRIPTS[name]
    fix += "a script ends with .py" if fix.endswith("; ") else ""
    refused(allranks, name, error=f"error: {name} is not a script\n  why: {why}\n  fix: {fix}\n")


@pytest.mark.parametrize(("typed", "meant"), [("train.py", "train"), ("./src/my.py", "src.my"), ("src/my", "src.my")])
def test_a_file_as_a_module(allranks, typed: str, meant: str):
    allranks.script("")
    error = (
        f"error: {typed} is a file, and -m takes the name of a module\n"
        f"  fix: write -m {meant}, or allranks run {typed}\n"
    )
    refused(allranks, "-m", typed, error=error)


def test_unknown_encoding(allranks):
    allranks.script(b"# coding: klingon\n")
    error = "error: train.py cannot be read as Python\n  why: there is no encoding klingon\n"
    refused(allranks, "train.py", error=error)


def test_source_in_an_encoding_that_it_names_is_no_error(allranks):
    allranks.script("# -*- coding: latin-1 -*-\nassert len('é') == 1\nprint('ok')\n".encode("latin-1"))
    result = allranks("run", "train.py")
    assert (result.rc, result.stdout) == (0, "[0] ok\n")


def test_warnings_of_the_compiler_are_the_ranks_own(allranks):
    allranks.script("x = 1\nprint(x is 1)\n")
    assert "SyntaxWarning" not in allranks("plan", "train.py").stderr


def test_syntax_of_another_interpreter_is_not_judged(allranks):
    """The ranks' Python may know what ours does not."""
    allranks.script("this is newer\n")
    assert allranks("plan", "train.py", "--python", "python9").rc == 0


def test_script_in_a_path_with_spaces_and_quotes(allranks, weird_tmp_path: Path):
    script = weird_tmp_path / 'it\'s "mine" $(touch pwned);.py'
    script.write_text("import sys\nprint(sys.argv, __file__)\n")
    result = allranks("run", script, "--", "a b", "$HOME")
    assert (result.rc, result.stdout) == (
        0,
        f"[0] {[str(script), 'a b', '$HOME']} {script}\n".replace("\n;", "\n[0] ;"),
    )
    assert not list(allranks.folder.rglob("pwned"))


def test_job_file_in_a_folder_with_a_weird_name(allranks, weird_tmp_path: Path):
    (weird_tmp_path / "train.py").write_text("import os\nprint(repr(os.getcwd()))\n")
    (weird_tmp_path / "job.yaml").write_text("script: train.py\n")
    result = allranks("run", weird_tmp_path / "job.yaml")
    assert (result.rc, result.stdout) == (0, f"[0] {str(weird_tmp_path)!r}\n")
    result = allranks("run", cwd=weird_tmp_path)
    assert (result.rc, result.stdout) == (0, f"[0] {str(weird_tmp_path)!r}\n")
    assert not list(weird_tmp_path.parent.rglob("pwned"))
